"""Questions over records: DuckDB's answers are those of the records, and it touches nothing else."""

import json

import pytest

from dosimeter.records import write_record
from dosimeter.terminal.questions import answer

duckdb = pytest.importorskip("duckdb")


@pytest.fixture
def records(make_record):
    psnr = ([12.0, 20.0, 16.0], [30.0, 31.0, None])
    nulls = {"mean": {"psnr": [10.0, 11.0, 12.0]}}
    return [make_record("inputs", f"attack_{i}", metrics={"psnr": list(values)}, nulls=nulls) for i, values in enumerate(psnr)]


def test_a_row_for_each_record_and_for_each_sample(records):
    columns, rows = answer(records, "SELECT method, psnr FROM records ORDER BY method")
    assert columns == ["method", "psnr"]
    assert rows[0] == ("attack_0", 16.0)
    question = "SELECT source, max(value) FROM samples JOIN records USING (key) WHERE method = 'attack_0' GROUP BY ALL ORDER BY ALL"
    assert answer(records, question)[1] == [("mean", 12.0), ("recovered", 20.0)]
    assert answer(records, "SELECT count(*) FROM samples WHERE value IS NULL")[1] == [(1,)]


@pytest.mark.parametrize(
    "question", ["", ";", "SELEC", "SELECT nothing FROM records", "INSTALL httpfs", "SET enable_external_access = true"]
)
def test_what_is_no_question_gets_a_sentence(records, question):
    if not question.strip(";"):
        assert answer(records, question) == ([], [])
        return
    with pytest.raises(ValueError, match="DuckDB cannot answer"):
        answer(records, question)


@pytest.mark.parametrize(
    ("question", "sentence"),
    [
        ("SELECT '\ud800'", "half a character"),
        ("SELECT * FROM range(1000000000000)", "more than 100,000 rows"),
    ],
)
def test_questions_without_end(records, question, sentence):
    with pytest.raises(ValueError, match=sentence):
        answer(records, question)


def test_odd_records_fill_a_table_or_get_a_sentence(make_record):
    large = make_record("inputs", "x", metrics={"psnr": [1.0]}, seed=2**70)
    assert answer([large], "SELECT seed FROM records")[1] == [(2.0**70,)]
    for metrics in ({"PSNR": [1.0], "psnr": [1.0]}, {"": [1.0]}):
        with pytest.raises(ValueError, match="cannot hold these records"):
            answer([make_record("inputs", "x", metrics=metrics)], "SELECT 1")


def test_dates_and_bytes_are_text_in_json(records, tmp_path, capsys):
    from dosimeter.cli import main

    write_record(tmp_path, records[0])
    assert main(["ask", str(tmp_path), "SELECT DATE '2020-01-02' AS day, 'a'::BLOB AS word, 1.5::DECIMAL(9, 2) AS n", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [{"day": "2020-01-02", "word": "b'a'", "n": "1.50"}]


def test_no_file_is_read_or_written(records, tmp_path):
    (tmp_path / "secret.csv").write_text("word\nhidden\n")
    for question in (f"SELECT * FROM '{tmp_path}/secret.csv'", f"COPY records TO '{tmp_path}/out.csv'", f"ATTACH '{tmp_path}/new.db'"):
        with pytest.raises(ValueError, match="DuckDB cannot answer"):
            answer(records, question)
    assert [path.name for path in tmp_path.iterdir()] == ["secret.csv"]


def test_the_command_answers_in_a_table_and_in_json(records, tmp_path, capsys):
    from dosimeter.cli import main

    for record in records:
        write_record(tmp_path, record)
    assert main(["ask", str(tmp_path), "SELECT method FROM records ORDER BY method", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [{"method": "attack_0"}, {"method": "attack_1"}]
    assert main(["ask", str(tmp_path), "SELECT method FROM records"]) == 0
    assert "attack_1" in capsys.readouterr().out
    assert main(["ask", str(tmp_path), "SELECT FROM"]) == 2
