"""Findings outlive a run, and a table of studies alone runs by the command."""

import json
from dataclasses import dataclass
from typing import ClassVar

import pytest

from dosimeter.options import OptionError
from dosimeter.runs.reproduction.library import Library
from dosimeter.runs.reproduction.reproduce import reproduce
from dosimeter.runs.reproduction.studies.archive import FILE_NAME
from dosimeter.runs.reproduction.studies.study import STUDIES, Study
from dosimeter.runs.reproduction.tables import parse_table


@pytest.fixture
def studied():
    data = {"name": "digits", "size": 8, "batch_size": 4}
    return {
        "title": "A study",
        "rows": [
            {
                "name": "digits",
                "repeats": 2,
                "tolerance": 0.02,
                "model": {"name": "fcn3", "hidden": [20]},
                "data": data,
                "studies": {"estimate": "loss_estimate"},
                "published": {"estimate": {"loss_estimate_error": 0.01}},
                "show": ["batch_accuracy"],
            }
        ],
        "laws": [{"says": "small", "quantity": "loss_estimate_error", "column": "estimate", "at_most": 1.0}],
    }


def test_a_table_of_studies_gives_numbers_and_laws_and_resumes(studied, tmp_path, monkeypatch):
    table, library = parse_table(studied, "a/b"), Library(data=tmp_path, cache=tmp_path / "cache")
    first = reproduce(table, library, out=tmp_path / "out")
    assert [(cell.quantity, cell.trials) for cell in first.cells] == [("loss_estimate_error", 2), ("batch_accuracy", 2)]
    assert first.laws[0].verdict == "reproduced"
    assert len(json.loads((tmp_path / "out" / FILE_NAME).read_text())) == 2
    monkeypatch.setattr("dosimeter.runs.reproduction.reproduce.client_of", None)  # nothing is computed again
    assert reproduce(table, library, out=tmp_path / "out").cells == first.cells


def test_a_study_that_is_unknown_or_named_like_a_method_is_refused(studied):
    with pytest.raises(OptionError, match=r"rows\[0\].studies.estimate: no study named 'loss_estimat'"):
        parse_table(studied | {"rows": [studied["rows"][0] | {"studies": {"estimate": "loss_estimat"}}]}, "a/b")
    with pytest.raises(OptionError, match="the name of a method's column too"):
        parse_table(studied | {"rows": [studied["rows"][0] | {"methods": {"estimate": {"labels": "ilrg"}}}]}, "a/b")


def test_a_study_names_its_quantities():
    @dataclass(frozen=True, kw_only=True)
    class Silent(Study):
        """Says nothing."""

        quantities: ClassVar = {}

        def __call__(self, client, rng):
            return {}

    with pytest.raises(ValueError, match="it names no quantities"):
        STUDIES.register("silent")(Silent)
    kinds = {}
    for name in STUDIES:
        for quantity, error in STUDIES.entry(name).quantities.items():
            assert kinds.setdefault(quantity, error) == error
