"""The most likely features behind noise, pruning and rounding."""

import pytest
import torch
from scipy.stats import truncnorm
from torch.nn.functional import one_hot

from dosimeter.separation.distortion import Distortion
from dosimeter.separation.likelihood import Problem, fits, likely_features, truncated
from dosimeter.separation.typical import Typical

CLASSES, WIDTH, SIZE = 60, 200, 6


def problem(seed: int, *, noise: float = 0.0, cutoff: float = 0.0, bias: bool = True) -> tuple[Problem, torch.Tensor]:
    """A head of random weights on features max(0, 1 + ε/2), its gradient with noise, entries up to `cutoff` pruned."""
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    weight, offset = normal(CLASSES, WIDTH) / WIDTH**0.5, normal(CLASSES) / 10
    features = (1 + normal(SIZE, WIDTH) / 2).clamp_min(0)
    labels = torch.randperm(CLASSES, generator=rng)[:SIZE]
    targets = one_hot(labels, CLASSES).double()
    errors = (torch.softmax(features @ weight.T + offset, 1) - targets) / SIZE
    gradient = errors.T @ features
    gradient = gradient + noise * normal(CLASSES, WIDTH)
    live = gradient.abs() > cutoff
    ones = torch.ones(WIDTH, dtype=torch.float64)
    everywhere = torch.ones(CLASSES, dtype=torch.bool)
    bounds = {"low": torch.where(live, -torch.inf, -cutoff), "high": torch.where(live, torch.inf, cutoff)}
    return (
        Problem(
            weight=weight,
            bias=offset,
            targets=targets,
            labels=labels,
            temperature=1.0,
            gradient=gradient * live,
            distortion=Distortion(noise=noise, live=live, **bounds),
            bias_gradient=errors.sum(0) + noise * normal(CLASSES) if bias else None,
            bias_distortion=Distortion(noise=noise, live=everywhere, low=errors.sum(0), high=errors.sum(0)) if bias else None,
            typical=Typical(mean=ones, size=ones, gain=ones[0], spread=ones[0] / 10),
            non_negative=True,
            free_scale=False,
        ),
        features,
    )


def error(found: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(found - truth, dim=1) / torch.linalg.vector_norm(truth, dim=1)


def least_squares(given: Problem, truth: torch.Tensor) -> torch.Tensor:
    """F = D⁺ᵀ ∇W (rgla Eq. 5) with the true errors D, which no attack has."""
    errors = (torch.softmax(truth @ given.weight.T + given.bias, 1) - given.targets) / SIZE
    return torch.linalg.pinv(errors.T) @ given.gradient


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_a_whole_gradient_gives_the_features_themselves(seed, bias):
    given, truth = problem(seed, bias=bias)
    assert float(error(likely_features(given).features, truth).max()) < 1e-4


@pytest.mark.parametrize("seed", range(3))
def test_own_rows_that_survived_pruning_give_the_features_themselves(seed):
    given, truth = problem(seed)
    cutoff = float(given.gradient[given.labels].abs().min()) / 2  # everything in the batch's own rows survives, little else does
    given, truth = problem(seed, cutoff=cutoff)
    survived = given.distortion.live[given.labels]
    found = likely_features(given)
    assert float(error(found.features, truth).max()) < 0.01
    assert bool(((found.features - truth).abs() < 1e-3)[survived].all())


@pytest.mark.parametrize("noise", [0.01, 0.03])
@pytest.mark.parametrize("seed", range(3))
def test_noise_is_shrunk_better_than_by_least_squares_at_the_true_errors(seed, noise):
    given, truth = problem(seed, noise=noise)
    found = likely_features(given)
    assert float(error(found.features, truth).mean()) < float(error(least_squares(given, truth), truth).mean())
    assert found.spread.mean() == pytest.approx(float(error(found.features, truth).mean()), rel=0.3)  # it knows how far off it is


@pytest.mark.parametrize("kept", [0.3, 0.1, 0.03])
@pytest.mark.parametrize("seed", range(3))
def test_pruned_entries_are_inferred_within_their_bounds(seed, kept):
    whole, _ = problem(seed)
    cutoff = float(whole.gradient[whole.labels].abs().quantile(1 - kept))
    given, truth = problem(seed, cutoff=cutoff)
    found = likely_features(given)
    assert float(error(found.features, truth).median()) < 0.5
    assert float(error(least_squares(given, truth), truth).median()) > 0.6
    mean = truth.mean()  # even the mean that no attack knows is further away where a tenth of the entries survived
    assert kept < 0.1 or float(error(found.features, truth).mean()) < float(error(mean.expand_as(truth), truth).mean())
    assert float(found.seen.mean()) == pytest.approx(kept, abs=0.05)
    assert "of the rest only bounds are known" in found.sentence


def test_moments_of_cut_gaussians_are_scipys():
    mean = torch.tensor([0.0, 1.0, -2.0, 3.0, 0.5], dtype=torch.float64)
    variance = torch.tensor([1.0, 4.0, 0.25, 1.0, 9.0], dtype=torch.float64)
    low = torch.tensor([-1.0, 2.0, -torch.inf, 0.0, -torch.inf], dtype=torch.float64)
    high = torch.tensor([0.5, 7.0, -3.0, 1.0, torch.inf], dtype=torch.float64)
    deviation = variance.sqrt()
    reference = truncnorm((low - mean) / deviation, (high - mean) / deviation, loc=mean, scale=deviation)
    found_mean, found_variance = truncated(mean, variance, low, high)
    torch.testing.assert_close(found_mean, torch.as_tensor(reference.mean()), rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(found_variance, torch.as_tensor(reference.var()), rtol=1e-5, atol=1e-8)


def test_bounds_far_from_the_mean_are_kept_to():
    mean, variance = torch.tensor([0.0, 0.0], dtype=torch.float64), torch.tensor([1.0, 1.0], dtype=torch.float64)
    low, high = torch.tensor([50.0, -60.0], dtype=torch.float64), torch.tensor([51.0, -50.0], dtype=torch.float64)
    found, spread = truncated(mean, variance, low, high)
    assert bool(torch.isfinite(found).all())
    assert bool((spread > 0).all())
    assert found[0] == pytest.approx(30, abs=1e-6)  # as far as the tail is computed
    assert found[1] == pytest.approx(-30, abs=1e-6)


def test_batches_beyond_memory_are_not_fitted():
    assert fits(64, 2048)
    assert not fits(1024, 2048)
    assert not fits(0, 2048)
