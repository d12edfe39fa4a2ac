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
    mixing = dm.defense("instahide", images=images, largest=largest).coefficients(6, generator(5, "mixing"))[0]
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


def test_half_of_a_blend_is_public_and_has_no_labels(client):
    """Public pictures shrink the client's share: by their coefficients alone, and never below the declared one."""
    defense = dm.defense("instahide", images=4, public="digits")
    mixing, of_public = defense.coefficients(6, generator(5, "mixing"))
    assert torch.allclose(mixing.sum(1) + of_public.sum(1), torch.ones(6, dtype=torch.float64))
    assert max(mixing.max(), of_public.max()) <= 0.65 + 1e-12
    assert ((mixing > 0).sum(1) == 2).all()
    assert (mixing.diagonal() > 0).all()
    assert (mixing.sum(1) >= 0.3 - 1e-12).all()
    assert mixing.sum(1).max() < 1
    hidden = _defended(client, "instahide", seed=5, images=4, public="digits").batch
    torch.testing.assert_close(hidden.targets.sum(1), torch.ones(len(hidden.targets)))
    assert ((hidden.targets > 0).sum(1) <= 2).all()


def test_public_pictures_stand_between_the_blend_and_the_samples(client):
    """What is left of a blend without the client's own samples is like pictures, and as large as the public share."""
    own = client.batch.inputs
    defense = dm.defense("instahide", images=4, public="digits")
    hidden = defense(client, generator(5, "defense")).batch.inputs
    mixing = defense.coefficients(len(own), generator(5, "defense"))[0].to(own)
    private = torch.tensordot(mixing, own, dims=1)
    rest = hidden.abs() - private
    assert float((rest / (1 - mixing.sum(1)).view(-1, 1, 1, 1)).mean()) == pytest.approx(float(own.mean()), rel=0.2)
    other = defense(client, generator(6, "defense")).batch.inputs
    assert not torch.allclose(hidden.abs(), other.abs())


def test_a_public_set_that_does_not_exist_and_too_large_a_share_are_refused(client):
    with pytest.raises((ValueError, FileNotFoundError), match="nowhere"):
        _defended(client, "instahide", public="nowhere.png")
    with pytest.raises(ValueError, match=r"private_share: expected less than 2/4"):
        dm.defense("instahide", public="digits", private_share=0.5)
