"""The premises of a certificate name what was declared."""

from dataclasses import replace

import torch
from torch import nn

import dosimeter as dm
from dosimeter.engines.premises import premises_of


def exposed(**options):
    return dm.observe(nn.Linear(4, 3), dm.Batch(torch.rand(2, 4), torch.tensor([0, 1])), **options).public


def test_the_declared_batch_size_is_a_premise():
    assert "the batch size is 2, as declared" in premises_of(exposed())
    assert not any("batch size" in premise for premise in premises_of(exposed(), size_matters=False))


def test_without_a_declared_size_the_smallest_batch_is_meant():
    assert any("smallest batch" in premise for premise in premises_of(replace(exposed(), batch_size=None)))


def test_declared_defenses_are_named():
    premises = premises_of(exposed(defenses=(dm.defense("clipping", max_norm=1.0),)))
    assert "no defense but clipping changed the update" in premises
    assert "no defense changed the update" in premises_of(exposed())
