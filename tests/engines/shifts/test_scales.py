"""The factors of the maps: channels vote, and a system that does not belong tells nothing."""

import torch

from dosimeter.engines.shifts.scales import _solve


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
