"""The certificate: error bars scatter as they say, and what is no isolated solution gets none."""

from dataclasses import replace

import pytest
import torch

from dosimeter.engines.subspace.certificate import DEVIATIONS, LARGEST_MISFIT, REPEATABILITY, add_repeatability, assess
from dosimeter.engines.subspace.equations import whole_span
from dosimeter.engines.subspace.separate import Effort, separate
from dosimeter.engines.subspace.single import polish
from dosimeter.engines.subspace.verdict import BatchFacts


def assessed(planted, labels=None, t=None):
    labels, t = planted.labels if labels is None else labels, planted.t if t is None else t
    t, inverse = polish(planted.equations, whole_span(planted.equations), t, labels, steps=6)
    return t, assess(planted.equations, t, labels, inverse)


def test_the_truth_without_noise_is_certain(plant):
    planted = plant()
    _, found = assessed(planted)
    assert bool(found.isolated.all())
    assert float(found.error_bar.max()) < 1e-9
    assert float(found.residual.max()) < 1e-12
    torch.testing.assert_close(found.mass, torch.full_like(found.mass, 6.0), rtol=1e-8, atol=0)


def test_error_bars_are_eight_standard_deviations(plant, distance_to, rng):
    """Repeated noise on one gradient: the errors scatter as the bars say."""
    ratios = []
    for _ in range(12):
        planted = plant(4, 40, 60, seed=3, noise=1e-7)
        noisy = planted.gradient
        found = separate(planted.equations, noisy, planted.bias_gradient, BatchFacts(batch_size=4), rng, effort=Effort())
        assert bool(found.certified.all())
        ratios.append(distance_to(found.features, planted.features) / found.error_bar)
    ratios = torch.cat(ratios)
    assert float(ratios.max()) < 1
    assert 0.04 < float(ratios.square().mean().sqrt()) < 0.25  # one eighth, were the noise model perfect


def test_bars_grow_with_the_noise(plant):
    small, large = (assessed(plant(noise=noise))[1].error_bar for noise in (1e-9, 1e-7))
    torch.testing.assert_close(large / small, torch.full_like(small, 100.0), rtol=0.2, atol=0)


def test_a_point_that_solves_nothing_has_a_misfit_beyond_the_limit(plant):
    planted = plant(noise=1e-9)
    equations = planted.equations
    t = 1.2 * planted.t
    _, inverse = polish(equations, whole_span(equations), t, planted.labels, steps=0)
    found = assess(equations, t, planted.labels, inverse)
    assert float(found.misfit.min()) > LARGEST_MISFIT


def test_without_equations_to_spare_no_bar_is_finite(plant):
    planted = plant(5, 11, 50)  # 2 B = C − 1
    _, found = assessed(planted)
    assert float(found.error_bar.min()) > 1e300
    assert not bool(found.isolated.any())


@pytest.mark.parametrize("share", [0.3, 0.45])
def test_the_share_of_a_blend_is_within_its_bar(plant, share):
    first, second = torch.tensor([2, 9, 14, 21]), torch.tensor([5, 3, 25, 30])
    one_hot = torch.nn.functional.one_hot
    planted = plant(4, 40, 60, labels=first, soft=(1 - share) * one_hot(first, 40) + share * one_hot(second, 40), noise=1e-8)
    planted = replace(planted, equations=replace(planted.equations, blends=True))
    _, found = assessed(planted, labels=first * 40 + second)
    off = (found.second_share - share).abs()
    assert bool((off < found.second_bar).all())
    assert bool((found.second_bar < 1e-3).all())


def test_no_bar_is_below_what_the_forward_pass_repeats_to(plant):
    equations = plant().equations
    bar = add_repeatability(equations, torch.tensor([0.0, 1e-3, torch.nan], dtype=torch.float64))
    assert float(bar[0]) == pytest.approx(REPEATABILITY * equations.model_unit)
    assert float(bar[1]) == pytest.approx(1e-3)
    assert float(bar[2]) == torch.inf
    assert DEVIATIONS == 8
