"""Questions in SQL over records: `dosimeter ask DIR "SELECT ..."`, answered by DuckDB."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich import box
from rich.table import Table

from dosimeter.report.frames import as_row
from dosimeter.terminal.console import plain_console
from dosimeter.types import Record

SAMPLE_COLUMNS = {"key": "VARCHAR", "metric": "VARCHAR", "source": "VARCHAR", "sample": "BIGINT", "value": "DOUBLE"}


def answer(records: Sequence[Record], question: str) -> tuple[list[str], list[tuple[Any, ...]]]:
    """The columns and rows of an answer. The tables are `records`, a row a record, and `samples`, a row a sample, metric and source.

    A question reads these two tables alone: DuckDB opens no file and loads no extension.
    """
    try:
        import duckdb  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ValueError("questions need DuckDB, which is not installed here: pip install 'dosimeter[duckdb]'") from None
    rows = [as_row(record) for record in records]
    names = list(dict.fromkeys(name for row in rows for name in row))
    with duckdb.connect(config={"enable_external_access": False, "lock_configuration": True}) as connection:
        _fill(connection, "records", {name: _column_type(row.get(name) for row in rows) for name in names}, rows)
        _fill(connection, "samples", SAMPLE_COLUMNS, [dict(zip(SAMPLE_COLUMNS, one)) for one in _samples(records)])
        try:
            found = connection.execute(question)
            return ([column[0] for column in found.description], found.fetchall()) if found and found.description else ([], [])
        except duckdb.Error as error:
            raise ValueError(f"DuckDB cannot answer: {str(error).splitlines()[0]}") from None


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
            f"INSERT INTO {table} VALUES ({', '.join('?' * len(columns))})", [[row.get(name) for name in columns] for row in rows]
        )


def _samples(records: Sequence[Record]) -> Iterable[tuple[str, str, str, int, float | None]]:
    for record in records:
        for source, metrics in {"recovered": record.metrics, **record.nulls}.items():
            for metric, values in metrics.items():
                yield from ((record.key, metric, source, i, value) for i, value in enumerate(values))


def _column_type(values: Iterable[Any]) -> str:
    kinds = {type(value) for value in values if value is not None}
    if kinds and kinds <= {bool}:
        return "BOOLEAN"
    if kinds and kinds <= {bool, int}:
        return "BIGINT"
    return "DOUBLE" if kinds and kinds <= {bool, int, float} else "VARCHAR"


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
