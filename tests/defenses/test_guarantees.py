import math

import pytest

import dosimeter as dm
from dosimeter.defenses.guarantees import guarantees
from dosimeter.engines.privacy import gaussian_epsilon

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
