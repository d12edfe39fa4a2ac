"""The Gaussian mechanism: against numerical integration, published figures, and each other."""

import math

import pytest
import torch
from scipy.integrate import quad
from scipy.stats import norm

from dosimeter.engines.gaussian_mechanism import classical_deviation, exact_delta, exact_epsilon, found_members
from dosimeter.engines.privacy import gaussian_epsilon
from dosimeter.engines.privacy_trial import shown_epsilon
from dosimeter.engines.sparse_vector import release_epsilon, selection_epsilon, split_budget


@pytest.mark.parametrize("moved", [0.1, 0.5, 1.0, 3.0])
@pytest.mark.parametrize("epsilon", [0.0, 0.3, 2.0])
def test_delta_is_the_hockey_stick_divergence(moved, epsilon):
    def excess(z):
        return max(0.0, norm.pdf(z - moved) - math.exp(epsilon) * norm.pdf(z))

    expected = quad(excess, -12, 15, points=[epsilon / moved + moved / 2], limit=200)[0]
    assert exact_delta(epsilon, moved) == pytest.approx(expected, rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("moved", [0.01, 0.2, 1.0, 8.0, 50.0])
@pytest.mark.parametrize("delta", [1e-2, 1e-5, 1e-10])
def test_epsilon_is_the_inverse_and_is_rounded_up(moved, delta):
    epsilon = exact_epsilon(moved, delta)
    assert exact_delta(epsilon, moved) <= delta
    assert epsilon == 0 or exact_delta(epsilon * (1 - 1e-9), moved) >= delta * (1 - 1e-6)


def test_epsilon_is_below_the_accountant_and_the_classical_theorem():
    assert exact_epsilon(1 / 1.5, 1e-5) <= gaussian_epsilon(noise_multiplier=1.5, steps=1, delta=1e-5, accountant="rdp")
    for epsilon in (0.1, 0.5, 0.99):
        assert exact_epsilon(1 / classical_deviation(1.0, epsilon, 1e-5), 1e-5) <= epsilon
    assert exact_epsilon(1 / classical_deviation(1.0, 200.0, 1e-5), 1e-5) > 200


def test_rounds_add_up_as_the_square_root():
    assert exact_epsilon(math.sqrt(4) * 0.5, 1e-6) == exact_epsilon(1.0, 1e-6)


def test_nothing_moves_or_everything():
    assert exact_epsilon(0.0, 1e-5) == 0
    assert exact_epsilon(math.inf, 1e-5) == math.inf


def test_tests_of_membership_lie_below_their_bounds():
    assert found_members(0.01, moved=0.0) == pytest.approx(0.01)
    gaussian = found_members(0.01, moved=1.0)
    assert gaussian == pytest.approx(norm.cdf(norm.ppf(0.01) + 1))
    assert gaussian <= found_members(0.01, epsilon=exact_epsilon(1.0, 1e-3), delta=1e-3)
    assert found_members(0.01) == 1


def test_the_trial_shows_less_than_the_truth_and_close_to_it():
    """The Laplace mechanism has ε = 1 exactly, at δ = 0, and its best test reaches it."""
    rng = torch.Generator().manual_seed(0)
    for epsilon in (0.5, 1.0, 2.0):
        pair = torch.empty(2, 2, 40_000, dtype=torch.float64).exponential_(generator=rng)
        value = (pair[0] - pair[1]) + torch.tensor([[epsilon], [0.0]])
        shown = shown_epsilon(value[0], value[1], 0.0)
        assert 0.8 * epsilon < shown <= epsilon
    same = torch.randn(2, 4000, generator=rng)
    assert shown_epsilon(same[0], same[1], 0.0) < 0.2


def test_choosing_by_a_noisy_threshold_costs_no_more_than_its_proof_says():
    """By integration over the threshold's noise: the chance of every outcome of two queries, one at each end, without a limit."""
    gamma, threshold, queries, count = 1.0, 0.4, 0.6, 1
    rho, nu = gamma / threshold, 2 * count * gamma / queries

    def below(x, scale):
        return 0.5 * math.exp(x / scale) if x < 0 else 1 - 0.5 * math.exp(-x / scale)

    def chance(answers, values):
        def at(z):
            total = math.exp(-abs(z) / rho) / (2 * rho)
            for above, value in zip(answers, values):
                low = below(z - value, nu)
                total *= (1 - low) if above else low
            return total

        return quad(at, -40, 40, points=[0, 1], limit=300)[0]

    limit = selection_epsilon(threshold, queries, count, positives=2)
    assert limit == pytest.approx(threshold + 2 * queries)
    for answers in ((0, 0), (0, 1), (1, 0), (1, 1)):
        ratio = math.log(chance(answers, (gamma, 0.0)) / chance(answers, (0.0, gamma)))
        assert abs(ratio) <= limit + 1e-9
    assert sum(split_budget(0.7, 5)) == pytest.approx(0.7)
    assert release_epsilon(2.0, 1.0, 3) == 3.0
