"""The success bound of DP-SGD: its closed form, its brackets, an attacker who meets it, and bad numbers."""

import math

import pytest
import torch
from scipy.stats import norm

from dosimeter.engines.bounds.reconstruction_robustness import success_bound


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(("noise", "steps", "chance"), [(1.0, 1, 0.1), (5.0, 30, 0.01), (0.5, 4, 0.5)])
def test_all_samples_in_every_step_is_a_shift_of_one_gaussian(noise, steps, chance):
    bound = success_bound(noise_multiplier=noise, chance=chance, steps=steps)
    assert bound.value == pytest.approx(norm.cdf(norm.ppf(chance) + math.sqrt(steps) / noise))
    assert bound.low == bound.high == bound.value


def test_the_draws_agree_with_the_closed_form_as_the_rate_nears_one():
    exact = success_bound(noise_multiplier=4.0, chance=0.05, steps=10)
    drawn = success_bound(noise_multiplier=4.0, chance=0.05, steps=10, sample_rate=1 - 1e-9, draws=40_000, rng=_generator(1))
    assert drawn.low <= exact.value <= drawn.high
    assert drawn.high - drawn.low < 0.06


def test_one_step_agrees_with_the_integral():
    """With one step the best event is a half-line {w > t}, whose probabilities are known."""
    noise, rate, chance = 1.5, 0.3, 0.1
    threshold = norm.isf(chance, scale=noise)
    exact = (1 - rate) * chance + rate * norm.sf(threshold, loc=1, scale=noise)
    brackets = [
        success_bound(noise_multiplier=noise, chance=chance, sample_rate=rate, draws=20_000, rng=_generator(seed)) for seed in range(20)
    ]
    assert sum(bracket.low <= exact <= bracket.high for bracket in brackets) >= 19
    assert sum(bracket.value for bracket in brackets) / 20 == pytest.approx(exact, rel=0.01)


def test_no_attacker_with_a_uniform_prior_does_better_than_the_bound():
    """Candidates are orthogonal clipped gradients; the attacker knows all but which of them is in the data."""
    candidates, noise, steps, trials = 10, 3.0, 20, 4000
    rng = _generator(3)
    sums = steps * torch.eye(candidates)[0] + noise * math.sqrt(steps) * torch.randn(trials, candidates, generator=rng)
    shown = float((sums.argmax(1) == 0).double().mean())
    bound = success_bound(noise_multiplier=noise, chance=1 / candidates, steps=steps)
    assert 1 / candidates < shown < bound.value
    assert bound.value < 1.5 * shown  # the published gap is small


def test_more_noise_and_fewer_steps_help_nobody():
    values = [success_bound(noise_multiplier=noise, chance=0.1, steps=50, sample_rate=0.2).value for noise in (0.7, 1.0, 2.0, 8.0)]
    assert values == sorted(values, reverse=True)
    assert success_bound(noise_multiplier=1.0, chance=0.1, steps=5, sample_rate=0.2).value < values[1]


def test_the_ends_of_the_scale():
    assert success_bound(noise_multiplier=0.0, chance=0.1).high == 1
    assert success_bound(noise_multiplier=math.inf, chance=0.1).high == 0.1
    assert success_bound(noise_multiplier=1.0, chance=0.1, steps=0).high == 0.1
    assert success_bound(noise_multiplier=1.0, chance=0.1, sample_rate=0.0).high == 0.1


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"noise_multiplier": -1.0, "chance": 0.1}, "noise_multiplier >= 0"),
        ({"noise_multiplier": math.nan, "chance": 0.1}, "noise_multiplier >= 0"),
        ({"noise_multiplier": 1.0, "chance": 1.1}, "chance"),
        ({"noise_multiplier": 1.0, "chance": 1e-6, "sample_rate": 0.5}, "draws >= 20 / chance"),
    ],
)
def test_bad_numbers_are_refused(options, word):
    with pytest.raises(ValueError, match=word):
        success_bound(**options)
