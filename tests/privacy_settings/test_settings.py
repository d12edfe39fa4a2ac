"""Privacy settings: the figures of each, by hand, and the readings that must never promise too much."""

import math

import pytest
import torch

import dosimeter as dm
from dosimeter.registry import PRIVACY
from dosimeter.runs.dp_guarantee import dp_guarantee

LOCAL = {"clipping_norm": 1.0, "sensitivity": 2.0, "epsilon": 0.9, "delta": 1e-5}


def readings(name, rounds=1, **options):
    return dm.privacy(name, **options).readings(rounds)


def test_local_dp_holds_with_the_true_sensitivity_and_not_below_it():
    honest = readings("flower_local_dp", **LOCAL)[0]
    assert honest.proved <= honest.stated == 0.9
    too_low = readings("flower_local_dp", **LOCAL | {"sensitivity": 0.5})[0]
    assert too_low.proved > too_low.stated
    deviation = 0.5 * math.sqrt(2 * math.log(1.25 / 1e-5)) / 0.9
    assert dm.privacy("flower_local_dp", **LOCAL | {"sensitivity": 0.5}).deviation == pytest.approx(deviation)


def test_the_classical_formula_fails_above_one():
    """Balle & Wang, Section 2: for large ε the classical noise is not enough."""
    reading = readings("flower_local_dp", **LOCAL | {"epsilon": 100.0})[0]
    assert reading.proved > 100


def test_local_dp_without_noise_or_with_whole_numbers_proves_nothing():
    assert readings("flower_local_dp", **LOCAL | {"sensitivity": 0.0})[0].proved == math.inf
    assert readings("flower_local_dp", **LOCAL | {"whole_numbers": True})[0].proved == math.inf


def test_central_noise_hides_nothing_from_the_server():
    server, others, sample = readings("flower_fixed_clipping", noise_multiplier=5.0, clipping_norm=1.0, num_sampled_clients=10)
    assert (server.against, server.proved) == ("the server", math.inf)
    assert others.proved < math.inf
    assert sample.proved > others.proved


def test_unequal_weights_weaken_central_noise():
    options = {"noise_multiplier": 5.0, "clipping_norm": 1.0, "num_sampled_clients": 10}
    equal, heavy, unknown = (
        readings("flower_fixed_clipping", **options, **more)[1].proved for more in ({"largest_share": 0.1}, {"largest_share": 0.5}, {})
    )
    assert equal < heavy < unknown


def test_adaptive_clipping_pays_for_the_count_and_for_the_next_rounds_norm():
    options = {"noise_multiplier": 1.0, "num_sampled_clients": 100, "largest_share": 0.01}
    adaptive = dm.privacy("flower_adaptive_clipping", **options)
    assert adaptive.multiplier_of_mean == pytest.approx((1 - 1 / 100) ** -0.5)  # σ_b = 5
    assert adaptive.least_factor == pytest.approx(math.exp(-0.2 * (1 + 12 * 0.05 - 0.5)))
    fixed = readings("flower_fixed_clipping", clipping_norm=1.0, **options)[1].proved
    assert adaptive.readings(1)[1].proved > fixed
    with pytest.raises(ValueError, match="twice the noise on the count"):
        dm.privacy("flower_adaptive_clipping", noise_multiplier=3.0, num_sampled_clients=10)


def test_opacus_states_what_its_accountant_counts():
    reading = readings("opacus_dpsgd", noise_multiplier=1.1, sample_rate=0.01, steps=100)[0]
    assert reading.stated == reading.proved == pytest.approx(0.9561, abs=1e-3)  # the figure of the accountant itself


def test_opacus_without_poisson_sampling_gets_no_help_from_it():
    options = {"noise_multiplier": 1.0, "sample_rate": 0.1, "steps": 30}
    reading = readings("opacus_dpsgd", poisson_sampling=False, **options)[0]
    three_epochs = dm.privacy("opacus_dpsgd", noise_multiplier=1.0, sample_rate=1.0, steps=3).readings(1)[0]
    assert reading.proved == pytest.approx(three_epochs.proved, rel=0.25)  # the Rényi accountant and the exact ε
    assert reading.proved > reading.stated


def test_svt_costs_what_it_sends():
    reading = readings("nvflare_svt", parameters=10_000)[0]
    assert reading.stated == 0.1
    assert reading.proved > 1000 * 0.1  # noise_var for each of the entries
    cheap = readings("nvflare_svt", parameters=10_000, epsilon_release=1.0)[0].proved
    assert 1.1 < cheap <= 0.1 / 0.1 + 1.0  # the choice, without a limit on what lies above, and the release
    assert readings("nvflare_svt", parameters=10_000, scalars=True)[0].proved == math.inf
    with pytest.raises(ValueError, match="add up to epsilon"):
        dm.privacy("nvflare_svt", parameters=10, epsilon_threshold=0.2)


@pytest.mark.parametrize("name", sorted(PRIVACY))
def test_more_rounds_prove_less_and_a_trial_never_shows_more_than_is_proved(name):
    setting = PRIVACY.build(name, **(PRIVACY.entry(name).strengths[0] if hasattr(PRIVACY.entry(name), "strengths") else {}))
    for first, later in zip(setting.readings(1), setting.readings(5)):
        assert later.proved >= first.proved
        assert 0.01 <= first.found <= later.found <= 1
    for rounds in (1, 4):
        for reading in dp_guarantee(setting, rounds=rounds, trials=4000).readings:
            assert reading.shown is None or reading.shown <= reading.proved


def test_a_trial_catches_a_sensitivity_that_is_too_low():
    found = dm.dp_guarantee("flower_local_dp", **LOCAL | {"sensitivity": 0.2})
    assert found.readings[0].shown > found.readings[0].stated
    assert "sensitivity 0.2 was typed" in str(found)


def test_a_framework_s_object_is_read_by_its_name():
    class LocalDpMod:
        def __init__(self, **options):
            vars(self).update(options)

    assert dm.privacy(LocalDpMod(**LOCAL)) == dm.privacy("flower_local_dp", **LOCAL)
    with pytest.raises(TypeError, match="privacy: expected a name"):
        dm.privacy(torch.nn.Linear(1, 1))


def test_refusals():
    with pytest.raises(ValueError, match="delta: expected a number from 1e-100 to below 1"):
        dm.privacy("flower_local_dp", **LOCAL | {"delta": 1.5})
    with pytest.raises(ValueError, match="rounds: expected a positive int, got 0"):
        dm.dp_guarantee("nvflare_percentile", rounds=0)
    with pytest.raises(ValueError, match="at_delta"):
        dm.dp_guarantee("nvflare_percentile", at_delta=2.0)
