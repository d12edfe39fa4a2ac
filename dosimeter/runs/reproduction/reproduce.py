"""Reproduce a table: for each row many random batches, every method on the same batches, one record each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dosimeter.config import describe, digest
from dosimeter.engines.decoder.decoding import DecodingAttack
from dosimeter.interfaces import ActiveAttack, Exposure
from dosimeter.randomness import generator
from dosimeter.records import FILE_NAME, lock_folder, read_records, write_record
from dosimeter.runs.decoder_training import train_decoder_of
from dosimeter.runs.experiment import run
from dosimeter.runs.exposures import Exposures, expose
from dosimeter.runs.measurement import AuditedClient, Measurement
from dosimeter.runs.reproduction.comparing import Cell, LawResult, Records, compare_row, judge_laws
from dosimeter.runs.reproduction.library import Library
from dosimeter.runs.reproduction.quantities import Findings, check_quantity
from dosimeter.runs.reproduction.side_measures import SIDE_MEASURES
from dosimeter.runs.reproduction.studies.archive import StudyArchive
from dosimeter.runs.reproduction.tables import Row, Table
from dosimeter.runs.reproduction.targets import aim_at, target_samples
from dosimeter.runs.reproduction.trials import client_of, substitutions, targeted_draw, trial_key
from dosimeter.types import Record
from dosimeter.version import __version__

Progress = Callable[[int, int, str], None]  # trials done, in all, the row at work


@dataclass(frozen=True, kw_only=True)
class Reproduction:
    """A reproduced table: every number and law with its verdict, and every departure from the paper."""

    table: str
    title: str
    source: str
    published: str
    profile: str
    seed: int  # of the first batch; the next batches have the next seeds
    device: str
    version: str
    departures: tuple[str, ...]
    row_departures: dict[str, tuple[str, ...]]
    accuracies: dict[str, float]  # of the trained models, on test images
    cells: tuple[Cell, ...]
    laws: tuple[LawResult, ...]
    seconds: float  # spent in the methods themselves

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "cells": [vars(cell) for cell in self.cells], "laws": [vars(law) for law in self.laws]}


def reproduce(
    table: Table, library: Library, *, out: str | Path | None = None, device: str = "cpu", progress: Progress | None = None
) -> Reproduction:
    """Run the trials that the folder `out` does not hold already. Each record is written as soon as it is made."""
    table = replace(table, rows=tuple(at_hand(row, library) for row in table.rows))
    _check(table, library)
    with lock_folder(out):
        return _reproduce(table, library, None if out is None else Path(out), device, progress)


def _reproduce(table: Table, library: Library, folder: Path | None, device: str, progress: Progress | None) -> Reproduction:
    known, asked = _known_records(folder), asked_quantities(table)
    side_measures = tuple(name for name in SIDE_MEASURES if name in asked)
    if any("lpips" in quantity for quantity in asked):
        library.offer_lpips()
    rows = [row for row in table.rows if not row.skip]
    total, done = sum(row.repeats for row in rows), 0
    records: dict[tuple[str, str], list[Record]] = {(row.name, column): [] for row in rows for column in row.methods}
    findings: dict[tuple[str, str], list[Findings]] = {(row.name, column): [] for row in rows for column in row.studies}
    archive = StudyArchive(folder)
    for row in rows:
        for repeat in range(row.repeats):
            if progress:
                progress(done, total, row.name)
            for column, record in _trial(row, library, table.seed + repeat, device, known, folder, side_measures).items():
                records[row.name, column].append(record)
            for column, found in _studied(row, library, table.seed + repeat, device, archive).items():
                findings[row.name, column].append(found)
            done += 1
    trials: Records = {**records, **findings}
    everything = [record for found in records.values() for record in found]
    return Reproduction(
        table=table.key,
        title=table.title,
        source=table.source,
        published=table.published,
        profile=table.profile,
        seed=table.seed,
        device=device,
        version=__version__,
        departures=table.departures,
        row_departures={row.name: said for row in table.rows if (said := (*row.departures, *_substitutions_of(row, library)))},
        accuracies=_accuracies(everything),
        cells=tuple(cell for row in table.rows for cell in compare_row(row, trials)),
        laws=tuple(judge_laws(table, trials)),
        seconds=sum(record.seconds for record in everything),
    )


def _trial(
    row: Row,
    library: Library,
    seed: int,
    device: str,
    known: dict[tuple[str, str], Record],
    folder: Path | None,
    side_measures: Sequence[str],
) -> dict[str, Record]:
    """The records of one random batch of a row. The client is built only where a record is missing."""
    trial = trial_key(row, library, seed)
    measurements = {column: _measurement(row, library, column, seed) for column in row.methods}
    found = {column: known.get((trial, _method_key(measurement))) for column, measurement in measurements.items()}
    client: AuditedClient | None = None
    exposing = Exposures()
    for column, record in found.items():
        if record is not None:
            continue
        if client is None:
            client = client_of(row, library, seed, device)
            if row.decoder is not None:
                train_decoder_of(client, row.decoder, library.decoder_path(row))
        exposure = exposing(client, measurements[column], client.batch)
        found[column] = made = _measure(client, measurements[column], exposure, side_measures if row.targets else ())
        if folder is not None:
            write_record(folder, made)
    return {column: record for column, record in found.items() if record is not None}


def _studied(row: Row, library: Library, seed: int, device: str, archive: StudyArchive) -> dict[str, Findings]:
    """What each study of a row finds in one trial. The client is built only where a finding is missing."""
    found: dict[str, Findings] = {}
    client: AuditedClient | None = None
    trial = trial_key(row, library, seed) if row.studies else ""
    for column, study in row.studies.items():
        if (known := archive.read(trial, study)) is None:
            client = client or client_of(row, library, seed, device)
            known = study(client, generator(seed, "study"))
            archive.write(trial, study, known)
        found[column] = known
    return found


def _measurement(row: Row, library: Library, column: str, seed: int) -> Measurement:
    """A column's measurement, completed by the trial's seed, the classes of its targets, and the decoder."""
    measurement = replace(row.methods[column], seed=seed)
    if row.targets is not None:
        measurement = aim_at(measurement, targeted_draw(row, library, seed).classes)
    if row.decoder is not None and isinstance(measurement.method, DecodingAttack):
        measurement = replace(measurement, method=replace(measurement.method, decoder=str(library.decoder_path(row))))
    return measurement


def _measure(client: AuditedClient, measurement: Measurement, exposure: Exposure, side_measures: Sequence[str]) -> Record:
    """The trial's record. An active attack is scored on its target samples alone, and so are the side measures."""
    if "targets" not in client.description:
        return run(client, measurement, exposure=exposure)
    own = target_samples(client)
    record = run(own if isinstance(measurement.method, ActiveAttack) else client, measurement, exposure=exposure)
    record = replace(record, threat_model=record.threat_model | {"batch_size": len(client.batch.inputs)})
    if not side_measures or measurement.tampering is None:
        return record
    alone = expose(client, measurement, own.batch)
    return replace(
        record, details=record.details | {name: SIDE_MEASURES[name].compute(exposure, alone, own.batch) for name in side_measures}
    )


