"""What a convolution reads, against the convolution itself; and which kernels tell every position."""

import pytest
import torch
from torch import nn

from dosimeter.network.convolving import convolve
from dosimeter.network.reads import reads_of_module


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stride": 2},
        {"dilation": 2},
        {"padding": 0},
        {"padding_mode": "reflect"},
        {"padding_mode": "circular"},
        {"kernel_size": (2, 3)},
    ],
    ids=str,
)
def test_the_table_is_the_convolution(options):
    module = nn.Conv2d(1, 1, **{"kernel_size": 3, "padding": 1, "bias": False} | options).double()
    maps = torch.rand(1, 1, 5, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    reads = reads_of_module(module, 5, 6)
    flat = torch.cat([maps.flatten(), torch.zeros(1, dtype=torch.float64)])  # index −1 is outside
    found = sum(weight * flat[torch.tensor(row)] for weight, row in zip(module.weight.detach().flatten(), reads.table, strict=True))
    assert torch.allclose(found.reshape(reads.output_height, reads.output_width), convolve(module, maps)[0, 0])


def test_plans_exist_where_the_kernel_tells_every_position():
    def ends(module: nn.Conv2d, side: int = 4) -> list[int]:
        return [plan.start for plan in reads_of_module(module, side, side).plans("inputs")]

    assert ends(nn.Conv2d(1, 1, 3, padding=1)) == [0, 15]
    assert ends(nn.Conv2d(1, 1, 3, padding=1, padding_mode="reflect")) == [0, 15]
    assert ends(nn.Conv2d(1, 1, 4, padding=1)) == [0, 15]
    for module in (
        nn.Conv2d(1, 1, 3, 2, 1),  # a map and the map moved by two positions explain the same gradient
        nn.Conv2d(1, 1, 3, padding=1, padding_mode="circular"),
        nn.Conv2d(1, 1, 3, padding=2, dilation=2),
        nn.Conv2d(1, 1, 1),
    ):
        assert ends(module) == []
