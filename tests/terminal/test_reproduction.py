"""What is printed, for a person and for a pipe."""

import pytest

from dosimeter.runs.reproduction.comparing import Agreement, Cell
from dosimeter.runs.reproduction.reproduce import Reproduction
from dosimeter.terminal.reproduction import print_reproduction

ROW = "soft labels by mixup of the images' own and of random labels, on the CIFAR-10 ResNet-20 trained to 92 %"
COLUMNS = ("a trained network, the standard deviation of its weights multiplied by 0.5", "the same, multiplied by 0.25")


@pytest.fixture
def result():
    cells = tuple(
        Cell(
            row=ROW,
            column=column,
            quantity="labels recovered to within 1e-3 of the truth",
            published=0.987,
            measured=measured,
            standard_error=0.0123,
            trials=1024,
            verdict=Agreement.REPRODUCED,
            reason="within the published spread",
        )
        for column, measured in zip(COLUMNS, (0.981, 0.975), strict=True)
    )
    whole = {
        "seed": 0,
        "device": "cpu",
        "version": "0",
        "departures": (),
        "row_departures": {},
        "accuracies": {},
        "laws": (),
        "seconds": 1.0,
    }
    return Reproduction(table="soft-labels/table1", title="t", source="s", published="p", profile="quick", cells=cells, **whole)


def test_a_reproduction_in_a_pipe_is_cut_nowhere(result, capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    print_reproduction(result)
    lines = capsys.readouterr().out.splitlines()
    for column, measured in zip(COLUMNS, ("0.981 ± 0.012", "0.975 ± 0.012"), strict=True):
        line = next(line for line in lines if column in line)
        for shown in ("labels recovered to within 1e-3 of the truth", "0.987", measured, "1024", "reproduced: within the published spread"):
            assert shown in line


def test_a_narrow_terminal_folds_words_and_keeps_numbers(result, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    print_reproduction(result)
    shown = capsys.readouterr().out
    assert "…" not in shown
    for heading in ("published", "measured", "batches", "verdict", "0.987", "0.981 ± 0.012", "0.975 ± 0.012", "1024"):
        assert heading in shown
    assert "reproduc" in shown
