from dataclasses import replace

import pytest

from dosimeter.terminal.record import print_record, short
from dosimeter.types import Record


@pytest.fixture
def record() -> Record:
    return Record(
        key="k",
        config={},
        surface="inputs",
        method="dlg",
        seed=0,
        threat_model={},
        metrics={"psnr": [10.0, 20.0, 40.0]},
        nulls={"mean": {"psnr": [12.0, 12.0, 12.0]}, "gray": {}},
        outcome="completed",
        verdict="leaked",
        reason="one input beats its nulls",
        warnings=["too few steps"],
        seconds=1.0,
        versions={},
    )


def test_a_record_shows_its_verdict_its_scores_beside_the_nulls_and_its_warnings(record, capsys):
    print_record(record)
    first, *table, last = capsys.readouterr().out.splitlines()
    assert first == "inputs: leaked (dlg): one input beats its nulls"
    (row,) = [line for line in table if "psnr" in line]
    assert [cell.strip() for cell in row.strip("│").split("│")] == ["psnr", "20", "12", "36", "12", ""]
    assert last == "warning: too few steps"


@pytest.mark.parametrize(("value", "text"), [(None, "–"), (0.012345, "0.0123"), (20.0, "20")])
def test_numbers_have_three_digits_and_a_miss_is_a_dash(value, text):
    assert short(value) == text


def test_the_premises_of_a_proof_stand_beside_it(record, capsys):
    print_record(replace(record, details={"premises": ["the batch size is 8, as declared", "no defense changed the update"]}))
    _, second, *_ = capsys.readouterr().out.splitlines()

    assert second.startswith("what is proved takes for granted: the batch size is 8, as declared;")
