"""Optimisers against PyTorch's own, several restarts at once."""

import pytest
import torch
from torch import Tensor

from dosimeter.engines.matching.optimisers import LBFGS, Adam

MATRIX = torch.randn(12, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
MATRIX = MATRIX @ MATRIX.T / 12 + 0.1 * torch.eye(12, dtype=torch.float64)
STARTS = torch.randn(3, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def valley(x: Tensor) -> Tensor:
    return 0.5 * x @ MATRIX @ x - x.sum() + 0.01 * (x**4).sum()


def slopes(variables: Tensor) -> Tensor:
    return torch.stack([torch.func.grad(valley)(row) for row in variables])


def walked(optimiser: LBFGS | Adam, steps: int, rate: float) -> Tensor:
    variables = STARTS.clone()
    state = optimiser.start(variables)
    for _ in range(steps):
        variables = optimiser.step(state, variables, slopes(variables), rate)
    return variables


def reference(build, steps: int) -> Tensor:
    return torch.stack([walked_by_pytorch(build, start.clone().requires_grad_(), steps) for start in STARTS])


def walked_by_pytorch(build, row: Tensor, steps: int) -> Tensor:
    optimiser = build([row])

    def closure() -> Tensor:
        optimiser.zero_grad()
        value = valley(row)
        value.backward()
        return value

    for _ in range(steps):
        optimiser.step(closure)
    return row.detach()


@pytest.mark.parametrize("history", [3, 100])
def test_lbfgs_walks_as_pytorchs_does(history: int) -> None:
    theirs = reference(lambda rows: torch.optim.LBFGS(rows, history_size=history, max_iter=1, tolerance_grad=0, tolerance_change=0), 12)
    assert torch.allclose(walked(LBFGS(history=history), 12, 1.0), theirs, rtol=1e-9, atol=1e-9)


def test_adam_walks_as_pytorchs_does() -> None:
    theirs = reference(lambda rows: torch.optim.Adam(rows, lr=0.05), 20)
    assert torch.allclose(walked(Adam(), 20, 0.05), theirs, rtol=1e-10)


def test_a_signed_step_has_the_size_of_the_rate_and_ignores_the_gradients_scale() -> None:
    variables = torch.zeros(1, 3)
    gradient = torch.tensor([[1e-6, -5.0, 0.0]])
    moved = Adam(sign="signed").step(Adam().start(variables), variables, gradient, 0.1)
    assert moved[0].tolist() == pytest.approx([-0.1, 0.1, 0.0], abs=1e-6)


def test_the_soft_sign_is_rounded_to_halves_of_the_median_and_mixed_with_the_sign() -> None:
    gradient = torch.tensor([[0.1, 0.6, -1.0, 1.3, -9.0]])  # median magnitude 1
    soft = Adam(sign="soft")._take_sign(gradient)
    assert soft[0].tolist() == pytest.approx([0.2, 0.6, -1.0, 1.0, -1.0])


def test_a_restart_that_stands_still_does_not_disturb_the_others() -> None:
    variables = STARTS.clone()
    optimiser = LBFGS()
    state = optimiser.start(variables)
    for _ in range(12):
        gradient = slopes(variables)
        gradient[1] = 0
        variables = optimiser.step(state, variables, gradient, 1.0)
    assert torch.equal(variables[1], STARTS[1])
    assert torch.allclose(variables[[0, 2]], walked(LBFGS(), 12, 1.0)[[0, 2]], rtol=1e-9, atol=1e-9)


def test_weight_decay_is_that_of_pytorchs_adamw():
    ours = walked(Adam(weight_decay=0.1), 20, 0.05)
    theirs = reference(lambda rows: torch.optim.AdamW(rows, lr=0.05, weight_decay=0.1), 20)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
