"""The cells of a grid of defenses: what leaks behind each, as the surface counts it, and what its batches leave open."""

import dataclasses

import pytest

from dosimeter.report.cells import cells_of, leaked_share
from dosimeter.surfaces.surface import surface_named


def test_the_leak_is_the_share_beyond_the_nulls(grid_records):
    cells = cells_of(grid_records)
    assert [cell.leaks["inputs"] for cell in cells] == [0.75, 0.25, 0.0]
    assert [cell.name for cell in cells] == ["no defense", "pruning (ratio 0.9)", "gaussian_noise (std 0.1)"]
    assert [cell.defended for cell in cells] == [False, True, True]
    assert cells[2].promises == ["ε 3.00 a client"]


def test_the_most_telling_method_counts_and_a_crash_does_not(make_inputs):
    strong, weak = make_inputs([], [30.0] * 4, "leaked"), make_inputs([], [11.0] * 4, "not shown at this budget", "sapag")
    assert leaked_share(surface_named("inputs"), [weak, strong]) == 1.0
    assert leaked_share(surface_named("inputs"), [weak]) == 0.0
    assert leaked_share(surface_named("inputs"), [dataclasses.replace(strong, outcome="crashed")]) is None
    assert leaked_share(surface_named("labels"), [strong]) is None


def test_features_count_below_half_of_each_null(make_cost):
    metrics, nulls = {"feature_error": [0.1, 0.3, None]}, {"mean": {"feature_error": [0.4, 0.4, 0.4]}, "zero": {"feature_error": [1.0] * 3}}
    record = dataclasses.replace(make_cost([], 0.9, 1.0), surface="features", metrics=metrics, nulls=nulls, verdict="leaked")
    assert leaked_share(surface_named("features"), [record]) == pytest.approx(1 / 3)


def test_the_share_is_the_mean_over_the_batches(make_inputs):
    batches = [make_inputs([], [30.0] * 4, "leaked"), make_inputs([], [11.0] * 4, "not shown at this budget")]
    assert leaked_share(surface_named("inputs"), batches) == 0.5


def test_batches_too_small_to_tell_say_so(make_cost, make_labels):
    price = dataclasses.replace(make_cost([], 0.9, 1.0), threat_model={"defenses": [], "batch_size": 4})
    (cell,) = cells_of([make_labels(1.0, 0.2), price])
    assert cell.leaks == {"labels": 0.0}
    assert "4 samples are too few to tell from luck" in cell.note
    (cell,) = cells_of([make_labels(0.5, 0.9), price])
    assert cell.note == ""


def test_a_cell_has_the_mean_cost_of_its_seeds_and_says_why_one_is_missing(make_cost, make_inputs):
    leak, seeds = make_inputs([], [30.0] * 4, "leaked"), [make_cost([], accuracy, accuracy) for accuracy in (0.8, 0.6)]
    (cell,) = cells_of([leak, *seeds])
    assert (cell.accuracy, cell.kept, cell.bytes_ratio, cell.time_ratio) == (pytest.approx(0.7), pytest.approx(0.7), 0.5, 1.5)
    assert (cell.note, cell.leaking) == ("", ["inputs"])
    crashed = dataclasses.replace(seeds[0], metrics={}, outcome="crashed", reason="no memory")
    (cell,) = cells_of([leak, crashed])
    assert (cell.accuracy, cell.kept, cell.note) == (None, None, "no memory")


def test_settings_without_a_cost_are_no_cells(grid_records):
    assert cells_of(grid_records[::2]) == []
    assert [cell.number for cell in cells_of(grid_records[2:])] == [0, 1]
