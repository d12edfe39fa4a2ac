import math

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.stats import norm

from dosimeter.engines.privacy import RDP_ORDERS, gaussian_epsilon, randomised_response_epsilon, randomised_response_keep
from dosimeter.engines.privacy import _sampled_gaussian_rdp as sampled_gaussian_rdp

POINTS = [
    (1.1, 0.01, 100, 1e-5),
    (0.6, 0.05, 500, 1e-6),
    (3.0, 0.5, 10, 1e-5),
    (2.0, 1.0, 7, 1e-5),
    (0.8, 0.001, 3000, 1e-7),
    (10.0, 0.9, 5, 1e-3),
]


def test_the_known_point():
    assert gaussian_epsilon(noise_multiplier=1.1, sample_rate=0.01, steps=100, delta=1e-5) == pytest.approx(0.9561, abs=5e-5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("sigma", "rate", "steps", "delta"), POINTS)
@pytest.mark.parametrize(("name", "theirs"), [("rdp", "RDPAccountant"), ("gdp", "GaussianAccountant")])
def test_equals_the_accountants_of_opacus(name, theirs, sigma, rate, steps, delta):
    accountants = pytest.importorskip("opacus.accountants", reason="opacus is not installed")
    accountant = getattr(accountants, theirs)()
    accountant.history = [(sigma, rate, steps)]
    ours = gaussian_epsilon(noise_multiplier=sigma, sample_rate=rate, steps=steps, delta=delta, accountant=name)
    assert ours == pytest.approx(accountant.get_epsilon(delta=delta), abs=1e-6)


def test_the_prv_accountant_is_tighter():
    pytest.importorskip("opacus", reason="opacus is not installed")
    tight = gaussian_epsilon(noise_multiplier=1.1, sample_rate=0.01, steps=100, delta=1e-5, accountant="prv")
    assert tight == pytest.approx(0.560, abs=5e-4)


def test_without_opacus_the_prv_accountant_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "opacus.accountants", None)
    with pytest.raises(ImportError, match=r"install dosimeter\[privacy\], or use the rdp accountant"):
        gaussian_epsilon(noise_multiplier=1.0, accountant="prv")


@pytest.mark.parametrize("order", [1.5, 2, 3.7, 8])
@pytest.mark.parametrize(("rate", "sigma"), [(0.1, 1.0), (0.6, 2.0)])
def test_the_moment_is_the_integral_that_defines_it(order, rate, sigma):
    """A_α = E_{z ~ N(0, σ²)} [((1 − q) + q exp((2z − 1)/2σ²))^α], by quadrature."""

    def integrand(z):
        return norm.pdf(z, scale=sigma) * ((1 - rate) + rate * math.exp((2 * z - 1) / (2 * sigma**2))) ** order

    moment, _ = quad(integrand, -40 * sigma, 40 * sigma, points=[0, order], limit=500)
    assert sampled_gaussian_rdp(order, rate, sigma) == pytest.approx(math.log(moment) / (order - 1), rel=1e-6)


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


def test_the_orders_are_those_of_opacus():
    accountants = pytest.importorskip("opacus.accountants", reason="opacus is not installed")
    assert numpy.allclose(RDP_ORDERS, accountants.RDPAccountant.DEFAULT_ALPHAS)


@given(epsilon=st.floats(0, 20), classes=st.integers(2, 1000))
def test_randomised_response_there_and_back(epsilon, classes):
    assert randomised_response_epsilon(randomised_response_keep(epsilon, classes), classes) == pytest.approx(epsilon, abs=1e-6)


def test_randomised_response_by_hand():
    assert randomised_response_keep(math.log(3), 2) == pytest.approx(0.75)
    assert randomised_response_keep(0.0, 10) == pytest.approx(0.1)
    assert randomised_response_keep(math.inf, 10) == 1.0
    assert randomised_response_epsilon(1.0, 10) == math.inf


@pytest.mark.parametrize(
    "wrong", [{"noise_multiplier": -1.0}, {"sample_rate": 1.5}, {"delta": 0.0}, {"steps": -1}, {"noise_multiplier": math.nan}]
)
def test_numbers_out_of_range_are_refused(wrong):
    with pytest.raises(ValueError, match=r"privacy: expected noise_multiplier >= 0"):
        gaussian_epsilon(**({"noise_multiplier": 1.0} | wrong))
