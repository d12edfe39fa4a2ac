"""The attacker with a prior: what orthogonal candidates give in closed form, and what it cannot tell apart."""

import pytest
import torch

from dosimeter.engines.bounds.candidates import identify
from dosimeter.engines.bounds.reconstruction_robustness import success_bound


def _share(terms, **options):
    picked = identify(terms, trials=4000, rng=torch.Generator().manual_seed(1), **options)
    return float((picked == 0).double().mean())


def test_two_opposite_candidates_are_told_apart_as_by_one_gaussian():
    """The statistic has mean ±2·steps and deviation 2·noise·√steps, so the share is Φ(√steps / noise)."""
    terms = torch.tensor([[1.0, 0.0], [-1.0, 0.0]]).expand(9, 2, 2)
    assert _share(terms, noise_multiplier=3.0) == pytest.approx(0.8413, abs=0.02)


def test_the_same_candidates_cannot_be_told_apart():
    """All scores are equal, so the first one is picked: change who is first, and nothing else changes."""
    terms = torch.ones(3, 4, 2) / 2**0.5
    assert set(identify(terms, noise_multiplier=1.0, trials=50, rng=torch.Generator().manual_seed(0)).tolist()) <= {0, 1, 2, 3}
    different = torch.cat((terms[:, :1] * 0.999, terms[:, 1:2]), 1)
    assert _share(different, noise_multiplier=1.0) == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("rate", [1.0, 0.2])
@pytest.mark.parametrize("noise", [0.5, 2.0, 8.0])
def test_the_attack_stays_below_the_bound(rate, noise):
    terms = torch.eye(8)[:, :8].expand(12, 8, 8)
    shown = _share(terms, noise_multiplier=noise, sample_rate=rate)
    bound = success_bound(noise_multiplier=noise, chance=1 / 8, sample_rate=rate, steps=12, draws=20_000)
    assert 1 / 8 - 0.02 < shown < bound.high + 0.03
