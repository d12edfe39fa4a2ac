"""The walk down: every layer's input as a forward pass has it, wrong rectifier entries corrected, undetermined positions left."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import dosimeter as dm
from dosimeter.engines.downward.equations import _floor, solve_input
from dosimeter.engines.downward.layers import Layer, find_layers
from dosimeter.engines.downward.settling import flip_together, solve
from dosimeter.engines.downward.slopes import Backward, Gate
from dosimeter.engines.downward.walk import KnownMap, walk_down
from dosimeter.network.tape import record, tensors_of


def stack(seed: int, width: int = 48) -> nn.Sequential:
    """Stride 2, then two plain layers, in double precision."""
    torch.manual_seed(seed)
    layers = [
        nn.Conv2d(1, width, 3, 2, 1),
        nn.ReLU(),
        nn.Conv2d(width, width, 3, 2, 1),
        nn.ReLU(),
        nn.Conv2d(width, width, 3, 1, 1),
        nn.ReLU(),
    ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10)).double().eval()


def prepared(model: nn.Module, inputs: torch.Tensor, value: int, wrong: tuple[int, ...] = ()):
    """The backward pass from the true maps at `value`, with some rectifier entries wrong; and all values."""
    exposure = dm.observe(model, dm.Batch(inputs, torch.arange(len(inputs)) % 10))
    tape, tensors = record(model, torch.zeros_like(inputs)), tensors_of(model, torch.float64)
    values = dict(enumerate(tape.run({0: inputs}, tensors, range(tape.output + 1))))
    logits = values[tape.output]
    slopes = (logits.softmax(1) - nn.functional.one_hot(torch.arange(len(inputs)) % 10, 10)) / len(inputs)
    backward = Backward(tape, tensors)
    backward.anchors[tape.output] = slopes
    maps = values[value].clone()
    opened = maps > 0
    for entry in wrong:
        opened.view(-1)[entry] ^= True
    everywhere = torch.ones_like(opened)
    backward.put(value, Gate(maps=maps, opened=opened, known=everywhere, doubtful=everywhere, suspect=~everywhere))
    start = KnownMap(value=value, maps=maps, known=everywhere, misfit=0.0)
    return backward, find_layers(tape, exposure.update), start, values


@pytest.mark.parametrize("seed", [0, 1])
def test_every_map_below_is_that_of_a_forward_pass(seed) -> None:
    inputs = torch.rand(2, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    backward, layers, start, values = prepared(stack(seed), inputs, 6)
    found = walk_down(backward, layers, start)
    assert [one.value for one in found.known] == [6, 4, 2, 0]
    for one in found.known:
        assert one.whole
        torch.testing.assert_close(one.maps, values[one.value], rtol=1e-7, atol=1e-9)


def test_wrong_entries_of_a_rectifier_are_found_and_corrected() -> None:
    inputs = torch.rand(2, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    backward, layers, start, values = prepared(stack(5), inputs, 6, wrong=(17, 230))
    found = walk_down(backward, layers, start)
    assert found.known[1].flips == 2
    torch.testing.assert_close(backward.gates[6].opened, values[6] > 0)
    torch.testing.assert_close(found.known[-1].maps, inputs, rtol=1e-6, atol=1e-8)


def test_all_wrong_entries_come_out_of_one_least_squares() -> None:
    inputs = torch.rand(2, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    wrong = (17, 45, 101, 160, 230, 290)
    backward, layers, _, values = prepared(stack(5), inputs, 6, wrong=wrong)
    solution = solve(backward, layers[4], 4, {})
    assert solution.misfit > 1e-3
    found = {entry for _, entry in flip_together(backward, layers[4], solution, {})}
    torch.testing.assert_close(backward.gates[6].opened, values[6] > 0)
    assert found == set(wrong)
    assert solve(backward, layers[4], 4, {}).misfit < 1e-6


@pytest.mark.parametrize("seed", [0, 1])
def test_behind_group_norm_large_errors_are_settled_before_small_ones(seed) -> None:
    """A wrong entry changes the statistics too. Right entries explain what its linear share leaves, and stay as they are."""
    plain = list(stack(seed))
    model = nn.Sequential(*plain[:5], nn.GroupNorm(4, 48), *plain[5:]).double().eval()
    inputs = torch.rand(4, 1, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    wrong = {17, 405, 1201}
    backward, layers, _, values = prepared(model, inputs, 7, wrong=tuple(wrong))
    at = {5: values[5]}
    for _ in range(2):
        found = {entry for _, entry in flip_together(backward, layers[4], solve(backward, layers[4], 4, at), at)}
        assert found <= wrong
        wrong -= found
    assert not wrong
    torch.testing.assert_close(backward.gates[7].opened, values[7] > 0)


def test_nothing_is_flipped_where_the_gradient_is_noise() -> None:
    inputs = torch.rand(2, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    backward, layers, _, values = prepared(stack(5), inputs, 6)
    rng = torch.Generator().manual_seed(0)
    noisy = [
        replace(one, gradient=one.gradient + 0.01 * one.gradient.std() * torch.randn(one.gradient.shape, generator=rng).double())
        for one in layers[4]
    ]
    solution = solve(backward, noisy, 4, {})
    assert solution.misfit > 1e-3
    assert flip_together(backward, noisy, solution, {}) == []
    torch.testing.assert_close(backward.gates[6].opened, values[6] > 0)


def test_positions_with_too_few_equations_are_left_and_said() -> None:
    """Behind a stride of 2, positions between two rows and columns are read at four offsets, those on the grid at one."""
    inputs = torch.rand(6, 1, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    backward, layers, start, values = prepared(stack(2, width=64), inputs, 6)
    found = walk_down(backward, layers, start)
    partial = found.known[-1]
    assert partial.value == 2
    assert 0 < float(partial.known.double().mean()) < 1
    assert "more than the" in found.reasons[2]
    torch.testing.assert_close(partial.maps[partial.known], values[2][partial.known], rtol=1e-6, atol=1e-8)


def test_a_rectifier_behind_the_first_map_that_rounding_opened_is_found() -> None:
    inputs = torch.rand(2, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    backward, layers, start, values = prepared(stack(7), inputs, 4)
    backward.put_all_behind(4, backward.tape.output)
    near = int(values[5].abs().flatten().argmin())
    backward.flip(6, near)
    backward.uncertain = [(6, 0), (6, near)]
    found = walk_down(backward, layers, start)
    assert found.known[1].flips == 1
    torch.testing.assert_close(backward.gates[6].opened, values[6] > 0)
    torch.testing.assert_close(found.known[1].maps, values[2], rtol=1e-6, atol=1e-8)


def balanced(inputs: torch.Tensor) -> tuple[Layer, torch.Tensor]:
    """A projection of stride 2, and slopes at its output that sum to zero over the batch."""
    rng = torch.Generator().manual_seed(0)
    slopes = torch.randn(4, 40, 3, 3, dtype=torch.float64, generator=rng)
    slopes = slopes - slopes.mean((0, 2, 3), keepdim=True)
    gradient = torch.einsum("bohw,bihw->oi", slopes, inputs[:, :, ::2, ::2])[:, :, None, None]
    names = {"output": 1, "source": 0, "weight": "w"}
    return Layer(**names, gradient=gradient, stride=(2, 2), padding=(0, 0), dilation=(1, 1), groups=1), slopes


def test_zeros_of_a_rectifier_show_what_slopes_that_sum_to_zero_leave_open() -> None:
    inputs = torch.randn(4, 5, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).relu()
    layer, slopes = balanced(inputs)
    found = solve_input([layer], {1: slopes}, (4, 5, 6, 6), rectified=True)
    assert found.solved.double().mean() == 0.25
    torch.testing.assert_close(found.maps[:, :, ::2, ::2], inputs[:, :, ::2, ::2], rtol=1e-7, atol=1e-9)
    assert found.floor_spread < 1e-6
    assert not bool(solve_input([layer], {1: slopes}, (4, 5, 6, 6)).solved.any())


def test_a_map_without_zeros_does_not_show_it() -> None:
    inputs = 1 + torch.rand(4, 5, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    layer, slopes = balanced(inputs)
    assert solve_input([layer], {1: slopes}, (4, 5, 6, 6), rectified=True).floor_spread > 1e-2


def test_zero_is_among_the_least_entries() -> None:
    """Four entries that chance brought closer together than the noise of the zeros do not show zero."""
    generator = torch.Generator().manual_seed(0)
    maps = 0.2 + torch.rand(64, 1, generator=generator, dtype=torch.float64)
    maps[:8] = 1e-6 * torch.randn(8, 1, generator=generator, dtype=torch.float64)
    maps[20:24] = 0.5
    floor, spread = _floor(maps - 3)
    assert abs(float(floor) + 3) < 3e-6
    assert spread < 1e-4
