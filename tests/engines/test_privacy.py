"""ε against published and independently known values, and what a list of defenses promises."""

import math
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.stats import norm

import dosimeter as dm
from dosimeter.engines.gaussian_mechanism import exact_delta
from dosimeter.engines.privacy import gaussian_epsilon, guarantees
from dosimeter.types import Refused

PRIVATE = dm.defense("dpsgd", max_norm=1.0, noise_multiplier=1.1)
CLIP, NOISE = dm.defense("clipping", max_norm=2.0), dm.defense("gaussian_noise", std=6.0)


def test_dpsgd_protects_samples():
    (found,) = guarantees([PRIVATE], sample_rate=0.01, steps=100, delta=1e-5)
    assert (found.unit, found.delta) == ("sample", 1e-5)
    assert found.epsilon == pytest.approx(0.9561, abs=5e-5)


def test_clipping_then_noise_protects_the_client_with_twice_the_norm_as_sensitivity():
    (found,) = guarantees([CLIP, NOISE], sample_rate=0.01, steps=10, delta=1e-6)
    assert found.unit == "client"
    assert found.epsilon == gaussian_epsilon(noise_multiplier=6.0 / 4.0, steps=10, delta=1e-6)


def test_randomised_labels_protect_labels():
    (found,) = guarantees([dm.defense("random_labels", epsilon=1.5)], steps=50)
    assert (found.unit, found.epsilon, found.delta) == ("label", 1.5, 0.0)


@pytest.mark.parametrize(
    "defenses",
    [
        [],
        [NOISE],
        [NOISE, CLIP],
        [CLIP, dm.defense("quantisation", bits=2), NOISE],
        [dm.defense("clipping", max_norm=2.0, mode="value"), NOISE],
        [CLIP, dm.defense("gaussian_noise", std=1.0, relative=True)],
        [dm.defense("clipping", max_norm=math.inf), NOISE],
        [dm.defense("mixup"), PRIVATE],
        [PRIVATE, dm.defense("soteria", ratio=0.1)],
        [CLIP, NOISE, dm.defense("soteria", ratio=0.1)],
        [dm.defense("dpsgd", max_norm=1.0, noise_multiplier=0.0)],
        [dm.defense("pruning", ratio=0.999), dm.defense("sign")],
        [dm.defense("random_labels", epsilon=math.inf)],
    ],
)
def test_no_guarantee_is_claimed_where_none_follows(defenses):
    assert guarantees(defenses) == []


@pytest.mark.parametrize(("accountant", "epsilon", "within"), [("rdp", 0.9561, 5e-5), ("prv", 0.560, 5e-4)])
def test_the_known_point(accountant, epsilon, within):
    found = gaussian_epsilon(noise_multiplier=1.1, sample_rate=0.01, steps=100, delta=1e-5, accountant=accountant)
    assert found == pytest.approx(epsilon, abs=within)


@pytest.mark.parametrize(("sigma", "steps", "delta"), [(2.0, 7, 1e-5), (1.0, 1, 1e-5), (5.0, 30, 1e-6)])
def test_no_accountant_goes_below_the_exact_value(sigma, steps, delta):
    """Without sampling, T Gaussian mechanisms are one of σ/√T, whose δ(ε) is in closed form (Balle & Wang, ICML 2018, Theorem 8)."""
    mu = math.sqrt(steps) / sigma
    exact = brentq(lambda e: norm.cdf(mu / 2 - e / mu) - math.exp(e + norm.logcdf(-mu / 2 - e / mu)) - delta, 0, 200)
    options = {"noise_multiplier": sigma, "steps": steps, "delta": delta}
    assert exact <= gaussian_epsilon(**options, accountant="rdp") <= 1.2 * exact
    assert exact - 1e-6 <= gaussian_epsilon(**options, accountant="prv") <= 1.02 * exact + 0.02


@pytest.mark.parametrize("sigma", [1e-4, 0.01, 1.06, 5.0])
def test_prv_of_whole_batches_is_the_closed_form_at_any_noise(sigma):
    """Opacus's grid of this case asks for terabytes, or its mean is off, or doubles overflow."""
    found = gaussian_epsilon(noise_multiplier=sigma, steps=3, accountant="prv")
    assert exact_delta(found * 0.999, math.sqrt(3) / sigma) > 1e-5 >= exact_delta(found, math.sqrt(3) / sigma)


@pytest.mark.parametrize(("sigma", "rate", "steps"), [(0.01, 0.1, 1), (0.02, 0.1, 1), (1e-4, 0.1, 100), (0.3, 0.01, 10**6)])
def test_prv_refuses_what_its_grid_cannot_hold(sigma, rate, steps):
    """At σ = 0.01 and 0.02 Opacus returns 707.5 for losses around 5,000 and 1,300."""
    with pytest.raises(Refused, match=r"the prv accountant finds no ε .* rdp may"):
        gaussian_epsilon(noise_multiplier=sigma, sample_rate=rate, steps=steps, accountant="prv")


def test_without_opacus_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "opacus", None)
    with pytest.raises(Refused, match="pip install opacus"):
        gaussian_epsilon(noise_multiplier=1.0)


def test_an_accountant_that_finds_none_says_so():
    with pytest.raises(Refused, match="the gdp accountant finds no ε"):
        gaussian_epsilon(noise_multiplier=0.1, sample_rate=1.0, steps=1000, accountant="gdp")


@settings(max_examples=15, deadline=None)
@given(sigma=st.floats(0.7, 5), rate=st.floats(0.001, 0.2), steps=st.integers(1, 500))
def test_more_noise_less_sampling_and_fewer_steps_cost_less(sigma, rate, steps):
    spent = gaussian_epsilon(noise_multiplier=sigma, sample_rate=rate, steps=steps)
    assert gaussian_epsilon(noise_multiplier=sigma * 1.2, sample_rate=rate, steps=steps) <= spent
    assert gaussian_epsilon(noise_multiplier=sigma, sample_rate=rate / 2, steps=steps) <= spent
    assert gaussian_epsilon(noise_multiplier=sigma, sample_rate=rate, steps=steps + 50) >= spent


def test_the_ends():
    assert gaussian_epsilon(noise_multiplier=0.0) == math.inf
    assert gaussian_epsilon(noise_multiplier=math.inf) == 0
    assert gaussian_epsilon(noise_multiplier=1.0, sample_rate=0.0) == 0
    assert gaussian_epsilon(noise_multiplier=1.0, steps=0) == 0


@pytest.mark.parametrize(
    "wrong", [{"noise_multiplier": -1.0}, {"sample_rate": 1.5}, {"delta": 0.0}, {"steps": -1}, {"noise_multiplier": math.nan}]
)
def test_numbers_out_of_range_are_refused(wrong):
    with pytest.raises(ValueError, match=r"expected noise_multiplier >= 0"):
        gaussian_epsilon(**({"noise_multiplier": 1.0} | wrong))
