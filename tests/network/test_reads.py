"""What a convolution reads, against the convolution itself; and which kernels tell every position."""

import pytest
import torch
from torch import nn

from dosimeter.network.convolving import convolve
from dosimeter.network.reads import freedom, reads_of_module


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


def brute_freedom(module: nn.Conv2d, height: int, width: int) -> int:
    """The dimension of all (X, Y) with S_o Y = X S_o on the whole grid, by the rank of one large system."""
    shifts = []
    for offset in range(module.kernel_size[0] * module.kernel_size[1]):
        kernel = torch.zeros(1, 1, *module.kernel_size, dtype=torch.float64)
        kernel.view(-1)[offset] = 1
        units = torch.eye(height * width, dtype=torch.float64).reshape(-1, 1, height, width)
        shifts.append(module._conv_forward(units, kernel, None).flatten(1).T.contiguous())
    outputs, inputs = shifts[0].shape
    own, other = torch.eye(inputs, dtype=torch.float64), torch.eye(outputs, dtype=torch.float64)
    system = torch.cat([torch.cat([torch.kron(one, own), -torch.kron(other, one.T.contiguous())], 1) for one in shifts])
    return system.shape[1] - int(torch.linalg.matrix_rank(system))


@pytest.mark.parametrize(
    ("options", "side", "ways"),
    [
        ({"kernel_size": 3, "padding": 1}, 4, 1),
        ({"kernel_size": 3}, 4, 1),
        ({"kernel_size": 3, "padding": 1, "padding_mode": "circular"}, 4, 16),
        ({"kernel_size": 3, "padding": 2, "dilation": 2}, 4, 16),
        ({"kernel_size": 3, "padding": 1, "stride": 2}, 4, 4),
        ({"kernel_size": 3, "padding": 1, "stride": 2}, 5, 1),
        ({"kernel_size": 1}, 3, 81),
    ],
)
def test_the_ways_to_rearrange_a_map_are_counted_by_rows_and_columns(options, side, ways):
    module = nn.Conv2d(1, 1, **options)
    assert freedom(module, side, side) == brute_freedom(module, side, side) == ways


def test_a_map_and_its_mixture_with_a_moved_copy_have_one_gradient_behind_circular_padding():
    rng = torch.Generator().manual_seed(6)
    maps, slopes = torch.randn(2, 2, 3, 4, 4, generator=rng, dtype=torch.float64)  # (B, C, H, W) each
    module = nn.Conv2d(3, 3, 3, padding=1, padding_mode="circular", bias=False).double()

    def gradient(inputs: torch.Tensor, behind: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad((module(inputs) * behind).sum(), module.weight)[0]

    def solved(values: torch.Tensor) -> torch.Tensor:
        """The slopes that belong to maps to which a third of their neighbours is added: (1 + P / 3)⁻ᵀ D."""
        power, total = values, values
        for _ in range(60):
            power = -power.roll(-1, 3) / 3
            total = total + power
        return total

    mixed = maps + maps.roll(1, 3) / 3
    assert not torch.allclose(mixed, maps)
    assert torch.allclose(gradient(maps, slopes), gradient(mixed, solved(slopes)), atol=1e-12)


@pytest.mark.parametrize(("kernel", "stride", "padding"), [(3, 1, 0), (3, 1, 2), (3, 2, 1), (3, 2, 0), (4, 1, 0), (5, 2, 1), (2, 1, 0)])
def test_every_map_that_the_gradient_determines_is_read_by_a_walk_or_by_waves(kernel, stride, padding):
    module, read = nn.Conv2d(1, 1, kernel, stride, padding), []
    for side in (4, 5, 6, 7):
        reads = reads_of_module(module, side, side)
        told = bool(reads.equations("inputs") or reads.equations("outputs"))
        assert told == (reads.all_read and freedom(module, side, side) == 1)
        read.append(told)
    assert any(read)


def test_two_offsets_see_a_wave_alike():
    """A wave is z₁^row z₂^column at every position; where two offsets are d apart, one sees the other's values times z^d."""
    reads = reads_of_module(nn.Conv2d(1, 1, 3), 5, 6)
    rows, columns = torch.meshgrid(torch.arange(5), torch.arange(6), indexing="ij")
    wave = torch.exp(1j * (0.4 * rows + 1.1 * columns)).flatten()
    assert len(reads.alike("inputs")) == 8
    assert reads.alike("outputs") == ()
    for one in reads.alike("inputs"):
        turn = torch.exp(torch.tensor(1j * (0.4 * one.down + 1.1 * one.across)))
        seen, other = (wave[torch.tensor(reads.table[offset])] for offset in (one.offset, one.other))
        assert torch.allclose(seen, turn * other)
