"""Rows of a table: columns in their own units and categories, in scores, nulls, verdicts and reports, never PSNR."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import dosimeter as dm
from dosimeter.report.page import render
from dosimeter.surfaces.surface import surface_named
from dosimeter.types import Reconstruction

COLUMNS = dm.Columns(
    {
        "age": dm.Number(17, 90, unit="years", mean=38, std=13),
        "sex": dm.Category("f", "m"),
        "work": dm.Category("none", "part", "full"),
        "hours": dm.Number(0, 80, mean=40, std=10),
    }
)


def people(count, seed):
    stream = torch.Generator().manual_seed(seed)
    numbers = torch.randn(count, 2, generator=stream).clamp(-1.6, 2)
    sex, work = torch.randint(2, (count,), generator=stream), torch.randint(3, (count,), generator=stream)
    return torch.cat([numbers[:, :1], nn.functional.one_hot(sex, 2), nn.functional.one_hot(work, 3), numbers[:, 1:]], 1).float()


TRUTH = dm.Batch(people(3, 0), torch.tensor([0, 1, 2]))
KNOWN = dm.Batch(people(60, 1), torch.randint(3, (60,), generator=torch.Generator().manual_seed(2)))


def recovered(inputs):
    return Reconstruction(inputs=inputs, labels=TRUTH.targets, objective=0.0, normalization=COLUMNS)


def test_rows_are_scored_column_by_column_and_never_in_decibels():
    wrong = TRUTH.inputs.clone()
    wrong[0, 0] += 1  # 13 years
    wrong[1, 1:3] = wrong[1, 1:3].flip(0)
    scores = dm.score(recovered(wrong.flip(0)), TRUTH, auxiliary=KNOWN)
    assert scores.assignment.tolist() == [2, 1, 0]
    assert scores["columns_right"].tolist() == [0.75, 0.75, 1.0]
    assert set(scores) == {"columns_right"}
    assert set(scores.nulls) == {"mean", "nearest"}
    assert "rows of a table" in scores.unavailable["psnr"]
    blind = dm.score(recovered(wrong), TRUTH)
    assert set(blind.nulls) == {"middle"}
    assert not blind.warnings


def test_the_null_of_the_mean_says_the_most_common_category():
    known = dm.Batch(KNOWN.inputs.clone(), KNOWN.targets)
    known.inputs[:, 1:3] = torch.tensor([1.0, 0.0])
    known.inputs[:25, 1:3] = torch.tensor([0.0, 1.0])
    truth = dm.Batch(TRUTH.inputs.clone(), TRUTH.targets)
    truth.inputs[:, 0], truth.inputs[:, 1:3] = 9.0, torch.tensor([1.0, 0.0])
    assert dm.score(recovered(truth.inputs), truth, auxiliary=known).nulls["mean"]["columns_right"].min() >= 0.25


def test_rows_leak_where_they_beat_every_null_and_luck():
    surface = surface_named("inputs")
    foreign = recovered(people(3, 5))
    verdict, reason = surface.judge(recovered(TRUTH.inputs), dm.score(recovered(TRUTH.inputs), TRUTH, auxiliary=KNOWN, foreign=foreign), 1)
    assert verdict == "leaked", reason
    # one row has a twin among the known ones, up to the tolerance
    assert "2 of 3 rows beat every null by a tenth of their columns or more" in reason
    guess = recovered(people(3, 6))
    verdict, reason = surface.judge(guess, dm.score(guess, TRUTH, auxiliary=KNOWN, foreign=foreign), 1)
    assert verdict == "not shown at this budget"
    verdict, reason = surface.judge(recovered(TRUTH.inputs), dm.score(recovered(TRUTH.inputs), TRUTH, auxiliary=KNOWN), 1)
    assert verdict == "not shown at this budget"
    assert "no leak is claimed without a null of the same kind" in reason


def test_values_outside_of_the_declared_range_are_said():
    beyond = dm.Batch(TRUTH.inputs.clone(), TRUTH.targets)
    beyond.inputs[0, -1] = 40
    assert dm.score(recovered(beyond.inputs), beyond).warnings == ("private values of hours lie outside of the declared range",)


def test_rows_of_other_sizes_are_refused():
    with pytest.raises(ValueError, match=r"truth.inputs: expected rows of 7 inputs, as declared by Columns, got \(3, 6\)"):
        dm.score(recovered(TRUTH.inputs), dm.Batch(TRUTH.inputs[:, :6], TRUTH.targets))


def test_undeclared_rows_are_told_how_to_be_declared():
    plain = replace(recovered(TRUTH.inputs), normalization=dm.Normalization())
    scores = dm.score(plain, TRUTH)
    assert any("dm.Columns" in warning for warning in scores.warnings)
    assert "dm.Columns" in scores.unavailable["columns_right"]


def test_an_attack_searches_distributions_over_categories_and_the_report_names_columns():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 32), nn.Sigmoid(), nn.Linear(32, 3)).eval()
    options = {"normalization": COLUMNS, "auxiliary": KNOWN}
    exposure = dm.observe(model, TRUTH, **options)
    found = dm.reconstruct(exposure, "inverting_gradients", labels=TRUTH.targets, steps=5)
    torch.testing.assert_close(found.inputs[:, 1:3].sum(1), torch.ones(3))
    torch.testing.assert_close(found.inputs[:, 3:6].sum(1), torch.ones(3))
    attack = dm.attack("dlg", steps=60, restarts=1)
    audit = dm.audit(model, TRUTH, attacks=[attack], labels=["subspace"], features=[], maps=[], **options)
    (record,) = [record for record in audit.records if record.surface == "inputs"]
    assert set(record.metrics) == {"columns_right"}
    assert "psnr" not in record.metrics
    assert "years" in record.evidence[0]["private"]["age"]
    assert record.evidence[0]["private"]["sex"] in ("f", "m")
    page = render([replace(record, seconds=1.0) for record in audit.records])
    assert "columns right" in page
    assert "years" in page
