"""The factors of the maps: channels vote, and a system that does not belong tells nothing."""

import torch
from torch import nn

from dosimeter.engines.shifts.convolutions import ConvolutionLayer
from dosimeter.engines.shifts.scales import _solve, slopes_of


def planted(channels: int, samples: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(4)
    sums = torch.randn(samples, channels, generator=rng, dtype=torch.float64)
    factors = 0.5 + torch.rand(samples, generator=rng, dtype=torch.float64)
    return sums, factors, (sums / factors[:, None]).sum(0)


def test_channels_with_a_wrong_slope_do_not_move_the_factors():
    sums, factors, wanted = planted(96, 7)
    wanted[::5] += torch.linspace(0.1, 3, len(wanted[::5]), dtype=torch.float64)
    found = _solve(sums, wanted, "norm")
    assert found is not None
    assert found.source == "norm.bias"
    assert torch.allclose(found.factors, factors, rtol=1e-10)


def test_a_system_that_does_not_belong_tells_nothing():
    sums, _, wanted = planted(96, 7)
    assert _solve(sums, wanted.flip(0), "norm") is None
    assert _solve(sums, torch.zeros_like(wanted), "norm") is None
    assert _solve(sums[:, :18], wanted[:18], "norm") is None  # 7 unknowns and too few channels beyond them to agree


def test_dead_channels_say_nothing():
    """Their equations read 0 = 0. If they counted, a wrong solution would have a majority."""
    sums, factors, wanted = planted(96, 7)
    sums[:, :60] = wanted[:60] = 0
    wanted[60:64] += torch.linspace(0.5, 3, 4, dtype=torch.float64)
    found = _solve(sums, wanted, "norm")
    assert found is not None
    assert torch.allclose(found.factors, factors, rtol=1e-8)
    sums[:, :80] = wanted[:80] = 0  # 16 are left, too few for 7 unknowns and 12 witnesses
    assert _solve(sums, wanted, "norm") is None


def test_an_output_that_reads_only_zeros_has_no_slope():
    """Maps of zeros leave no trace in the gradient; the other positions' slopes come out all the same."""
    rng = torch.Generator().manual_seed(5)
    module = nn.Conv2d(24, 24, 3, padding=1, bias=False).double()
    maps = torch.rand(2, 24, 2, 2, generator=rng, dtype=torch.float64)
    maps[1] = 0
    outputs = module(maps)
    slopes = torch.randn(outputs.shape, generator=rng, dtype=torch.float64)
    (gradient,) = torch.autograd.grad(outputs, module.weight, slopes)
    layer = ConvolutionLayer(name="one", module=module, height=2, width=2, non_negative=True, obstacle="", gradient=gradient)
    found = slopes_of(layer, maps.flatten(2).transpose(1, 2))
    assert torch.allclose(found[0], slopes[0].flatten(1).T, atol=1e-9)
    assert not found[1].any()
