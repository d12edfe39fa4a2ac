"""Where each entry of a map lies: read off a gradient whose maps and slopes are planted."""

import pytest
import torch
from torch import nn

from dosimeter.engines.shifts.layout import NoLayout, read_layout
from dosimeter.network.reads import reads_of_module


def test_layout_of_a_planted_gradient():
    """G_o = Dᵀ S_o A for random A and D: the maps come back up to one mixing of the samples."""
    rng = torch.Generator().manual_seed(5)
    reads = reads_of_module(nn.Conv2d(24, 24, 3, padding=1), 3, 3)
    maps, slopes = (torch.randn(2, 3, 3, 24, generator=rng, dtype=torch.float64) for _ in range(2))
    padded = torch.nn.functional.pad(maps, (0, 0, 1, 1, 1, 1))
    gradient = torch.stack(
        [
            torch.stack([torch.einsum("byxo,byxi->oi", slopes, padded[:, dy : dy + 3, dx : dx + 3]) for dx in range(3)], -1)
            for dy in range(3)
        ],
        -2,
    )
    layout = read_layout(gradient, reads, unit=1e-16)
    flat, truth = layout.maps.flatten(1).T, maps.reshape(2, -1).T
    assert torch.allclose(flat @ torch.linalg.lstsq(flat, truth).solution, truth, atol=1e-8)
    with pytest.raises(NoLayout, match=r"no corner|not a whole number"):
        read_layout(torch.randn(24, 24, 3, 3, generator=rng, dtype=torch.float64), reads, unit=1e-16)


@pytest.mark.parametrize(
    ("channels", "dead", "side", "options"),
    [
        ((40, 40), 0, "inputs", {}),
        ((40, 40), 16, "outputs", {}),  # 24 channels are alive, and two samples have 32 positions
        ((20, 40), 0, "outputs", {}),
        ((40, 20), 0, "inputs", {}),
        ((40, 40), 0, "inputs", {"padding_mode": "reflect"}),
        ((40, 40), 0, "inputs", {"padding_mode": "replicate"}),
        ((40, 40), 0, "inputs", {"kernel_size": 4}),
        ((40, 40), 0, "inputs", {"kernel_size": 5, "padding": 2}),
        ((40, 40), 0, "inputs", {"padding": 0}),  # by waves, as the next one
        ((40, 80), 0, "outputs", {"padding": 2}),
    ],
    ids=str,
)
def test_one_side_with_as_many_channels_as_positions_is_enough(channels, dead, side, options):
    rng = torch.Generator().manual_seed(7)
    module = nn.Conv2d(*channels, **{"kernel_size": 3, "padding": 1, "bias": False} | options).double()
    maps = torch.randn(2, channels[0], 4, 4, generator=rng, dtype=torch.float64).clamp_min(0)
    maps[:, :dead] = 0
    outputs = module(maps)
    (gradient,) = torch.autograd.grad(outputs, module.weight, torch.randn(outputs.shape, generator=rng, dtype=torch.float64))
    layout = read_layout(gradient, reads_of_module(module, 4, 4), unit=1e-12)
    flat, truth = layout.maps.flatten(1).T, maps.flatten(2).transpose(1, 2).flatten(1).T
    assert layout.side == side
    assert torch.allclose(flat @ torch.linalg.lstsq(flat, truth).solution, truth, atol=1e-8)


def test_a_stride_that_ends_at_both_edges_is_read_by_the_waves_of_its_outputs():
    rng = torch.Generator().manual_seed(8)
    module = nn.Conv2d(20, 24, 3, 2, 1, bias=False).double()
    maps = torch.randn(2, 20, 5, 5, generator=rng, dtype=torch.float64)
    outputs = module(maps)
    (gradient,) = torch.autograd.grad(outputs, module.weight, torch.randn(outputs.shape, generator=rng, dtype=torch.float64))
    layout = read_layout(gradient, reads_of_module(module, 5, 5), unit=1e-12)
    flat, truth = layout.maps.flatten(1).T, maps.flatten(2).transpose(1, 2).flatten(1).T
    assert layout.side == "outputs"
    assert torch.allclose(flat @ torch.linalg.lstsq(flat, truth).solution, truth, atol=1e-8)
    with pytest.raises(NoLayout, match=r"no waves|not a whole number"):
        read_layout(torch.randn(24, 20, 3, 3, generator=rng, dtype=torch.float64), reads_of_module(module, 5, 5), unit=1e-16)
