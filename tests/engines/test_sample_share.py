"""One sample's share of an update: one in B, or unknown."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import dosimeter as dm
from dosimeter.engines.sample_share import (
    largest_share,
    mixes_samples,
    sends_gradient_at_model,
    share_of_one_sample,
    takes_local_steps,
    training_of_one_client,
    unscaled_layers,
)


def observed(**options):
    return dm.observe(nn.Linear(4, 3), dm.Batch(torch.rand(5, 4), torch.tensor([0, 1, 2, 0, 1])), **options)


def share_of(exposure, names=("weight", "bias")):
    return share_of_one_sample(exposure.public, exposure.update, names)


def test_a_sample_has_one_share_in_the_declared_size():
    exposure = observed()
    assert share_of(exposure) == 1 / 5
    assert share_of(replace(exposure, public=replace(exposure.public, batch_size=2))) == 1 / 2
    assert share_of(observed(defenses=(dm.defense("secure_aggregation", clients=2),))) == 1 / 5


@pytest.mark.parametrize(
    "options",
    [
        {"declare_batch_size": False},
        {"defenses": (dm.defense("clipping", max_norm=0.01),)},
        {"training": dm.FedAvg(steps=2)},
        {"defenses": (dm.defense("dpsgd", max_norm=0.1, noise_multiplier=0.0),)},
    ],
)
def test_an_unknown_factor_leaves_the_share_unknown(options):
    assert share_of(observed(**options)) is None


@pytest.mark.parametrize("mode", ["norm", "layer"])
def test_a_norm_below_its_bound_was_not_clipped(mode):
    clipping = dm.defense("clipping", max_norm=100.0, mode=mode)
    assert share_of(observed(defenses=(clipping,))) == 1 / 5
    others = ((clipping, dm.defense("quantisation", bits=8)), (dm.defense("secure_aggregation", clients=2), clipping))
    for defenses in others:  # where the norm that was sent is not the norm that was clipped
        assert share_of(observed(defenses=defenses)) is None


def test_of_layers_that_are_clipped_alone_the_others_keep_their_scale():
    exposure = observed(defenses=(dm.defense("clipping", max_norm=0.05, mode="layer"),))
    sizes = {name: float(change.norm()) for name, change in exposure.update.items()}
    assert unscaled_layers(exposure.public, exposure.update) == {name for name, size in sizes.items() if size < 0.049}
    assert share_of(exposure) is None


def test_no_share_exceeds_one_sample_in_the_declared_size():
    assert largest_share(observed().public) == 1 / 5
    assert largest_share(observed(declare_batch_size=False).public) == 1.0


def test_batch_statistics_and_dropout_mix_samples_in_train_mode_alone():
    for module in (nn.BatchNorm1d(4), nn.Dropout(0.5)):
        assert mixes_samples(nn.Sequential(module).train())
        assert not mixes_samples(nn.Sequential(module).eval())
    assert not mixes_samples(nn.Sequential(nn.LayerNorm(4)).train())


def test_local_steps_are_told_from_one_gradient():
    one, several = dm.FedSGD(), dm.FedAvg(steps=3, learning_rate=0.1)
    assert sends_gradient_at_model(one)
    assert not takes_local_steps(one)
    assert takes_local_steps(several)
    assert not sends_gradient_at_model(several)
    assert training_of_one_client(several) is several
