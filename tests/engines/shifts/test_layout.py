"""Where each entry of a map lies: read off a gradient whose maps and slopes are planted."""

import pytest
import torch

from dosimeter.engines.shifts.layout import NoLayout, read_layout


def test_layout_of_a_planted_gradient():
    """G_o = Dᵀ S_o A for random A and D: the maps come back up to one mixing of the samples."""
    rng = torch.Generator().manual_seed(5)
    maps, slopes = (torch.randn(2, 3, 3, 24, generator=rng, dtype=torch.float64) for _ in range(2))
    padded = torch.nn.functional.pad(maps, (0, 0, 1, 1, 1, 1))
    gradient = torch.stack(
        [
            torch.stack([torch.einsum("byxo,byxi->oi", slopes, padded[:, dy : dy + 3, dx : dx + 3]) for dx in range(3)], -1)
            for dy in range(3)
        ],
        -2,
    )
    layout = read_layout(gradient, 3, 3, unit=1e-16)
    flat, truth = layout.maps.flatten(1).T, maps.reshape(2, -1).T
    assert torch.allclose(flat @ torch.linalg.lstsq(flat, truth).solution, truth, atol=1e-8)
    with pytest.raises(NoLayout, match=r"no corner|not a whole number"):
        read_layout(torch.randn(24, 24, 3, 3, generator=rng, dtype=torch.float64), 3, 3, unit=1e-16)
