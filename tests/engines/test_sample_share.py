"""One sample's share of an update: one in B, or unknown."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import dosimeter as dm
from dosimeter.engines.sample_share import (
    mixes_samples,
    sends_gradient_at_model,
    share_of_one_sample,
    takes_local_steps,
    training_of_one_client,
)


def public_of(**options):
    return dm.observe(nn.Linear(4, 3), dm.Batch(torch.rand(5, 4), torch.tensor([0, 1, 2, 0, 1])), **options).public


def test_a_sample_has_one_share_in_the_declared_size():
    assert share_of_one_sample(public_of()) == 1 / 5
    assert share_of_one_sample(replace(public_of(), batch_size=2)) == 1 / 2
    assert share_of_one_sample(public_of(defenses=(dm.defense("secure_aggregation", clients=2),))) == 1 / 5


@pytest.mark.parametrize(
    "options",
    [
        {"declare_batch_size": False},
        {"defenses": (dm.defense("clipping", max_norm=0.1),)},
        {"training": dm.FedAvg(steps=2)},
        {"defenses": (dm.defense("dpsgd", max_norm=0.1, noise_multiplier=0.0),)},
    ],
)
def test_an_unknown_factor_leaves_the_share_unknown(options):
    assert share_of_one_sample(public_of(**options)) is None


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
