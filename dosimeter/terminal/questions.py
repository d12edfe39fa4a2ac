"""Questions in SQL over records: `dosimeter ask DIR "SELECT ..."`, answered by DuckDB."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich import box
from rich.table import Table

from dosimeter.options import first_line
from dosimeter.report.frames import as_row
from dosimeter.terminal.console import plain_console
from dosimeter.types import Record

CONFIGURATION = {"enable_external_access": False, "lock_configuration": True, "memory_limit": "1GB"}
MOST_ROWS = 100_000  # of an answer
SAMPLE_COLUMNS = {"key": "VARCHAR", "metric": "VARCHAR", "source": "VARCHAR", "sample": "BIGINT", "value": "DOUBLE"}


def answer(records: Sequence[Record], question: str) -> tuple[list[str], list[tuple[Any, ...]]]:
    """The columns and rows of an answer. The tables are `records`, a row a record, and `samples`, a row a sample, metric and source.

    A question reads these two tables alone: DuckDB opens no file and loads no extension.
    """
    try:
        import duckdb  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ValueError("questions need DuckDB, which is not installed here: pip install 'dosimeter[duckdb]'") from None
    try:
        question.encode()
    except UnicodeEncodeError:
        raise ValueError("the question holds half a character, which DuckDB cannot read") from None
    rows = [as_row(record) for record in records]
    names = list(dict.fromkeys(name for row in rows for name in row))
    with duckdb.connect(config=CONFIGURATION) as connection:
        try:
            _fill(connection, "records", {name: _column_type(row.get(name) for row in rows) for name in names}, rows)
            _fill(connection, "samples", SAMPLE_COLUMNS, [dict(zip(SAMPLE_COLUMNS, one)) for one in _samples(records)])
        except duckdb.Error as error:
            raise ValueError(f"DuckDB cannot hold these records in a table: {first_line(error)}") from None
        try:
            found = connection.execute(question)
            columns = [column[0] for column in found.description] if found and found.description else []
            answers = found.fetchmany(MOST_ROWS + 1) if columns else []
        except duckdb.Error as error:
            raise ValueError(f"DuckDB cannot answer: {first_line(error)}") from None
    if len(answers) > MOST_ROWS:
        raise ValueError(f"the answer has more than {MOST_ROWS:,} rows; a LIMIT or an aggregate makes it shorter")
    return columns, answers


def print_answer(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    table = Table(box=box.SIMPLE_HEAD)
    for name in columns:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*("" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value) for value in row))
    plain_console().print(table)


def _fill(connection: Any, table: str, columns: dict[str, str], rows: list[dict[str, Any]]) -> None:
    if not columns:
        raise ValueError("there are no records to ask about")
    connection.execute(f"CREATE TABLE {table} ({', '.join(f'{_quoted(name)} {kind}' for name, kind in columns.items())})")
    if rows:
        connection.executemany(
            f"INSERT INTO {table} VALUES ({', '.join('?' * len(columns))})",
            [[_fitting(row.get(name), kind) for name, kind in columns.items()] for row in rows],
        )


def _samples(records: Sequence[Record]) -> Iterable[tuple[str, str, str, int, float | None]]:
    for record in records:
        for source, metrics in {"recovered": record.metrics, **record.nulls}.items():
            for metric, values in metrics.items():
                yield from ((record.key, metric, source, i, value) for i, value in enumerate(values))


def _column_type(values: Iterable[Any]) -> str:
    present = [value for value in values if value is not None]
    kinds, integers = {type(value) for value in present}, [value for value in present if isinstance(value, int)]
    if kinds and kinds <= {bool}:
        return "BOOLEAN"
    if kinds and kinds <= {bool, int}:
        return "BIGINT" if all(abs(value) < 2**63 for value in integers) else "DOUBLE"
    return "DOUBLE" if kinds and kinds <= {bool, int, float} else "VARCHAR"


def _fitting(value: Any, kind: str) -> Any:
    return float(value) if kind == "DOUBLE" and value is not None else value


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
