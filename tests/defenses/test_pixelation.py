import pytest
import torch

import dosimeter as dm
from dosimeter.randomness import generator


def _defended(client, name, seed=0, **options):
    return dm.defense(name, **options)(client, generator(seed, "defense"))


@pytest.mark.parametrize("block", [2, 3, 5, 8, 11])
def test_pixelation_averages_each_block(client, block):
    found = _defended(client, "pixelation", block=block).batch.inputs
    for top in range(0, 8, block):
        for left in range(0, 8, block):
            square = (..., slice(top, top + block), slice(left, left + block))
            expected = client.batch.inputs[square].mean((-2, -1), keepdim=True)
            assert torch.allclose(found[square], expected.expand_as(found[square]), atol=1e-6)


def test_a_block_of_zero_is_refused():
    with pytest.raises(ValueError, match=r"defense\.block: expected a positive int"):
        dm.defense("pixelation", block=0)
