"""What a model's code reaches, as tensors."""

import pytest
import torch
from torch import nn

from dosimeter.network.reach import Reach, _as_tensor


def test_lists_of_numbers_are_samples_too():
    assert torch.equal(_as_tensor([1.0, 2.5]), torch.tensor([1.0, 2.5], dtype=torch.float64))


def test_numbers_beyond_any_float_are_no_samples():
    assert _as_tensor([10**400, 1]) is None
    assert _as_tensor([[1.0], [2.0, 3.0]]) is None


SCRIPT = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Linear(4, 2)

    def forward(self, inputs):
        return {body}
"""


@pytest.mark.parametrize(
    ("body", "held"),
    [
        ("self.features(inputs)", False),
        ("self.features(inputs) + 0 * features.sum()", True),
        ("self.features(inputs) + 0 * globals()['features'].sum()", True),
        ("self.features(inputs) + 0 * sys.modules[__name__].features.sum()", True),
        ("(lambda given: given + 0 * features.sum())(self.features(inputs))", True),
    ],
)
def test_an_attribute_of_a_model_is_no_variable_of_its_script(body, held):
    script = {"__name__": "a_script", "nn": nn, "features": torch.rand(3, 4)}
    exec(SCRIPT.format(body=body), script)
    names = {name for name, _ in Reach(script["Net"]()).arrays().values()}
    assert ("a_script.features" in names) is held
