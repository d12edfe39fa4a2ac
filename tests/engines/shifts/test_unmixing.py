"""Samples out of their mixtures: exact where maps have zeros, none where they have not."""

import torch

from dosimeter.engines.shifts.unmixing import unmix


def test_unmixing_finds_sparse_maps_and_no_others():
    rng = torch.Generator().manual_seed(6)
    truth = torch.randn(4, 600, generator=rng, dtype=torch.float64).clamp_min(0)
    mixtures = torch.randn(4, 4, generator=rng, dtype=torch.float64) @ truth
    found = unmix(mixtures, torch.zeros_like(mixtures))
    assert found.certain.all()
    assert len(found.mixing) == 4
    directions, wanted = (x / x.norm(dim=1, keepdim=True) for x in (found.mixing @ mixtures, truth))
    assert torch.allclose((directions @ wanted.T).max(1).values, torch.ones(4, dtype=torch.float64), atol=1e-9)
    dense = torch.randn(4, 4, generator=rng, dtype=torch.float64) @ (truth + 1)
    assert len(unmix(dense, torch.zeros_like(dense)).mixing) == 0
