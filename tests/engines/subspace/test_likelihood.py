"""The most likely features behind noise, pruning and rounding."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import one_hot

from dosimeter.engines.subspace.feature_prior import FeaturePrior
from dosimeter.engines.subspace.likelihood import LikelihoodProblem, find_likely_features, is_small_enough
from dosimeter.types import Distortion

CLASSES, WIDTH, SIZE = 60, 200, 6


def problem(
    seed: int, *, noise: float = 0.0, cutoff: float = 0.0, bias: bool = True, sure: int = 0
) -> tuple[LikelihoodProblem, torch.Tensor]:
    """A head of random weights on features max(0, 1 + ε/2), its gradient with noise, entries up to `cutoff` pruned; `sure` of some."""
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    weight, offset = normal(CLASSES, WIDTH) / WIDTH**0.5, normal(CLASSES) / 10
    features = (1 + normal(SIZE, WIDTH) / 2).clamp_min(0)
    labels = torch.randperm(CLASSES, generator=rng)[:SIZE]
    weight[labels[:sure]] += 60 * (features[:sure] - 1) / WIDTH  # the typical feature is not told by them
    targets = one_hot(labels, CLASSES).double()
    errors = (torch.softmax(features @ weight.T + offset, 1) - targets) / SIZE
    gradient = errors.T @ features
    gradient = gradient + noise * normal(CLASSES, WIDTH)
    live = gradient.abs() > cutoff
    ones = torch.ones(WIDTH, dtype=torch.float64)
    everywhere = torch.ones(CLASSES, dtype=torch.bool)
    bounds = {"low": torch.where(live, -torch.inf, -cutoff), "high": torch.where(live, torch.inf, cutoff)}
    return (
        LikelihoodProblem(
            weight=weight,
            bias=offset,
            targets=targets,
            labels=labels,
            temperature=1.0,
            gradient=gradient * live,
            distortion=Distortion(noise=noise, live=live, **bounds),
            bias_gradient=errors.sum(0) + noise * normal(CLASSES) if bias else None,
            bias_distortion=Distortion(noise=noise, live=everywhere, low=errors.sum(0), high=errors.sum(0)) if bias else None,
            prior=FeaturePrior(mean=ones, size=ones, gain=ones[0], spread=ones[0] / 10),
            non_negative=True,
            free_scale=False,
        ),
        features,
    )


def error(found: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(found - truth, dim=1) / torch.linalg.vector_norm(truth, dim=1)


def least_squares(given: LikelihoodProblem, truth: torch.Tensor) -> torch.Tensor:
    """F = D⁺ᵀ ∇W (rgla Eq. 5) with the true errors D, which no attack has."""
    errors = (torch.softmax(truth @ given.weight.T + given.bias, 1) - given.targets) / SIZE
    return torch.linalg.pinv(errors.T) @ given.gradient


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_a_whole_gradient_gives_the_features_themselves(seed, bias):
    given, truth = problem(seed, bias=bias)
    assert float(error(find_likely_features(given).features, truth).max()) < 1e-4


@pytest.mark.parametrize("seed", range(3))
def test_own_rows_that_survived_pruning_give_the_features_themselves(seed):
    given, truth = problem(seed)
    cutoff = float(given.gradient[given.labels].abs().min()) / 2  # everything in the batch's own rows survives, little else does
    given, truth = problem(seed, cutoff=cutoff)
    survived = given.distortion.live[given.labels]
    found = find_likely_features(given)
    assert float(error(found.features, truth).max()) < 0.01
    assert bool(((found.features - truth).abs() < 1e-3)[survived].all())


@pytest.mark.parametrize("noise", [0.01, 0.03])
@pytest.mark.parametrize("seed", range(3))
def test_noise_is_shrunk_better_than_by_least_squares_at_the_true_errors(seed, noise):
    given, truth = problem(seed, noise=noise)
    found = find_likely_features(given)
    assert float(error(found.features, truth).mean()) < float(error(least_squares(given, truth), truth).mean())
    assert found.spread.mean() == pytest.approx(float(error(found.features, truth).mean()), rel=0.3)  # it knows how far off it is


@pytest.mark.parametrize("kept", [0.3, 0.1, 0.03])
@pytest.mark.parametrize("seed", range(3))
def test_pruned_entries_are_inferred_within_their_bounds(seed, kept):
    whole, _ = problem(seed)
    cutoff = float(whole.gradient[whole.labels].abs().quantile(1 - kept))
    given, truth = problem(seed, cutoff=cutoff)
    found = find_likely_features(given)
    assert float(error(found.features, truth).median()) < 0.5
    assert float(error(least_squares(given, truth), truth).median()) > 0.6
    mean = truth.mean()  # even the mean that no attack knows is further away where a tenth of the entries survived
    assert kept < 0.1 or float(error(found.features, truth).mean()) < float(error(mean.expand_as(truth), truth).mean())
    assert float(found.row_coverage.mean()) == pytest.approx(kept, abs=0.05)
    assert "of the rest only bounds are known" in found.sentence


@pytest.mark.parametrize("seed", range(3))
def test_a_sample_that_left_no_trace_gets_what_is_expected_and_no_error_bar(seed):
    """Of a sample that the model is sure of nothing stands out of the noise, which a feature of zero explains as well."""
    given, truth = problem(seed, sure=1, noise=0.01)
    free = find_likely_features(given)
    held = find_likely_features(replace(given, prior=replace(given.prior, least=0.5, most=2.0)))
    assert float(error(free.features, truth)[0]) > 0.9
    assert float(error(held.features, truth)[0]) < 0.75
    assert bool(torch.isinf(held.spread[0]))
    assert "what the model mostly answers stands for 1 of 6" in held.sentence
    assert "expected to be off by 0.05" in held.sentence
    torch.testing.assert_close(held.features[1:], free.features[1:])
    assert bool(torch.isfinite(held.spread[1:]).all())


def test_batches_beyond_memory_are_not_fitted():
    assert is_small_enough(64, 2048)
    assert not is_small_enough(1024, 2048)
    assert not is_small_enough(0, 2048)
