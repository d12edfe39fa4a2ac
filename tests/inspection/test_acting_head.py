"""Last layers that are no linear module, with features that are known."""

import torch
from torch import Tensor, nn

from dosimeter.inspection.acting_head import find_acting_head, logits_of


def test_probabilities_become_logits_up_to_a_constant_and_logits_stay(rng):
    logits = torch.randn(4, 5, generator=rng)
    found = logits_of(logits.softmax(1))
    torch.testing.assert_close(found - found.mean(1, keepdim=True), logits - logits.mean(1, keepdim=True))
    assert torch.equal(logits_of(logits), logits)
    one = torch.ones(4, 1)
    assert torch.equal(logits_of(one), one)


class BareHead(nn.Module):
    """The head is a matrix and a vector that no module applies."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.body, self.scale = nn.Linear(6, 4), scale
        self.matrix, self.offset = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(3))

    def features(self, inputs: Tensor) -> Tensor:
        return self.body(inputs).tanh()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.features(inputs) @ self.matrix + self.scale * self.offset


def test_a_bare_matrix_is_found_with_its_features_and_the_bias_as_it_acts(rng):
    model, inputs = BareHead(scale=2.0).double(), torch.rand(5, 6, generator=rng, dtype=torch.float64)
    head = find_acting_head(model, inputs, 3)
    assert (head.parameter, head.applied) == ("matrix", False)
    assert torch.equal(head.weight, model.matrix.T)
    torch.testing.assert_close(head.received, model.features(inputs))
    torch.testing.assert_close(head.bias, 2 * model.offset)


def test_a_kernel_of_one_pixel_that_is_averaged_acts_on_the_mean_feature(rng):
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 3, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()).double()
    inputs = torch.rand(5, 1, 6, 6, generator=rng, dtype=torch.float64)
    head = find_acting_head(model, inputs, 3)
    assert head.name == "2"
    torch.testing.assert_close(head.received, model[:2](inputs).mean((2, 3)))
    torch.testing.assert_close(head.bias, model[2].bias)


def test_behind_a_nonlinearity_there_is_none():
    model = nn.Sequential(nn.Linear(6, 3), nn.Tanh())
    assert find_acting_head(model, torch.rand(5, 6), 3) is None
