"""Fed-CDP: every tensor of a sample's gradient clipped to a bound that shrinks over the rounds, and noise that shrinks with it."""

import math

import pytest
import torch

import dosimeter as dm
from dosimeter.defenses.dpsgd import ClippedSGD
from dosimeter.defenses.fed_cdp import FedCDP

PUBLISHED = {"max_norm": 6.0, "last_norm": 2.0, "noise_multiplier": 6.0}


def test_the_bound_falls_in_a_line_from_the_first_round_to_the_last():
    bounds = [FedCDP(**PUBLISHED, rounds=5, round=turn).bound() for turn in range(5)]
    assert bounds == pytest.approx([6, 5, 4, 3, 2])
    first = FedCDP(**PUBLISHED, rounds=5)
    assert [first.in_round(turn).bound() for turn in range(7)] == pytest.approx([6, 5, 4, 3, 2, 2, 2])
    assert FedCDP(**PUBLISHED, rounds=1).bound() == 6


def test_every_tensor_of_every_sample_is_clipped_by_itself(classifier, batch):
    """Against a loop over the samples."""
    update = ClippedSGD(max_norm=0.05, each_tensor=True)(classifier, batch.inputs, batch.targets, dm.CrossEntropy())
    expected = {name: torch.zeros_like(p) for name, p in classifier.named_parameters()}
    cut = 0
    for inputs, targets in zip(batch.inputs.split(1), batch.targets.split(1)):
        for name, gradient in dm.FedSGD()(classifier, inputs, targets, dm.CrossEntropy()).items():
            factor = min(1.0, 0.05 / float(gradient.norm()))
            cut += factor < 1
            expected[name] += gradient * factor / len(batch.inputs)
    assert cut > len(batch.inputs)
    for name, change in update.items():
        torch.testing.assert_close(change, expected[name], rtol=1e-4, atol=1e-7)


def test_late_rounds_have_less_noise_and_the_same_epsilon(classifier, batch):
    tensors = len(list(classifier.parameters()))
    plain = ClippedSGD(max_norm=2.0, each_tensor=True)(classifier, batch.inputs, batch.targets, dm.CrossEntropy())  # no sample is clipped

    def noise(turn: int) -> float:
        defense = FedCDP(**PUBLISHED, rounds=3, round=turn, tensors=tensors)
        sent = dm.observe(classifier, batch, defenses=(defense,), seed=4).update
        return float(torch.cat([(sent[name] - plain[name]).flatten() for name in plain]).std())

    assert noise(0) == pytest.approx(6 * 6 / len(batch.inputs), rel=0.05)
    assert noise(2) == pytest.approx(6 * 2 / len(batch.inputs), rel=0.05)
    accounting = {"sample_rate": 0.01, "steps": 100, "delta": 1e-5}
    early, late = (FedCDP(**PUBLISHED, rounds=3, round=turn, tensors=tensors).epsilon(**accounting) for turn in (0, 2))
    assert early == late


def test_epsilon_counts_that_a_sample_moves_all_tensors():
    accounting = {"sample_rate": 0.01, "steps": 100, "delta": 1e-5}
    by_tensor = FedCDP(**PUBLISHED, tensors=4).epsilon(**accounting)
    assert by_tensor == dm.defense("dpsgd", max_norm=1.0, noise_multiplier=6.0 / math.sqrt(4)).epsilon(**accounting)
    assert by_tensor > dm.defense("dpsgd", max_norm=1.0, noise_multiplier=6.0).epsilon(**accounting)


def test_as_a_whole_and_without_decay_it_is_dpsgd(classifier, batch):
    own = FedCDP(max_norm=0.5, last_norm=0.5, noise_multiplier=0.0)
    plain = dm.defense("dpsgd", max_norm=0.5, noise_multiplier=0.0)
    first, second = (dm.observe(classifier, batch, defenses=(defense,), seed=1).update for defense in (own, plain))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_refusals(classifier, batch):
    with pytest.raises(dm.Refused, match=r"fed_cdp\.tensors: this model trains \d+ tensors, got 3"):
        dm.observe(classifier, batch, defenses=(FedCDP(**PUBLISHED, tensors=3),))
    with pytest.raises(ValueError, match="last_norm: expected at most max_norm"):
        FedCDP(max_norm=1.0, last_norm=2.0, noise_multiplier=1.0)
    with pytest.raises(ValueError, match="round: expected less than rounds = 100"):
        FedCDP(**PUBLISHED, round=100)
