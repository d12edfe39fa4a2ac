"""Which samples the certified ones leave out, by shares of the gradient and by signs of the bias."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import dosimeter as dm
from dosimeter.engines.subspace.count_proof import prove_counts
from dosimeter.engines.subspace.problem import separate_head
from dosimeter.network.head import find_head


def proof_of(labels, black=0, *, bias=True, classes=50, **options):
    """The proof of a batch whose first `black` images are black, in a network whose hidden layer has no bias."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(40, 64, bias=False), nn.ReLU(), nn.Linear(64, classes, bias=bias))
    inputs = torch.rand(len(labels), 40)
    inputs[:black] = 0
    exposure = dm.observe(model, dm.Batch(inputs, torch.tensor(labels)), **options)
    head = find_head(exposure)
    found = separate_head(exposure, head, None, torch.Generator().manual_seed(0), method="subspace", attempts=4, starts=8)
    return prove_counts(found, head, exposure.public), found, head, exposure.public


def counts_of(labels, classes=50):
    return torch.bincount(torch.tensor(labels), minlength=classes)


@pytest.mark.parametrize("labels", [[1, 2, 3, 4, 5], [1, 1, 3, 4, 5], [4, 4, 4, 4, 4]])
@pytest.mark.parametrize("black", [1, 2])
@pytest.mark.parametrize("options", [{}, {"declare_batch_size": False}, {"defenses": [dm.defense("clipping", max_norm=0.01)]}])
def test_signs_prove_black_images(labels, black, options):
    """The law: the counts do not depend on which samples leave a trace in the weight."""
    proof = proof_of(labels, black, **options)[0]
    assert proof.whole
    assert torch.equal(proof.least, counts_of(labels))


@pytest.mark.parametrize("black", [1, 3])
def test_without_a_bias_the_proof_says_how_many_are_missing(black):
    proof = proof_of([1, 2, 3, 4, 5, 6], black, bias=False)[0]
    assert not proof.whole
    assert f"{black} of 6 samples leave no trace" in proof.message
    assert torch.equal(proof.least, counts_of([1, 2, 3, 4, 5, 6][black:]))


def test_an_unknown_scale_and_size_need_a_bias_that_the_samples_explain():
    clipped = {"declare_batch_size": False, "defenses": [dm.defense("clipping", max_norm=0.01)]}
    proof = proof_of([1, 2, 3, 4], **clipped)[0]
    assert proof.whole
    assert "every sample leaves a trace" in proof.premises[0]
    assert not proof_of([1, 2, 3, 4], 1, **clipped)[0].whole
    assert not proof_of([4, 4, 4, 4], 1, **clipped)[0].whole
    assert not proof_of([1, 2, 3, 4], bias=False, **clipped)[0].whole


def test_more_samples_than_declared_refute_the_size():
    _, found, head, public = proof_of([1, 2, 3, 4])
    proof = prove_counts(found, head, replace(public, batch_size=3))
    assert not proof.whole
    assert int(proof.least.sum()) == 0
    assert "one of the two is wrong" in proof.message
