import math

import pytest
import torch

import dosimeter as dm
from dosimeter.randomness import generator

RNG = generator(0, "unused")


def test_the_whole_update_is_scaled_to_the_norm():
    sent = dm.defense("clipping", max_norm=1.0).protect({"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([[4.0]])}, RNG)
    assert torch.allclose(sent["a"], torch.tensor([0.6, 0.0]))
    assert torch.allclose(sent["b"], torch.tensor([[0.8]]))


def test_agrees_with_pytorch_on_a_model():
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)).double()
    model(torch.randn(4, 7, generator=generator(1, "inputs"), dtype=torch.float64)).square().sum().backward()
    update = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    sent = dm.defense("clipping", max_norm=0.5).protect(update, RNG)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    for name, parameter in model.named_parameters():
        assert torch.allclose(sent[name], parameter.grad, rtol=1e-5)


def test_a_small_update_stays_as_it_is():
    update = {"a": torch.tensor([0.1, -0.0]), "b": torch.zeros(3)}
    sent = dm.defense("clipping", max_norm=1.0).protect(update, RNG)
    assert torch.equal(sent["a"].view(torch.int32), update["a"].view(torch.int32))


def test_layer_mode_bounds_each_layer_on_its_own():
    sent = dm.defense("clipping", max_norm=1.0, mode="layer").protect({"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([0.5])}, RNG)
    assert torch.allclose(sent["a"], torch.tensor([0.6, 0.8]))
    assert sent["b"].item() == 0.5


def test_value_mode_cuts_each_entry():
    sent = dm.defense("clipping", max_norm=1.0, mode="value").protect({"a": torch.tensor([3.0, -0.25, -9.0])}, RNG)
    assert sent["a"].tolist() == [1.0, -0.25, -1.0]


def test_half_precision_does_not_overflow():
    update = {"a": torch.full((100,), 1000.0, dtype=torch.float16)}
    sent = dm.defense("clipping", max_norm=10.0).protect(update, RNG)
    assert sent["a"].dtype == torch.float16
    assert torch.allclose(sent["a"].float(), torch.ones(100), rtol=1e-3)


@pytest.mark.parametrize("bound", [0.0, -1.0, math.nan])
def test_a_bound_that_is_not_positive_is_refused(bound):
    with pytest.raises(ValueError, match=r"defense\.max_norm: expected a positive number"):
        dm.defense("clipping", max_norm=bound)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float16, 1e30), (torch.float32, 1e300)])
@pytest.mark.parametrize("mode", ["norm", "layer", "value"])
def test_a_bound_beyond_the_numbers_clips_nothing(mode, dtype, bound):
    update = {"weight": torch.tensor([[3.0, -4.0]], dtype=dtype)}
    sent = dm.defense("clipping", max_norm=bound, mode=mode).protect(update, generator(0, "clipping"))
    assert torch.equal(sent["weight"], update["weight"])
