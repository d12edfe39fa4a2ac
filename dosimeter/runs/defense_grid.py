"""A grid of defenses: what leaks behind each defense at each strength, and what that defense costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch

from dosimeter.config import construct, describe, digest, override
from dosimeter.interfaces import Defense, Recovery
from dosimeter.models.loading import ModelConfig
from dosimeter.options import FiniteFloat, OptionError, PositiveInt
from dosimeter.progress import Listener, Progress, listening
from dosimeter.randomness import generator
from dosimeter.records import lock_folder, write_record
from dosimeter.registry import DEFENSES, defense, options_of
from dosimeter.runs.audit import Audit, AuditConfig, Suite, known_records, run_suite
from dosimeter.runs.audited_client import DataConfig, fingerprints_of
from dosimeter.runs.measurement import AuditedClient, Protocol, facts_of, versions
from dosimeter.runs.utility import Federation, Utility, measure_utility
from dosimeter.surfaces.surface import Surface, surfaces
from dosimeter.surfaces.verdicts import UTILITY
from dosimeter.types import Batch, Outcome, Record, Refused


@dataclass(frozen=True, kw_only=True)
class SmallImages(DataConfig):
    """The data of any audit, with small images by default, so that many trainings and attacks take minutes."""

    name: str = "digits"


@dataclass(frozen=True, kw_only=True)
class DefenseGrid(AuditConfig):
    """An audit of many defenses as a TOML file describes it. Each entry of `grid`, a cell, is a list of defenses tried together.

    "all" stands for every defense that has usual strengths, at each strength. The defenses of `defenses` act in every cell,
    before the cell's own. Every cell is audited on `batches` private batches, so that no advice rests on one draw. The batches
    after the first are held-out images, each with its own seed. The methods default to a few strong ones and the data to small
    images, so that the whole grid takes minutes.
    """

    model: ModelConfig = field(default_factory=lambda: ModelConfig(options={"activation": "relu"}))
    data: SmallImages = field(default_factory=SmallImages)
    grid: Literal["all"] | tuple[tuple[Defense, ...], ...] = "all"
    batches: PositiveInt = 3
    federation: Federation = field(default_factory=Federation)
    largest_ceiling: FiniteFloat = 20.0  # PSNR of an input, in dB, that no attacker may exceed: the advice looks for such a defense

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.privacy is not None:
            raise OptionError("privacy", "expected no grid of defenses beside it; audit behind the setting alone")

    def default_choice(self, surface: Surface[Any]) -> tuple[Recovery, ...]:
        if surface.optional and () in self.methods.values():
            return ()
        return tuple(surface.methods.build(name, **options) for name, options in surface.grid_methods.items())

    @property
    def cells(self) -> tuple[tuple[Defense, ...], ...]:
        """The defenses of every cell. The first cell has only the defenses that all cells have."""
        own = strengths(_with_strengths()) if self.grid == "all" else self.grid
        return tuple(dict.fromkeys((self.defenses, *((*self.defenses, *cell) for cell in own))))


def grid_of(text: str) -> Literal["all"] | tuple[tuple[Defense, ...], ...]:
    """The grid that `--defenses` names: all, or a list of defenses, each with its own options or at its usual strengths.

    Commas separate defenses and colons their options: `pruning,gaussian_noise:std=0.1,dpsgd:max_norm=1:noise_multiplier=0.5`.
    """
    return "all" if text.strip() == "all" else strengths([item.strip() for item in text.split(",") if item.strip()])


def strengths(items: Sequence[str]) -> tuple[tuple[Defense, ...], ...]:
    """The cells of each item: one with the options given, else one for each usual strength, else one without options."""
    if not items:
        raise OptionError("defenses", "expected all, or defenses parted by commas, got none")
    return tuple((built,) for item in items for built in _settings(item))


def _settings(item: str) -> list[Defense]:
    name, *words = item.split(":")
    entry = DEFENSES.entry(name, "defenses")
    if words:
        return [construct(Defense, override({"name": name}, words), "defenses")]
    if usual := _usual_options(name):
        return [defense(name, **options) for options in usual]
    required = [option.name for option in options_of(entry) if option.required]
    if required:
        raise OptionError("defenses", f"{name!r} has no usual strength; say it, as in {name}:{':'.join(f'{one}=...' for one in required)}")
    return [defense(name)]


def _usual_options(name: str) -> tuple[dict[str, Any], ...]:
    return getattr(DEFENSES.entry(name), "strengths", ())


def _with_strengths() -> list[str]:
    """The defenses that name a mild and a strong setting."""
    return [name for name in DEFENSES if _usual_options(name)]


def run_grid(
    client: AuditedClient,
    grid: DefenseGrid,
    *,
    out: str | Path | None = None,
    progress: Callable[[Progress], None] | None = None,
    checkpoint_every: float | None = None,
    max_seconds: float | None = None,
) -> Audit:
    """Audit the client behind every cell's defenses and measure their cost. Records that the folder `out` holds are not made again."""
    folder = None if out is None else Path(out)
    with lock_folder(folder):
        return _run_cells(client, grid, folder, progress, checkpoint_every, max_seconds)


