"""The damped loop: closed-form and textbook minima, every row as if it were alone, and each way to end."""

import pytest
import torch
from scipy.optimize import least_squares

from dosimeter.engines.least_squares import Damping, Problem, minimise, minimise_by_chords


class Linear(Problem):
    """A x = b, one system a row."""

    def __init__(self, matrix: torch.Tensor, right: torch.Tensor) -> None:
        self.matrix, self.right = matrix, right
        self.evaluations = 0

    def evaluate(self, unknowns, rows):
        self.evaluations += 1
        residual = (self.matrix[rows] @ unknowns[:, :, None])[:, :, 0] - self.right[rows]
        return residual.square().sum(1), (residual,)

    def normal_equations(self, unknowns, rows, parts):
        slope = self.matrix[rows].transpose(1, 2)
        return slope @ slope.transpose(1, 2), (slope @ parts[0][:, :, None])[:, :, 0]


class Rosenbrock(Problem):
    """ρ = (10 (y − x²), c − x) with c of each row; the minimum is (c, c²)."""

    def __init__(self, centres: torch.Tensor) -> None:
        self.centres = centres

    def evaluate(self, unknowns, rows):
        x, y = unknowns.unbind(1)
        residual = torch.stack([10 * (y - x.square()), self.centres[rows] - x], 1)
        return residual.square().sum(1), (residual,)

    def normal_equations(self, unknowns, rows, parts):
        x = unknowns[:, 0]
        slope = torch.stack([torch.stack([-20 * x, torch.full_like(x, 10)], 1), torch.stack([-torch.ones_like(x), 0 * x], 1)], 1)
        return slope.transpose(1, 2) @ slope, (slope.transpose(1, 2) @ parts[0][:, :, None])[:, :, 0]


@pytest.fixture
def systems(rng):
    return Linear(torch.randn(5, 8, 3, generator=rng, dtype=torch.float64), torch.randn(5, 8, generator=rng, dtype=torch.float64))


def test_a_linear_problem_ends_at_its_normal_equations_solution(systems):
    found = minimise(systems, torch.zeros(5, 3, dtype=torch.float64), Damping(), iterations=30)
    exact = torch.linalg.lstsq(systems.matrix, systems.right[:, :, None]).solution[:, :, 0]
    torch.testing.assert_close(found.unknowns, exact, rtol=1e-10, atol=1e-12)
    left = (systems.matrix @ exact[:, :, None])[:, :, 0] - systems.right
    torch.testing.assert_close(found.value, left.square().sum(1))
    torch.testing.assert_close(found.parts[0], left, rtol=1e-8, atol=1e-10)


def test_one_step_is_the_damped_formula(systems):
    """x₁ = x₀ − (AᵀA + λ diag(AᵀA))⁻¹ Aᵀρ."""
    start, damping = torch.ones(5, 3, dtype=torch.float64), Damping(first=0.5, ridge=0.0)
    found = minimise(systems, start, damping, iterations=1)
    for row in range(5):
        matrix = systems.matrix[row]
        normal = matrix.T @ matrix
        step = torch.linalg.solve(normal + 0.5 * torch.diag(normal.diagonal()), matrix.T @ (matrix @ start[row] - systems.right[row]))
        torch.testing.assert_close(found.unknowns[row], start[row] - step)


def test_a_curved_valley_ends_where_scipy_ends_and_rows_do_not_mix():
    centres = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    start = torch.tensor([[-1.2, 1.0]], dtype=torch.float64).repeat(3, 1)
    together = minimise(Rosenbrock(centres), start, Damping(), iterations=200)
    for row, centre in enumerate(centres):
        alone = minimise(Rosenbrock(centre[None]), start[:1], Damping(), iterations=200)
        assert torch.equal(together.unknowns[row], alone.unknowns[0])
        reference = least_squares(lambda x, c=float(centre): [10 * (x[1] - x[0] ** 2), c - x[0]], start[0].numpy(), method="lm")
        assert together.unknowns[row].tolist() == pytest.approx(reference.x.tolist(), abs=1e-7)
        assert together.unknowns[row].tolist() == pytest.approx([float(centre), float(centre) ** 2], abs=1e-10)


def test_the_value_never_rises_with_more_steps():
    values = [
        float(minimise(Rosenbrock(torch.ones(1, dtype=torch.float64)), torch.tensor([[-1.2, 1.0]]).double(), Damping(), iterations=n).value)
        for n in range(12)
    ]
    assert values == sorted(values, reverse=True)
    assert values[0] == pytest.approx(24.2)


def test_rejected_steps_need_not_count():
    start = torch.tensor([[-1.2, 1.0]], dtype=torch.float64)
    counted, free = (
        minimise(Rosenbrock(torch.ones(1, dtype=torch.float64)), start, Damping(first=1e-12), iterations=8, count_rejected=count)
        for count in (True, False)
    )
    assert float(free.value) < float(counted.value)


def test_patience_ends_a_slow_descent(systems):
    """Heavy damping that never shrinks gains little a step."""
    slow = Damping(first=1e3, shrink=1.0, most=1e9)
    minimise(systems, torch.zeros(5, 3, dtype=torch.float64), slow, iterations=500, patience=4)
    assert systems.evaluations == 1 + 4


def test_a_singular_row_stays_where_it_is_and_leaves_the_others_alone(systems):
    systems.matrix[2] = torch.nan
    found = minimise(systems, torch.zeros(5, 3, dtype=torch.float64), Damping(), iterations=30)
    assert found.unknowns[2].tolist() == [0, 0, 0]
    others = torch.tensor([0, 1, 3, 4])
    exact = torch.linalg.lstsq(systems.matrix[others], systems.right[others][:, :, None]).solution[:, :, 0]
    torch.testing.assert_close(found.unknowns[others], exact, rtol=1e-10, atol=1e-12)


class Counted(Rosenbrock):
    """Counts the matrices of every row."""

    def __init__(self, centres: torch.Tensor) -> None:
        super().__init__(centres)
        self.matrices = torch.zeros(len(centres), dtype=torch.int64)

    def normal_equations(self, unknowns, rows, parts):
        self.matrices[rows] += 1
        return super().normal_equations(unknowns, rows, parts)

    def gradient(self, unknowns, rows, parts):
        return super().normal_equations(unknowns, rows, parts)[1]


def test_chords_solve_a_linear_problem_with_one_matrix(systems):
    expected = minimise(systems, torch.zeros(5, 3, dtype=torch.float64), Damping(), iterations=30)
    found = minimise_by_chords(systems, torch.zeros(5, 3, dtype=torch.float64), Damping(), iterations=30, matrices=30)
    torch.testing.assert_close(found.unknowns, expected.unknowns, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found.value, expected.value)


def test_chords_end_in_the_valley_too_with_fewer_matrices_and_never_more_than_allowed():
    centres = torch.tensor([1.0, -0.5, 2.0], dtype=torch.float64)
    start = torch.tensor([[-1.2, 1.0]] * 3, dtype=torch.float64)
    whole, chords, few = Counted(centres), Counted(centres), Counted(centres)
    minimise(whole, start, Damping(), iterations=200)
    found = minimise_by_chords(chords, start, Damping(), iterations=200, matrices=200)
    torch.testing.assert_close(found.unknowns, torch.stack([centres, centres.square()], 1), rtol=1e-6, atol=1e-6)
    assert bool((chords.matrices <= whole.matrices).all())
    minimise_by_chords(few, start, Damping(), iterations=200, matrices=3)
    assert few.matrices.tolist() == [3, 3, 3]
