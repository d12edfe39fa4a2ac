"""Progress in a log: a line where a method begins and ends, and one now and then in between."""

import logging

import pytest

from dosimeter import bars
from dosimeter.bars import progress_bar, step_bar
from dosimeter.progress import Progress


@pytest.fixture
def clock(monkeypatch, caplog):
    now = [0.0]
    monkeypatch.setattr(logging.getLogger("dosimeter"), "propagate", True)
    caplog.set_level("INFO", logger="dosimeter")
    monkeypatch.setattr(bars.time, "monotonic", lambda: now[0])
    return now


def test_a_line_where_a_method_begins_and_ends(clock, caplog):
    with progress_bar() as show:
        show(Progress("idlg", 0, 2))
        clock[0] = 1.5
        show(Progress("dlg", 1, 2, 0, 100))
        for step in range(100):
            clock[0] += 1
            show(Progress("dlg", 1, 2, step, 100, "objective 0.5"))
    assert caplog.messages == [
        "1 of 2: idlg begins",
        "idlg ends after 1.5 s",
        "2 of 2: dlg begins",
        "dlg, step 29 of 100, objective 0.5, 30 s",
        "dlg, step 59 of 100, objective 0.5, 60 s",
        "dlg, step 89 of 100, objective 0.5, 90 s",
        "dlg ends after 100.0 s",
    ]


def test_a_short_run_says_nothing_and_a_long_one_says_where_it_is(clock, caplog):
    with step_bar() as listener:
        listener(1, 9, "")
        assert caplog.messages == []
        clock[0] = 31.0
        listener(5, 9, "training the model")
    assert caplog.messages == ["step 5 of 9, training the model, 31 s"]


def test_a_forecast_that_comes_late_is_said_then(clock, caplog):
    with progress_bar() as show:
        show(Progress("ilrg", 0, 2, left=0.0))
        show(Progress("dlg", 1, 2, left=20.0))
    assert sum(said.startswith("the attacks will take about 20") for said in caplog.messages) == 1


def test_a_forecast_is_said_once_and_before_the_work(clock, caplog):
    with progress_bar() as show:
        show(Progress("dlg", 0, 2, left=95.0))
        show(Progress("idlg", 1, 2, left=20.0))
    assert caplog.messages[:2] == ["the attacks will take about 1\u202fmin 35\u202fs", "1 of 2: dlg begins"]
    assert sum("will take" in line for line in caplog.messages) == 1


def test_what_is_timed_before_the_work_is_said_and_begins_no_method(clock, caplog):
    with progress_bar() as show:
        show(Progress("dlg", 0, 2, timed=True))
        show(Progress("sapag", 0, 2, timed=True))
        show(Progress("idlg", 0, 2, left=95.0))
    said = [
        "one step of dlg is timed",
        "one step of sapag is timed",
        "the attacks will take about 1\u202fmin 35\u202fs",
        "1 of 2: idlg begins",
    ]
    assert caplog.messages == [*said, "idlg ends after 0.0 s"]