def _run_cells(
    client: AuditedClient,
    grid: DefenseGrid,
    folder: Path | None,
    progress: Callable[[Progress], None] | None,
    checkpoint_every: float | None,
    max_seconds: float | None,
) -> Audit:
    suite: dict[str, Any] = {item.name: getattr(grid, item.name) for item in fields(Suite)}
    suite["methods"] = {s.plural: grid.choice(s) for s in surfaces() if s.plural in grid.methods or "numbers" in s.reads}
    cells, records, cuts, resumed, began = grid.cells, [], [], 0, time.perf_counter()
    clients = _audited_clients(client, grid)
    undefended: Record | None = None
    for number, defenses in enumerate(cells):
        protocol = _with_counters(Suite(**{**suite, "defenses": defenses}))
        shown = None if progress is None else _grid_progress(progress, number, len(cells), defenses)
        refusal = ""
        try:
            for draw, drawn in enumerate(clients):
                seeded = replace(protocol, seed=protocol.seed + draw)
                audits_left = (len(cells) - number) * len(clients) - draw
                share = None if max_seconds is None else max(1.0, max_seconds - (time.perf_counter() - began)) / audits_left
                settings = {"progress": shown, "checkpoint_every": checkpoint_every, "beside": clients, "max_seconds": share}
                found = run_suite(drawn, seeded, out=folder, **settings)
                records.extend(found.records)
                cuts.extend(found.cuts)
                resumed += found.resumed
        except Refused as refused:
            if number == 0:
                raise
            refusal = str(refused)
        cost, was_known = _utility_record(clients, protocol, grid, folder, undefended, refusal, shown)
        undefended = undefended or cost
        records.append(cost)
        resumed += was_known
    return Audit(records=tuple(records), resumed=resumed, cuts=tuple(dict.fromkeys(cuts)))


def _with_counters(suite: Suite) -> Suite:
    """The suite, with methods that need neither the head nor labels added where the defenses withhold or replace the head."""
    if not suite.adaptive or not any(one.hides_head for one in suite.defenses):
        return suite
    return replace(suite, methods={s.plural: _with_headless_methods(s, suite.choice(s)) for s in surfaces() if s.plural in suite.methods})


def _with_headless_methods(surface: Surface[Any], chosen: Any) -> Any:
    if chosen in ("all", ()):
        return chosen
    entries: dict[str, Any] = {name: surface.methods.entry(name) for name in surface.headless_methods}
    headless = [surface.methods.build(name, **entry.quick) for name, entry in entries.items()]
    return (*chosen, *(method for method in headless if method not in chosen))


def _audited_clients(client: AuditedClient, grid: DefenseGrid) -> list[AuditedClient]:
    """The client with its own batch, and with other batches drawn from the held-out images, until too few images are left."""
    clients, held_out, size = [client], client.held_out, len(client.batch.inputs)
    left = torch.arange(0 if held_out is None or held_out.targets.ndim != 1 else len(held_out.inputs))
    while held_out is not None and len(clients) < grid.batches and len(left) >= size:
        labels, rng = held_out.targets[left].cpu(), generator(grid.seed + len(clients), "private batch")
        try:
            chosen = left[grid.data.sampler(labels, size, int(held_out.targets.max()) + 1, rng)]
        except ValueError:  # too few are left to draw alike
            break
        batch = Batch(held_out.inputs[chosen], held_out.targets[chosen])
        clients.append(replace(client, batch=batch, description=client.description | fingerprints_of(client.model, batch)))
        left = left[~torch.isin(left, chosen)]
    return clients


