"""Columns of a table: their place in the model's inputs, their words, and distributions over categories."""

import math

import pytest
import torch

import dosimeter as dm
from dosimeter.columns import nearest_distribution
from dosimeter.normalization import from_pixels, input_bounds, to_pixels

COLUMNS = dm.Columns(
    {
        "age": dm.Number(17, 90, unit="years", mean=38, std=13),
        "sex": dm.Category("f", "m"),
        "income": dm.Number(0, 1, spread=0.2),
        "work": dm.Category("none", "part", "full"),
    }
)
ROW = torch.tensor([[(30 - 38) / 13, 0.0, 1.0, 0.25, 0.0, 0.0, 1.0]], dtype=torch.float64)


def test_columns_are_read_in_their_own_units():
    assert COLUMNS.sizes == (1, 2, 1, 3)
    assert COLUMNS.words(to_pixels(ROW, COLUMNS)[0]) == {"age": "30 years", "sex": "m", "income": "0.25", "work": "full"}
    assert COLUMNS.words(torch.full((7,), torch.nan))["sex"] == "–"
    torch.testing.assert_close(from_pixels(to_pixels(ROW, COLUMNS), COLUMNS), ROW)
    low, high = input_bounds(COLUMNS, ROW)
    assert (low[0, 0].item() * 13 + 38, high[0, 0].item() * 13 + 38) == (pytest.approx(17), pytest.approx(90))
    assert (low[0, 1:3].tolist(), high[0, 4:].tolist()) == ([0, 0], [1, 1, 1])


def test_scores_count_in_standard_deviations_and_categories_are_one_apart():
    other = ROW.clone()
    other[0, 0] += 2  # 26 years
    other[0, 1:3] = torch.tensor([0.6, 0.4])
    other[0, 3] += 0.1
    mine, true = (COLUMNS.as_scores(to_pixels(row, COLUMNS)) for row in (other, ROW))
    parts = (mine - true).split(COLUMNS.sizes, 1)
    assert [part.norm().item() for part in parts] == [pytest.approx(2), pytest.approx(1), pytest.approx(0.5), 0]
    assert dm.Number(0, 6).scatter == pytest.approx(6 / math.sqrt(12))


def test_projection_gives_the_nearest_distribution():
    values = torch.randn(200, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = nearest_distribution(values)
    assert torch.allclose(found.sum(1), torch.ones(200, dtype=torch.float64))
    assert bool((found >= 0).all())
    grid = torch.distributions.Dirichlet(torch.ones(4, dtype=torch.float64)).sample((2000,))
    assert bool((torch.cdist(values, grid).amin(1) >= (values - found).norm(dim=1) - 1e-12).all())
    inside = grid[:5]
    torch.testing.assert_close(nearest_distribution(inside), inside)
    projected = COLUMNS.project(torch.ones(2, 3, 7))
    assert projected[0, 0].tolist() == [1, 0.5, 0.5, 1, *[pytest.approx(1 / 3)] * 3]


@pytest.mark.parametrize(
    ("build", "told"),
    [
        (lambda: dm.Columns({}), "Columns: expected a mapping"),
        (lambda: dm.Columns(["age"]), "Columns: expected a mapping"),
        (lambda: dm.Columns({"age": 3}), "Columns.age: expected a dm.Number or a dm.Category, got 3"),
        (lambda: dm.Number(3, 3), "Number.high: expected more than low = 3, got 3"),
        (lambda: dm.Number(0, math.inf), "Number.high: expected a finite number"),
        (lambda: dm.Number(0, 1, std=0), "expected positive numbers"),
        (lambda: dm.Category("f"), "Category: expected at least two different names"),
        (lambda: dm.Category("f", "f"), "Category: expected at least two different names"),
    ],
)
def test_what_declares_no_columns_is_refused(build, told):
    with pytest.raises((ValueError, TypeError), match=told):
        build()


def test_columns_that_do_not_fit_the_model_are_refused():
    model = torch.nn.Linear(5, 2)
    with pytest.raises(ValueError, match="Columns declares 7 inputs of the model, and a sample has 5"):
        dm.observe(model, dm.Batch(torch.rand(2, 5), torch.tensor([0, 1])), normalization=COLUMNS)
    with pytest.warns(UserWarning, match="values of age lie outside of the range"):
        dm.observe(torch.nn.Linear(7, 2), dm.Batch(ROW.float() + 9 * torch.eye(7)[:1], torch.tensor([0])), normalization=COLUMNS)
