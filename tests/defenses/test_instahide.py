from dataclasses import replace

import pytest
import torch
from torch import nn

import dosimeter as dm
from dosimeter.randomness import generator


def _defended(client, name, seed=0, **options):
    return dm.defense(name, **options)(client, generator(seed, "defense"))


@pytest.mark.parametrize(("images", "largest"), [(2, 0.65), (4, 0.65), (6, 0.17)])
def test_instahide_coefficients_sum_to_one_and_none_is_too_large(images, largest):
    mixing = dm.defense("instahide", images=images, largest=largest).mixing_matrix(6, generator(5, "mixing"))
    assert torch.allclose(mixing.sum(1), torch.ones(6, dtype=torch.float64))
    assert ((mixing > 0).sum(1) == images).all()
    assert (mixing.diagonal() > 0).all()
    assert mixing.max() <= largest + 1e-12


def test_instahide_magnitudes_are_those_of_the_blend_and_half_the_signs_flip(client):
    identity = nn.functional.pad(torch.eye(6).view(6, 1, 1, 6), (0, 2, 0, 7))
    hidden = _defended(replace(client, batch=dm.Batch(identity, torch.arange(6))), "instahide", images=3).batch
    coefficients = hidden.inputs[:, 0, 0, :6]
    assert torch.allclose(coefficients.abs(), hidden.targets[:, :6], atol=1e-6)
    constant = replace(client, batch=dm.Batch(torch.ones(6, 1, 8, 8), torch.arange(6)))
    assert abs(_defended(constant, "instahide", images=3).batch.inputs.mean().item()) < 0.2


def test_instahide_needs_enough_samples_and_a_possible_ceiling(client):
    with pytest.raises(dm.Refused, match="blends 7 samples"):
        _defended(client, "instahide", images=7)
    with pytest.raises(ValueError, match=r"defense\.largest: expected more than 1/2"):
        dm.defense("instahide", images=2, largest=0.5)