def _utility_record(
    clients: Sequence[AuditedClient],
    protocol: Suite,
    grid: DefenseGrid,
    folder: Path | None,
    undefended: Record | None,
    refusal: str,
    progress: Callable[[Progress], None] | None,
) -> tuple[Record, bool]:
    """The record of what these defenses cost, measured here or read from the folder; and whether it was read."""
    client = clients[0]
    plain = Protocol(**{item.name: getattr(protocol, item.name) for item in fields(Protocol)})
    config = {"subject": describe(client.description), **describe(plain), UTILITY: describe(grid.federation)}
    record = known_records(folder, *clients).get(digest(config))
    limit = {"largest_ceiling": grid.largest_ceiling}  # the user's, which changes nothing that is measured
    if record is not None and record.outcome != Outcome.CRASHED:
        limited = replace(record, details=record.details | limit)
        if folder and limited != record:
            write_record(folder, limited)  # the latest line of a key counts
        return limited, True
    began = time.perf_counter()
    with listening(None if progress is None else _listener(progress)):
        found = _failure_fields(Outcome.NOT_ATTEMPTED, refusal) if refusal else _measure_cost(client, plain, grid.federation, undefended)
    record = Record(
        key=digest(config),
        config=config,
        surface=UTILITY,
        method="federated training",
        seed=protocol.seed,
        threat_model=facts_of(client, plain),
        nulls={},
        verdict="",
        warnings=[],
        seconds=time.perf_counter() - began,
        versions=versions(client),
        **found | {"details": found["details"] | limit},
    )
    if folder:
        write_record(folder, record)
    return record, False


def _measure_cost(client: AuditedClient, protocol: Protocol, federation: Federation, undefended: Record | None) -> dict[str, Any]:
    try:
        return _cost_fields(measure_utility(client, protocol, federation), undefended)
    except Refused as refused:
        return _failure_fields(Outcome.NOT_ATTEMPTED, str(refused))
    except Exception as error:  # as in an audit: one cell's defect must not cost the others
        return _failure_fields(Outcome.CRASHED, f"crashed with {type(error).__name__}: {error}")


def _failure_fields(outcome: Outcome, reason: str) -> dict[str, Any]:
    return {"outcome": outcome.value, "reason": reason, "metrics": {}, "details": {}}


def _cost_fields(cost: Utility, undefended: Record | None) -> dict[str, Any]:
    """A utility as fields of a record, with its ratios to the undefended run."""
    before = cost.accuracy if undefended is None else undefended.metrics.get("accuracy", [None])[0]
    kept = cost.accuracy / before if before else None
    epsilon = min((guarantee.epsilon for guarantee in cost.guarantees if guarantee.unit != "label"), default=None)
    metrics: dict[str, list[float | None]] = {
        "accuracy": [cost.accuracy],
        "accuracy_kept": [kept],
        "update_bytes": [cost.update_bytes],
        "bytes_ratio": [cost.update_bytes / cost.dense_bytes],
        "update_seconds": [cost.update_seconds],
        "time_ratio": [cost.update_seconds / cost.undefended_seconds],
        "epsilon": [epsilon],
    }
    promises = [f"ε = {g.epsilon:.3g} at δ = {g.delta:g} for each {g.unit} ({g.source})" for g in cost.guarantees]
    reason = "; ".join(
        [f"accuracy {cost.accuracy:.1%}" + (f", {kept:.1%} of the undefended run's" if undefended is not None and kept is not None else "")]
        + [f"{cost.update_bytes} bytes an update", f"{cost.update_seconds / cost.undefended_seconds:.2f} times a client's time"]
        + (promises or ["no ε"])
        + ([f"diverged {cost.message}"] if cost.outcome is Outcome.DIVERGED else [])
    )
    return {
        "outcome": cost.outcome.value,
        "reason": reason,
        "metrics": metrics,
        "details": {"guarantees": [vars(guarantee) for guarantee in cost.guarantees], "guessing": cost.guessing},
    }


def _listener(progress: Callable[[Progress], None]) -> Listener:
    return lambda done, steps, note: progress(Progress("utility", 0, 1, done, steps, note))


def _grid_progress(
    progress: Callable[[Progress], None], number: int, cells: int, defenses: tuple[Defense, ...]
) -> Callable[[Progress], None]:
    """A cell's progress as that of the whole grid."""
    name = defenses[-1].name if defenses else "no defense"

    def show(inner: Progress) -> None:
        progress(replace(inner, method=f"{name}: {inner.method}", position=number, methods=cells))

    return show
