"""Trap rows: signs and magnitudes as published, and the share of inputs that fire them."""

import pytest
import torch
from torch import nn

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
    assert find_first_linear(nn.Sequential(nn.Flatten(), linear), 48) == "1"
    assert find_first_linear(nn.Sequential(nn.Flatten(), linear), 50) is None
    assert find_first_linear(nn.Sequential(convolution, nn.Flatten(), linear), 48) is None
    assert find_first_linear(nn.Sequential(nn.Flatten(), nn.utils.parametrizations.weight_norm(nn.Linear(48, 7))), 48) is None


def test_another_input_shape_is_refused(rng):
    planted = plant_traps(nn.Conv2d(3, 2, 3), (3, 4, 4), 20, 0.8, 32, rng)
    with pytest.raises(ValueError, match="input_shape"):
        planted(torch.zeros(1, 3, 5, 5))
