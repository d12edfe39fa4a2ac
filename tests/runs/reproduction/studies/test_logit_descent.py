"""RGLA's descent: one sample's logits are found, and twins are told from right data."""

from dataclasses import replace

import pytest
import torch

from dosimeter.runs.reproduction.studies.logit_descent import LogitDescent, _pairs


def test_the_logits_of_a_small_batch_are_found(client_with, rng):
    client = client_with(torch.rand(2, 16, generator=rng), torch.arange(2), 0.5 * torch.randn(10, 16, generator=rng))
    study = LogitDescent(steps=2000, learning_rate=0.01, target="truth")
    found = study(client, torch.Generator().manual_seed(1))
    assert found["is_right"] == 1
    assert found["logit_error"] < 1e-4
    assert found["reached_loss"] == pytest.approx(found["true_loss"], abs=1e-3)
    assert replace(study, keep="twin")(client, torch.Generator().manual_seed(1)) == dict.fromkeys(found)


def test_without_steps_to_speak_of_the_data_are_no_batch(client_with, rng):
    client = client_with(torch.rand(3, 8, generator=rng), torch.arange(3), 0.3 * torch.randn(6, 8, generator=rng))
    found = LogitDescent(steps=1)(client, rng)
    assert found["is_right"] == 0
    assert found["equations"] > 0


def test_samples_are_paired_within_their_label():
    squares = torch.tensor([[9.0, 0.0, 0.0], [0.0, 5.0, 1.0], [0.0, 1.0, 5.0]])
    rows, partners = _pairs(squares, torch.tensor([0, 1, 1]))
    assert dict(zip(rows.tolist(), partners.tolist())) == {0: 0, 1: 2, 2: 1}
