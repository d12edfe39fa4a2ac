"""Learning to Invert: it beats the mean picture, depends on the update, and counts permutations as equal."""

from itertools import permutations

import pytest
import torch
from torch import nn

import dosimeter as dm
from dosimeter.attacks.learning_to_invert import _Hash, _matched_error

QUICK = {"simulations": 500, "epochs": 25, "hidden": 128, "entries": 256}


@pytest.fixture
def model():
    torch.manual_seed(2)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.Tanh(), nn.Linear(24, 10)).eval()


def part(digits, places):
    return dm.Batch(digits[0][places], digits[1][places])


@pytest.mark.parametrize("first", [0, 40])
def test_what_it_learned_on_other_pictures_draws_the_private_one(model, digits, first):
    truth, auxiliary = part(digits, slice(first, first + 1)), part(digits, slice(100, 400))
    found = dm.reconstruct(dm.observe(model, truth, auxiliary=auxiliary), "learning_to_invert", **QUICK)
    scores = dm.score(found, truth, auxiliary=auxiliary)
    assert float(scores["psnr"]) > float(scores.nulls["mean"]["psnr"]) + 2
    other = dm.observe(model, part(digits, slice(first + 7, first + 8)), auxiliary=auxiliary)
    drawn = dm.reconstruct(other, "learning_to_invert", **QUICK)
    assert float(dm.score(drawn, truth)["psnr"]) < float(scores["psnr"])  # another update draws another picture
    spread = (auxiliary.inputs - auxiliary.inputs.mean(0)).square().mean()
    assert found.objective < 0.7 * float(spread)  # the held-out error against that of the mean picture


def test_the_error_is_that_of_the_best_order():
    rng = torch.Generator().manual_seed(0)
    drawn, truths = torch.rand(5, 3 * 4, generator=rng), torch.rand(5, 3, 2, 2, generator=rng)
    best = [
        min(float((one.reshape(3, 2, 2)[list(order)] - true).square().mean()) for order in permutations(range(3)))
        for one, true in zip(drawn, truths)
    ]
    assert float(_matched_error(drawn, truths)) == pytest.approx(sum(best) / 5, rel=1e-5)


def test_the_hash_is_linear_and_keeps_lengths_on_average():
    rng = torch.Generator().manual_seed(1)
    update = {"a": torch.randn(30, 20, generator=rng), "b": torch.randn(50, generator=rng)}
    doubled = {name: 2 * change for name, change in update.items()}
    hashes = [_Hash.draw(update, 64, rng) for _ in range(200)]
    torch.testing.assert_close(hashes[0](doubled), 2 * hashes[0](update))
    lengths = torch.stack([hashed(update).square().sum() for hashed in hashes])
    assert float(lengths.mean()) == pytest.approx(sum(float(change.square().sum()) for change in update.values()), rel=0.05)


def test_large_batches_and_few_samples_are_refused(model, digits):
    large = dm.observe(model, part(digits, slice(0, 17)), auxiliary=part(digits, slice(100, 200)))
    with pytest.raises(dm.Refused, match="needs a batch of at most 16 samples; this batch has 17"):
        dm.reconstruct(large, "learning_to_invert", **QUICK)
    few = dm.observe(model, part(digits, slice(0, 1)), auxiliary=part(digits, slice(100, 105)))
    with pytest.raises(dm.Refused, match="needs at least 20 auxiliary samples, got 5"):
        dm.reconstruct(few, "learning_to_invert", **QUICK)
