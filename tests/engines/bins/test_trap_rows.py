"""Trap rows: signs and magnitudes as published, and the share of inputs that fire them."""

import pytest
import torch
from torch import nn

import dosimeter as dm
from dosimeter.engines.bins.trap_rows import LAYER_STRENGTH, TrapLayer, _trap_rows, find_first_linear, plant_traps, trap_scale


def test_half_of_a_row_mirrors_the_other_half_scaled(rng):
    rows = _trap_rows(20, 31, 0.9, rng)
    for row in rows:
        negative, positive = -row[row < 0], row[row > 0]
        assert len(negative) == len(positive) == 15
        torch.testing.assert_close((0.9 * negative).sort().values, positive.sort().values)
    assert int((rows == 0).sum()) == 20


@pytest.mark.parametrize("expected", [8, 32])
def test_one_in_so_many_images_fires_a_row(rng, expected):
    """Pixels of mean 0.5 and the contrast of natural images; brute force over rows and images."""
    size = 768
    images = (0.5 + 0.45 * 0.5 * torch.randn(400, size, generator=rng)).clamp_min(0)
    rows = _trap_rows(600, size, trap_scale(size, expected), rng)
    share = float((images @ rows.T > 0).double().mean())
    assert 0.5 / expected < share < 2 / expected


def test_a_first_linear_layer_gets_the_rows_and_a_zero_bias(rng):
    model = nn.Sequential(nn.Flatten(), nn.Linear(48, 7, bias=False), nn.ReLU(), nn.Linear(7, 3))
    before = model[1].weight.clone()
    planted = plant_traps(model, (3, 4, 4), 100, 0.8, 32, rng)
    assert torch.equal(model[1].weight, before)
    layer = planted[1]
    assert layer.weight.shape == (7, 48)
    assert ((layer.weight < 0).sum(1) == 24).all()
    assert layer.bias.tolist() == [0.0] * 7
    assert torch.equal(planted[3].weight, model[3].weight)


def test_convolutions_get_the_rows_inserted_before_them_one_entry_each(rng):
    model = nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(8, 3))
    planted = plant_traps(model, (3, 4, 4), 20, 0.8, 32, rng)
    assert isinstance(planted, TrapLayer)
    inputs = torch.rand(5, 3, 4, 4, generator=rng)
    moved = inputs.flatten(1).clone()
    moved[:, :20] += LAYER_STRENGTH * (inputs.flatten(1) @ planted.rows.weight.T).relu()
    torch.testing.assert_close(planted(inputs), model(moved.view_as(inputs)))
    assert plant_traps(model, (3, 4, 4), 1000, 0.8, 32, rng).rows.out_features == 48


def test_only_a_linear_layer_on_the_whole_input_comes_first():
    linear, convolution = nn.Linear(48, 7), nn.Conv2d(3, 2, 3)
    shape = (3, 4, 4)
    assert find_first_linear(nn.Sequential(nn.Flatten(), linear), shape) == "1"
    assert find_first_linear(nn.Sequential(nn.Flatten(), linear), (3, 4, 5)) is None
    assert find_first_linear(nn.Sequential(convolution, nn.Flatten(), linear), shape) is None
    assert find_first_linear(nn.Sequential(nn.Flatten(), nn.utils.parametrizations.weight_norm(nn.Linear(48, 7))), shape) is None


class Changing(nn.Module):
    """Changes its input before the network, or adds the answer to another view."""

    def __init__(self, net: nn.Module, how: str) -> None:
        super().__init__()
        self.net, self.how = net, how

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.how == "two views":
            return self.net(inputs) + self.net(inputs.flip(-1))
        return self.net(1 - inputs if self.how == "negative" else inputs.flip(-1))


@pytest.mark.parametrize("how", ["negative", "turned", "two views"])
def test_a_layer_that_takes_the_input_changed_or_twice_does_not_come_first(how, rng):
    """Quotients of its rows are no samples: the rows are inserted before the change, and show the samples."""
    model = Changing(nn.Sequential(nn.Flatten(), nn.Linear(48, 60), nn.ReLU(), nn.Linear(60, 10)), how)
    assert find_first_linear(model, (3, 4, 4)) is None
    attack = dm.attack("trap_weights", input_shape=(3, 4, 4), expected=3)
    batch = dm.Batch((torch.rand(3, 3, 4, 4, generator=rng) * 255).round() / 255, torch.tensor([1, 5, 7]))
    planted = attack.tamper(model)
    assert isinstance(planted, TrapLayer)
    found = dm.reconstruct(dm.observe(planted, batch), attack)
    assert len(found.inputs) > 0
    assert torch.cdist(found.inputs.flatten(1), batch.inputs.flatten(1)).amin(1).max() < 1e-3


def test_another_input_shape_is_refused(rng):
    planted = plant_traps(nn.Conv2d(3, 2, 3), (3, 4, 4), 20, 0.8, 32, rng)
    with pytest.raises(ValueError, match="input_shape"):
        planted(torch.zeros(1, 3, 5, 5))
