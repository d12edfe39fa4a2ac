"""Pictures in black and white are read off rows that a defense rounded or pruned, and mixtures of them are not."""

import pytest
import torch

import dosimeter as dm
from dosimeter.engines.recursion.black_and_white import PREMISE, Rows, black_and_white

PLAIN = dm.Normalization(mean=(0.0,), std=(1.0,))
SHAPE = (1, 8, 8)


def pictures(count, seed=0):
    return (torch.rand(count, 64, generator=torch.Generator().manual_seed(seed)) > 0.5).double()


def rows_of(shares, samples, half_step=0.0):
    """Rows that hold the samples (n, d) with shares (k, n), rounded to whole steps."""
    weight, bias = shares @ samples, shares.sum(1)
    if half_step:
        weight, bias = ((value / (2 * half_step)).round() * 2 * half_step for value in (weight, bias))
    return Rows(weight=weight, bias=bias, weight_reach=torch.full_like(weight, half_step), bias_reach=torch.full_like(bias, half_step))


@pytest.mark.parametrize("half_step", [0.0, 1e-3, 0.03])
def test_a_lone_picture_is_exact_behind_rounding(half_step):
    samples = pictures(3)
    shares = torch.tensor([[0.7, 0, 0], [0, -1.0, 0], [0, -0.9, 0], [0.3, 0.4, 0.3]], dtype=torch.float64)
    places, found = black_and_white(rows_of(shares, samples, half_step), SHAPE, PLAIN)
    assert places.tolist() == [0, 1]  # a picture counts once
    assert torch.equal(found, samples[:2])


@pytest.mark.parametrize("shares", [[0.7, 0.3], [0.5, 0.5], [1.5, -0.5], [1.0, 1.0], [1.0, -0.9]])
def test_a_mixture_is_no_picture(shares):
    rows = rows_of(torch.tensor([shares], dtype=torch.float64), pictures(2, seed=1), 0.01)
    assert len(black_and_white(rows, SHAPE, PLAIN)[0]) == 0


def test_grey_pictures_and_blurred_rows_show_nothing():
    grey = torch.rand(1, 64, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    one = torch.ones(1, 1, dtype=torch.float64)
    assert len(black_and_white(rows_of(one, grey, 0.01), SHAPE, PLAIN)[0]) == 0
    assert len(black_and_white(rows_of(one, pictures(1), 0.2), SHAPE, PLAIN)[0]) == 0  # any pixel could be grey


def test_a_pruned_pixel_is_black_only_if_white_would_have_stayed():
    one, picture = torch.ones(1, 1, dtype=torch.float64), pictures(1)
    exact = rows_of(one, picture)
    for cutoff, count in ((0.4, 1), (0.6, 0)):
        pruned = Rows(weight=exact.weight, bias=exact.bias, weight_reach=cutoff * (picture == 0), bias_reach=exact.bias_reach)
        assert len(black_and_white(pruned, SHAPE, PLAIN)[0]) == count


@pytest.mark.parametrize("defense", [dm.defense("quantisation", bits=6), dm.defense("pruning", ratio=0.5)])
@pytest.mark.parametrize("name", ["trap_weights", "imprint"])
def test_attacks_claim_them_with_their_premise(name, defense):
    claimed = 0
    for seed in range(4):
        inputs = pictures(3, seed).float().reshape(3, *SHAPE)
        options = {"bins": 60} if name == "imprint" else {"expected": 3}
        attack = dm.attack(name, input_shape=SHAPE, **options)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 100), torch.nn.ReLU(), torch.nn.Linear(100, 10)).eval()
        found = dm.reconstruct(dm.observe(attack.tamper(model), dm.Batch(inputs, torch.arange(3)), defenses=[defense]), attack)
        if len(found.inputs):
            assert torch.cdist(found.inputs.flatten(1), inputs.flatten(1)).amin(1).max() < 1e-3
            assert PREMISE in found.premises
            claimed += len(found.inputs)
    assert claimed >= 2
