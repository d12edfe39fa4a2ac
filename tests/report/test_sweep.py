"""The page of a sweep: its panels' titles, rows and scales."""

from dataclasses import replace

from dosimeter.report.page import render_sweep
from dosimeter.report.sweep import leaks_by_surface, next_step, panels


def found(make_record, *options, surface="labels", method="ilrg", **metrics):
    """A run without and one behind noise at two batch sizes, for each choice of options."""
    records = {}
    for number, chosen in enumerate(options):
        for std in (0.1, None):
            for size in (1, 4):
                record = make_record(surface, method, std=std, metrics=metrics, reason="so it is")
                record = replace(record, config=record.config | {surface: {"name": method, "refinements": 10} | chosen})
                record.threat_model["batch_size"] = size
                records[f"cells/{number}-{std}-{size}.json"] = record
    return records


def test_a_title_names_the_options_that_tell_methods_apart(make_record):
    assert [panel.method for panel in panels(found(make_record, {}, insacc=[1.0]))] == ["ilrg"]
    two = found(make_record, {"candidates": 8}, {"candidates": 64}, insacc=[1.0])
    assert [panel.method for panel in panels(two)] == ["ilrg (candidates 64)", "ilrg (candidates 8)"]


def test_a_share_stands_between_none_and_all(make_record):
    (panel,) = panels(found(make_record, {}, insacc=[1.0]))
    assert panel.ticks == [(180.0, "0\u202f%"), (90.0, "50\u202f%"), (0.0, "100\u202f%")]
    assert {point.down for curve in panel.curves for point in curve.points} == {0.0}


def test_what_has_no_defense_comes_first(make_record):
    (panel,) = panels(found(make_record, {}, insacc=[1.0]))
    assert [name for name, _ in panel.rows] == [curve.name for curve in panel.curves] == ["no defense", "gaussian_noise (std 0.1)"]


def test_the_first_screen_says_what_leaked_and_what_to_do(make_record):
    runs = found(make_record, {}, insacc=[1.0])
    leaked = {place: replace(run, verdict="leaked") for place, run in runs.items()}
    assert leaks_by_surface(list(leaked.values())) == "labels in 4 of 4"
    assert "behind every defense of this sweep some run leaked" in next_step(list(leaked.values()))
    held = {place: run if "0.1" in place else leaked[place] for place, run in runs.items()}
    assert next_step(list(held.values())).startswith("Consider gaussian_noise (std 0.1): in these runs nothing leaked behind it")
    bare = [run for place, run in leaked.items() if "0.1" not in place]
    assert "dosimeter audit --defenses all" in next_step(bare)
    assert next_step(list(runs.values())).startswith("Do not call the updates safe")
    page = render_sweep(held)
    assert all(said in page for said in ("2 of 4 experiments leaked.", "Labels in 2 of 4.", "What now?"))
    assert "crashed" not in page


def test_an_interval_of_one_value_is_not_shown(make_record):
    same, other = found(make_record, {}, insacc=[1.0]), found(make_record, {}, insacc=[0.5])
    runs = same | {f"{place}-again": replace(run, seed=run.seed + 1) for place, run in same.items()}
    (panel,) = panels(runs)
    assert {cell.interval for _, cells in panel.rows for cell in cells if cell} == {""}
    (panel,) = panels(same | {f"{place}-again": replace(run, seed=run.seed + 1) for place, run in other.items()})
    assert all(cell.interval for _, cells in panel.rows for cell in cells if cell)
