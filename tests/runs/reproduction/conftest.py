"""A table small enough to run in a second: bundled digits, a small network."""

import copy
from typing import Any

import pytest

SMALL: dict[str, Any] = {
    "title": "Labels of digits",
    "source": "a test",
    "published": "LeAcc",
    "departures": ["a test"],
    "defaults": {
        "repeats": 3,
        "tolerance": 0.02,
        "show": ["leacc", "insacc"],
        "model": {"name": "fcn3", "hidden": [20], "mode": "eval"},
        "data": {"name": "digits", "size": 8, "batch_size": 4},
        "methods": {"ilrg": {"labels": "ilrg"}, "idlg": {"labels": "idlg"}},
    },
    "quick": {"repeats": 2, "departures": ["2 batches"]},
    "rows": [
        {"name": "digits", "published": {"ilrg": {"leacc": 1.0}}},
        {"name": "other", "vary": {"data.batch_size": [2, 8]}, "published": {"ilrg": {"leacc": [1.0, 0.5]}}},
    ],
    "laws": [{"says": "always", "quantity": "leacc", "column": "ilrg", "at_least": 0.0}],
}


@pytest.fixture
def small() -> dict[str, Any]:
    return copy.deepcopy(SMALL)
