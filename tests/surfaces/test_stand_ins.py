"""Drawn samples scatter in brightness and contrast, lie in [0, 1], and are the same for the same generator."""

import pytest
import torch

from dosimeter.surfaces.stand_ins import draw_stand_ins


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 8, 8), (2, 5, 3), (20,), (4, 7)])
def test_stand_ins_scatter_within_the_pixels_range(shape):
    drawn = draw_stand_ins(shape, 60, torch.Generator().manual_seed(1))
    assert drawn.shape == (60, *shape)
    assert float(drawn.min()) >= 0
    assert float(drawn.max()) <= 1
    assert float(drawn.flatten(1).mean(1).std()) > 0.2
    assert len(drawn.flatten(1).unique(dim=0)) == 60
    assert torch.equal(drawn, draw_stand_ins(shape, 60, torch.Generator().manual_seed(1)))


def test_pictures_are_flat_smooth_and_noisy_in_turn():
    drawn = draw_stand_ins((3, 32, 32), 10, torch.Generator().manual_seed(2))
    roughness = drawn.diff(dim=3).abs().flatten(1).mean(1)
    assert int((roughness == 0).sum()) == 2
    assert float(roughness.max()) > 10 * float(roughness[roughness > 0].min())


def test_one_is_enough():
    assert draw_stand_ins((3, 8, 8), 1, torch.Generator().manual_seed(3)).shape == (1, 3, 8, 8)