def asked_quantities(table: Table) -> set[str]:
    """The quantities that a row shows or publishes, or that a law is about."""
    asked = {quantity for row in table.rows for quantity in (*row.show, *(q for numbers in row.published.values() for q in numbers))}
    return asked | {law.quantity for law in table.laws}


def _method_key(measurement: Measurement) -> str:
    return digest(describe(measurement))


def _known_records(folder: Path | None) -> dict[tuple[str, str], Record]:
    """The records of an earlier run, by trial and method."""
    if folder is None or not (folder / FILE_NAME).exists():
        return {}
    return {
        (r.config["subject"].get("trial", ""), digest({k: v for k, v in r.config.items() if k != "subject"})): r
        for r in read_records(folder)
    }


def at_hand(row: Row, library: Library) -> Row:
    """The row, marked as skipped where it is optional and its weights are missing."""
    weights = row.model.weights or row.backbone
    if not row.optional or row.skip or weights is None:
        return row
    try:
        library.weights(weights)
    except FileNotFoundError:
        return replace(row, skip=f"the weights {weights}* are not at hand")
    return row


def _check(table: Table, library: Library) -> None:
    """Refuse a table whose rows clash or lack data or weights, before the first row runs."""
    names = [row.name for row in table.rows]
    if len(set(names)) < len(names):
        raise ValueError(f"{table.key}: two rows are called {next(name for name in names if names.count(name) > 1)!r}")
    for row in table.rows:
        for quantity in (*row.show, *(q for quantities in row.published.values() for q in quantities)):
            check_quantity(quantity, f"{table.key}, {row.name}")
        if row.skip:
            continue
        for wanted in (row.data, row.data.auxiliary):
            if wanted is not None and wanted.name is not None:
                library.available(wanted.name, wanted.stand_in)
        for weights in (row.model.weights, row.backbone):
            if weights is not None:
                library.weights(weights)


def _substitutions_of(row: Row, library: Library) -> list[str]:
    return [] if row.skip else substitutions(row, library)


def _accuracies(records: Iterable[Record]) -> dict[str, float]:
    """The test accuracy of every trained model."""
    subjects = [record.config["subject"] for record in records]
    return {f"{s['model']} on {s['data']}, {s['stage']}": s["accuracy"] for s in subjects if s.get("accuracy") is not None}
