"""A layer's equations against autograd, and their least-squares solution against the pseudoinverse."""

import pytest
import torch
from torch import nn

from dosimeter.engines.recursion.layer_equations import Equations, output_equations, slope_equations, solve
from dosimeter.network.chain import Link


@pytest.mark.parametrize("options", [{}, {"stride": 2}, {"dilation": 2}, {"padding_mode": "circular"}, {"bias": False}], ids=str)
def test_the_true_input_solves_both_kinds(options):
    torch.manual_seed(1)
    module = nn.Conv2d(2, 5, 3, padding=2, **options).double()
    maps = torch.randn(1, 2, 5, 6, dtype=torch.float64)
    outputs = module(maps)
    slopes = torch.randn_like(outputs)
    (gradient,) = torch.autograd.grad(outputs, module.weight, slopes)
    link = Link(name="one", module=module, shape=(2, 5, 6), before=None)
    for equations in (output_equations(link, outputs.detach().flatten()), slope_equations(link, slopes.flatten(), gradient)):
        assert torch.allclose(equations.matrix @ maps.flatten(), equations.wanted, atol=1e-9)
    unknown = outputs.detach().flatten().clone()
    unknown[::3] = torch.nan
    assert len(output_equations(link, unknown).wanted) == int((~unknown.isnan()).sum())


@pytest.mark.parametrize(("rows", "rank"), [(12, 6), (12, 4), (4, 4)])
def test_the_solution_is_the_pseudoinverses(rows, rank):
    rng = torch.Generator().manual_seed(2)
    matrix = torch.randn(rows, rank, generator=rng, dtype=torch.float64) @ torch.randn(rank, 6, generator=rng, dtype=torch.float64)
    wanted = torch.randn(rows, generator=rng, dtype=torch.float64)
    found = solve(Equations(matrix=matrix, wanted=wanted))
    assert found.rank == rank
    assert torch.allclose(found.value, torch.linalg.pinv(matrix, rcond=1e-9) @ wanted, atol=1e-8)
