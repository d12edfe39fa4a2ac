from dataclasses import replace

import pytest
import torch
from torch import nn

import dosimeter as dm
from dosimeter.randomness import generator


def _defended(client, name, seed=0, **options):
    return dm.defense(name, **options)(client, generator(seed, "defense"))


def test_mixup_blends_inputs_and_labels_alike(client):
    identity = torch.eye(6).view(6, 1, 1, 6)  # the blend of unit vectors is its coefficients
    images = nn.functional.pad(identity, (0, 2, 0, 7))
    mixed = _defended(replace(client, batch=dm.Batch(images, torch.arange(6))), "mixup", seed=3).batch
    coefficients = mixed.inputs[:, 0, 0, :6]
    assert torch.allclose(coefficients, mixed.targets[:, :6], atol=1e-6)
    assert torch.allclose(mixed.targets.sum(1), torch.ones(6))
    assert ((coefficients > 0).sum(1) <= 2).all()
    assert (coefficients.diagonal() < 1).any()


def test_mixup_shares_follow_the_beta_distribution():
    shares = dm.defense("mixup", alpha=0.4)._shares(20_000, generator(4, "shares"))
    assert shares.mean().item() == pytest.approx(0.5, abs=0.02)
    assert shares.var().item() == pytest.approx(1 / (4 * (2 * 0.4 + 1)), rel=0.05)


def test_mixup_of_one_sample_is_refused(client, batch):
    with pytest.raises(dm.Refused, match=r"mixup blends pairs of samples"):
        _defended(replace(client, batch=dm.Batch(batch.inputs[:1], batch.targets[:1])), "mixup")
