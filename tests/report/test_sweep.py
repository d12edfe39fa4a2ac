"""The page of a sweep: its panels' titles, rows and scales."""

from dataclasses import replace

from dosimeter.report.sweep import panels


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
