"""Sweeps: many experiments into one folder. The records are the queue: any worker may die, and no experiment is done twice."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from dosimeter.client.losses import CrossEntropy
from dosimeter.client.training import FedSGD
from dosimeter.config import Surfaced, construct, describe, digest
from dosimeter.interfaces import Defense, LabelRecovery, Loss, Training
from dosimeter.models.loading import ModelConfig
from dosimeter.options import OptionError, PositiveInt, check_fields
from dosimeter.records import cell_path, claim_cell, is_done, read_cell, write_cell
from dosimeter.runs.audited_client import DataConfig, Experiment, prepare
from dosimeter.runs.experiment import failure_record, run
from dosimeter.runs.exposures import Exposures
from dosimeter.runs.measurement import AuditedClient
from dosimeter.surfaces.surface import surfaces
from dosimeter.surfaces.verdicts import verdict_of_failure
from dosimeter.types import Outcome, Record

MOST_EXPERIMENTS = 20_000  # of one sweep: describing so many takes seconds, and a folder holds so many files


@dataclass(frozen=True, kw_only=True)
class Sweep(Surfaced):
    """Every combination of models, data, batch sizes, defenses, methods and seeds, as a TOML file describes it.

    The methods of a surface stand under its plural key, such as `attacks`. Each of them is one experiment; `label_source` says where
    methods that build on labels get them.
    """

    models: tuple[ModelConfig, ...] = field(default_factory=lambda: (ModelConfig(),))
    data: tuple[DataConfig, ...] = field(default_factory=lambda: (DataConfig(),))
    batch_sizes: tuple[PositiveInt, ...] = ()  # none: as each data set says
    defenses: tuple[tuple[Defense, ...], ...] = ((),)
    methods: dict[str, Any] = field(default_factory=dict)  # by the plural key of the surface
    label_source: LabelRecovery | Literal["given", "optimised"] = "given"
    seeds: tuple[int, ...] = (0,)
    training: Training = field(default_factory=FedSGD)
    loss: Loss = field(default_factory=CrossEntropy)
    declare_batch_size: bool = True
    device: str = "auto"

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("models", "data", "defenses", "seeds"):
            if not getattr(self, name):
                raise OptionError(name, "expected at least one, got none")
        if not any(self.methods.values()):
            raise OptionError("methods", f"expected a method under one of {', '.join(surface.plural for surface in surfaces())}, got none")

    @classmethod
    def method_types(cls) -> dict[str, Any]:
        return {surface.plural: tuple[surface.methods.interface, ...] for surface in surfaces()}

    @classmethod
    def collect_methods(cls, by_key: dict[str, Any]) -> dict[str, Any]:
        return {"methods": by_key}

    def by_surface(self) -> dict[str, Any]:
        return self.methods


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One experiment of a sweep, and the key that its record is kept under: a hash of its configuration."""

    key: str
    experiment: Experiment


def cells_of(sweep: Sweep) -> list[Cell]:
    """Every experiment, those that share a client next to one another."""
    named = {surface.plural: surface for surface in surfaces()}
    scored = [(named[plural], method) for plural, methods in sweep.methods.items() for method in methods]
    sizes = sweep.batch_sizes or (None,)
    lengths = {"models": sweep.models, "data": sweep.data, "batch_sizes": sizes, "seeds": sweep.seeds, "defenses": sweep.defenses}
    if (count := math.prod(map(len, (*lengths.values(), scored)))) > MOST_EXPERIMENTS:
        said = " × ".join(f"{len(values)} {name}" for name, values in (*lengths.items(), ("methods", scored)) if len(values) > 1)
        raise OptionError("", f"{said} are {count:,} experiments, more than the {MOST_EXPERIMENTS:,} of one sweep")
    found: dict[str, Cell] = {}
    for model, data, size, seed, defenses, (surface, method) in itertools.product(
        sweep.models, sweep.data, sizes, sweep.seeds, sweep.defenses, scored
    ):
        drawn = data if size is None else construct(DataConfig, describe(data) | {"batch_size": size})
        labels = (
            {"labels": method}
            if surface.key == "labels"
            else {"labels": surface.label_source(method, sweep.label_source), "method": method}
        )
        shared = {name: getattr(sweep, name) for name in ("training", "loss", "declare_batch_size", "device")}
        experiment = Experiment(model=model, data=drawn, seed=seed, defenses=defenses, **labels, **shared)
        key = digest(describe(experiment))
        found.setdefault(key, Cell(key=key, experiment=experiment))
    return list(found.values())


def pending(folder: Path, cells: Sequence[Cell]) -> list[Cell]:
    """The cells whose record the folder lacks. A crash counts as lacking: it is tried again."""
    return [cell for cell in cells if not is_done(folder, cell.key)]


def was_unprepared(folder: Path, key: str) -> bool:
    """Whether a cell's record says that its model or its data were refused, so that nothing was tried."""
    path = cell_path(folder, key)
    return path.is_file() and not (record := read_cell(path)).versions and record.outcome == Outcome.NOT_ATTEMPTED


def work(folder: Path, cells: Sequence[Cell], *, start: int = 0, goes_on: Callable[[], bool] = lambda: True) -> int:
    """Do every cell that nobody has done and nobody is doing, from the cell `start` on. Returns how many were done here.

    Several workers, also of several sweeps, may share the folder. A worker that dies leaves its cell to the others.
    """
    done, client, drawn = 0, None, ""
    exposures = Exposures()
    for cell in [*cells[start:], *cells[:start]]:
        if not goes_on():
            break
        if is_done(folder, cell.key):
            continue
        with claim_cell(folder, cell.key) as mine:
            if not mine or is_done(folder, cell.key):
                continue
            config = cell.experiment
            needed = digest([describe(config.model), describe(config.data), config.seed, config.device])
            try:
                if client is None or needed != drawn:
                    client, drawn = None, needed
                    client, exposures = prepare(config.model, config.data, seed=config.seed, device=config.device), Exposures()
                record = run(client, config.measurement(), exposing=exposures)
            except Exception as error:  # of this combination alone; the others run
                record = _failure(client, config, error)
            write_cell(folder, cell.key, record)
            done += 1
    return done


def _failure(client: AuditedClient | None, config: Experiment, error: Exception) -> Record:
    """The record of an experiment that could not be made: refused with a sentence, or crashed, which the next sweep tries again."""
    refused = isinstance(error, (ValueError, FileNotFoundError))
    outcome = Outcome.NOT_ATTEMPTED if refused else Outcome.CRASHED
    reason = str(error) if refused else f"crashed with {type(error).__name__}: {error}"
    measurement = config.measurement()
    if client is not None:
        return failure_record(client, measurement, outcome, reason)
    plain = describe(config)
    told = {
        "model": config.model.name,
        "data": config.data.name,
        "batch_size": config.data.batch_size,
        "defenses": plain.get("defenses", []),
    }
    return Record(
        key=digest(plain),
        config=plain,
        surface=measurement.surface.name,
        method=measurement.scored.name,
        seed=config.seed,
        threat_model=told,
        metrics={},
        nulls={},
        outcome=outcome.value,
        verdict=verdict_of_failure(outcome, "").value,
        reason=reason,
        warnings=[],
        seconds=0.0,
        versions={},
    )


def spread(workers: int, cells: int) -> Iterator[int]:
    """Where each worker begins, so that they seldom want the same cell."""
    return (round(number * cells / workers) for number in range(workers))


def set_threads(workers: int) -> None:
    """The cores of one worker: its share, or as OMP_NUM_THREADS says."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // (2 * workers)))
