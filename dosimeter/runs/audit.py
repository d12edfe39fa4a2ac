"""The whole suite on one client: every method that fits, one record each, and the verdict on every surface."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from dosimeter.artefacts import CHECKPOINT_FOLDER, save_checkpoints
from dosimeter.bars import progress_bar
from dosimeter.client.checks import check_model, defense_list
from dosimeter.client.losses import OwnLoss
from dosimeter.client.observe import loss_for
from dosimeter.client.training import FedSGD
from dosimeter.config import Surfaced, describe
from dosimeter.engines.adaptation import adapt, distrust
from dosimeter.engines.needs import check_needs
from dosimeter.files import check_path
from dosimeter.interfaces import Defense, Exposure, LabelRecovery, Loss, PrivacySetting, Recovery, Tampering, Training
from dosimeter.models.loading import ModelConfig
from dosimeter.network.head import locate_head
from dosimeter.network.leftovers import nothing_kept
from dosimeter.network.model_state import copy_of
from dosimeter.network.probing import join_inputs
from dosimeter.options import OptionError, PositiveInt, check_value
from dosimeter.progress import Listener, Progress, listening
from dosimeter.records import FILE_NAME, lock_folder, read_records, write_record
from dosimeter.registry import DEFENSES, TRAININGS, suggestion
from dosimeter.registry import privacy as privacy_setting
from dosimeter.runs.audit_ceilings import AuditCeilings
from dosimeter.runs.audited_client import DataConfig, client_from
from dosimeter.runs.choosing import Budget, choose_methods, resolve_methods
from dosimeter.runs.devices import choose_device, model_on, to_device
from dosimeter.runs.dp_guarantee import defenses_of, with_guarantee
from dosimeter.runs.experiment import failure_record, run
from dosimeter.runs.exposures import Expose, Exposures
from dosimeter.runs.measurement import AuditedClient, Measurement, Protocol, key_of
from dosimeter.runs.received import protocol_of, received_client
from dosimeter.runs.timing import (
    QUICK_SECONDS,
    OutOfTime,
    Timetable,
    left_out,
    quick_simulation,
    quick_training,
    seconds_a_step,
    within_quick_budget,
)
from dosimeter.surfaces.judging import SurfaceVerdict, judge_surfaces
from dosimeter.surfaces.surface import Surface, surfaces
from dosimeter.types import Batch, NamedInputs, Normalization, Outcome, Record, Refused, in_one_row

SHARE_OF_LIMIT = 0.1  # of `max_seconds`, for each ceiling
USABLE_OUTCOMES = (Outcome.COMPLETED, Outcome.PARTIAL)  # attacks may build on labels of these outcomes


@dataclass(frozen=True, kw_only=True)
class Suite(Protocol, Surfaced):
    """Which methods an audit runs: of each surface the named ones, or "all" that its registry holds.

    In a file they stand under the plural key of their surface, such as `attacks`.
    """

    methods: dict[str, Any] = field(default_factory=dict)  # by the plural key of the surface
    attack_labels: Literal["recovered", "given"] = "recovered"
    budget: Budget = "quick"  # of the methods chosen by "all": quick settings, or the published ones
    adaptive: bool = True  # run an attack that can counter the defenses twice: with its counter and without
    ceilings: bool = True  # compute what no attacker can exceed, where a bound is known
    privacy: PrivacySetting | None = None  # whose ε is set beside what is found
    rounds: PositiveInt = 1  # in which this client takes part, for that ε

    def __post_init__(self) -> None:
        super().__post_init__()
        types = self.method_types()
        for key, value in self.methods.items():
            if key not in types:
                raise OptionError(key, f"no such surface; {suggestion(key, types, 'keys are')}")
            check_value(types[key], value, key)

    @classmethod
    def method_types(cls) -> dict[str, Any]:
        return {surface.plural: Literal["all"] | tuple[surface.methods.interface, ...] for surface in surfaces()}

    @classmethod
    def collect_methods(cls, by_key: dict[str, Any]) -> dict[str, Any]:
        return {"methods": by_key}

    def by_surface(self) -> dict[str, Any]:
        return self.methods

    def choice(self, surface: Surface[Any]) -> Literal["all"] | tuple[Recovery, ...]:
        """The methods of a surface that the suite names, or "all"."""
        return self.methods.get(surface.plural, self.default_choice(surface))

    def default_choice(self, surface: Surface[Any]) -> Literal["all"] | tuple[Recovery, ...]:
        """All methods; none of an optional surface where another one is left out."""
        return () if surface.optional and () in self.methods.values() else "all"


@dataclass(frozen=True, kw_only=True)
class AuditConfig(Suite):
    """An audit as a TOML file describes it."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    device: str = "auto"


@dataclass(frozen=True, kw_only=True, repr=False)
class Audit:
    """The records of an audit and the verdicts on them."""

    records: tuple[Record, ...]
    resumed: int = 0  # of these, how many an earlier run had left in the folder
    cuts: tuple[str, ...] = ()  # what a limit on the time cut or left out, one sentence a method

    @property
    def verdicts(self) -> list[SurfaceVerdict]:
        return judge_surfaces(self.records)

    def __repr__(self) -> str:
        said = ", ".join(f"{verdict.surface} {verdict.verdict.value}" for verdict in self.verdicts)
        return f"Audit({len(self.records)} records: {said})"

    def _repr_html_(self) -> str:
        from dosimeter.report.notebook import show_audit

        return show_audit(self.records)

    def to_pandas(self) -> Any:
        """One row a record: its setting, verdict and reason, and the median of every metric. Needs pandas."""
        from dosimeter.report.frames import records_to_pandas

        return records_to_pandas(self.records)

    def save(self, folder: str | Path) -> Path:
        """Write the records that `folder` lacks, and report.html. Returns the report's path."""
        from dosimeter.report import write_report

        check_path(folder)
        folder = Path(folder)
        known = {record.key for record in read_records(folder)} if (folder / FILE_NAME).exists() else set()
        for record in self.records:
            if record.key not in known:
                write_record(folder, record)
        return write_report(folder)


def read(folder: str | Path) -> Audit:
    """The audit whose records a folder holds, as `Audit.save`, `out=` or the command line wrote them."""
    if not isinstance(folder, str | Path):
        raise TypeError(f"folder: expected the path of a folder with records, got {folder!r}")
    return Audit(records=tuple(read_records(Path(folder).parent if Path(folder).name == FILE_NAME else folder)))


def audit(
    model: nn.Module | None = None,
    batch: Batch | None = None,
    *,
    exposure: Exposure | None = None,
    truth: Batch | None = None,
    training: Training | str | None = None,
    loss: Loss | nn.Module | Callable[..., Tensor] | str | None = None,
    defenses: Sequence[Defense | str] = (),
    normalization: Normalization | None = None,
    auxiliary: Batch | None = None,
    foreign: Batch | None = None,
    declare_batch_size: bool = True,
    attack_labels: Literal["recovered", "given"] = "recovered",
    budget: Budget = "quick",
    adaptive: bool = True,
    ceilings: bool = True,
    privacy: PrivacySetting | str | Any = None,
    rounds: int = 1,
    seed: int = 0,
    out: str | Path | None = None,
    max_seconds: float | None = None,
    device: str | None = None,
    progress: Callable[[Progress], None] | Literal["auto"] | None = "auto",
    **methods: str | Recovery | Sequence[str | Recovery],
) -> Audit:
    """Run every method that fits on your own model and private batch, and say what leaked.

    Of a real federation, pass `exposure`, what `dm.receive` made of an update, in place of model and batch; its protocol is then the
    exposure's. Without the `truth`, the records say what is proved and show what else was recovered as unverified, and nothing is scored.

    `labels`, `features`, `maps` and `attacks` choose the methods of each surface: "all" (the default), names or methods.
    `foreign` is another client's batch, for the null "the same attack on a foreign gradient". Without it, auxiliary samples
    take its place, or noise where there are none. With `out`, each record is written as soon as it is made, and a killed audit
    resumes from there.
    With `ceilings`, each record of a surface with a known bound says what no attacker can exceed (`details["ceiling"]`).
    With `privacy`, what `dm.privacy` takes, the records and the report set the ε that was typed beside the ε that holds after `rounds`.
    A simulated client without other defenses then sends its update behind it, where there is a model of it.
    `max_seconds` limits the whole audit: its attacks share the time, and `cuts` of the result says what was cut or left out.
    `device` is where the audit runs: by default a GPU where there is one, else where the model is. The caller's objects stay
    where they are. `progress` is called with every step; "auto" shows a bar in terminals and notebooks and logs lines elsewhere.
    """
    run_options = {
        "methods": resolve_methods(methods),
        "attack_labels": attack_labels,
        "budget": budget,
        "adaptive": adaptive,
        "ceilings": ceilings,
        "privacy": None if privacy is None else privacy_setting(privacy),
        "rounds": rounds,
        "seed": seed,
    }
    if exposure is not None:
        protocol = (training, loss, defenses or None, normalization, auxiliary, None if declare_batch_size else False)
        if model is not None or batch is not None or any(one is not None for one in protocol):
            said = "its model, training, loss, defenses, normalization, auxiliary data and batch size"
            raise ValueError(f"exposure: expected no model, batch or protocol beside it; {said} are those of dm.receive")
        client = received_client(exposure, truth, foreign=foreign)
        return _run(client, Suite(**protocol_of(exposure.public), **run_options), out, progress, max_seconds)
    if truth is not None:
        raise ValueError("truth: expected it beside an exposure alone; the batch is the truth of a simulated client")
    if model is None or batch is None:
        raise TypeError("audit: expected a model and a batch, or an exposure")
    check_model(model)
    if isinstance(batch, Batch) and isinstance(batch.inputs, NamedInputs) and batch.inputs.are_numbers:
        model = join_inputs(copy_of(model), batch.inputs)
        batch, auxiliary, foreign = (in_one_row(one) for one in (batch, auxiliary, foreign))
        assert batch is not None
    with nothing_kept(model, loss):
        trial = copy_of(model)
        own = loss_for(trial, batch, loss)
    model = trial if isinstance(own, OwnLoss) and own.whole is not None else model
    suite = Suite(
        training=TRAININGS.resolve(training or FedSGD()),
        loss=own,
        defenses=tuple(DEFENSES.resolve(defense) for defense in defense_list(defenses)),
        declare_batch_size=declare_batch_size,
        **run_options,
    )
    place = choose_device(device, like=model)
    known = {"auxiliary": to_device(auxiliary, place), "foreign": to_device(foreign, place)}
    client = client_from(model_on(model, place), to_device(batch, place), normalization=normalization, loss=own, **known)
    return _run(client, suite, out, progress, max_seconds)


def _run(client: AuditedClient, suite: Suite, out: str | Path | None, progress: Any, max_seconds: float | None) -> Audit:
    if progress != "auto":
        return run_suite(client, suite, out=out, progress=progress, max_seconds=max_seconds)
    with progress_bar() as show:
        return run_suite(client, suite, out=out, progress=show, max_seconds=max_seconds)


def run_suite(
    client: AuditedClient,
    suite: Suite,
    *,
    out: str | Path | None = None,
    progress: Callable[[Progress], None] | None = None,
    checkpoint_every: float | None = None,
    beside: Sequence[AuditedClient] = (),
    max_seconds: float | None = None,
) -> Audit:
    """Carry out every measurement of the suite that the folder `out` does not hold already.

    Long attacks save a checkpoint there every `checkpoint_every` seconds, and resume from it. The folder may also hold records
    of the clients `beside` this one. Records of any other client are refused. With `max_seconds`, the attacks share the time, and
    what does not fit is cut or left out.
    """
    if suite.attack_labels == "given" and not client.has_truth:
        raise ValueError("attack_labels: 'given' needs the private labels, which are not at hand; choose 'recovered'")
    client = with_guarantee(client, suite.privacy, suite.rounds)
    suite = replace(suite, defenses=defenses_of(suite.privacy, client, suite))
    timetable = Timetable(max_seconds)
    exposing = Exposures()
    exposure = exposing(client, suite, client.batch)  # a client that cannot be audited is refused here, before anything is written
    kind = exposure.public.kind
    wanted = {s.name: suite.choice(s) if s.plural in suite.methods or kind in s.reads else () for s in surfaces()}
    chosen = {surface.name: choose_methods(surface.methods, wanted[surface.name], suite.budget) for surface in surfaces()}
    every = [method for methods in chosen.values() for method in methods]
    if not every:
        raise ValueError(f"nothing to audit: {', '.join(surface.plural for surface in surfaces())} are all empty")
    if all(surface.needs_head for surface in surfaces() if chosen[surface.name]):
        _require_head(client, suite)
    step = seconds_a_step(exposure)
    limits = _ceilings_of(client, suite, step, max_seconds)
    if suite.budget == "quick":
        for surface in surfaces():
            if suite.choice(surface) == "all":
                chosen[surface.name] = _quick(chosen[surface.name], step, exposure, timetable)
        every = [method for methods in chosen.values() for method in methods]
    countering = [method for method in every if suite.adaptive and adapt(method, exposure).changed]
    attempts = {name: sum(1 + (method in countering) for method in methods) for name, methods in chosen.items()}
    attempts["labels"] = sum(_is_granted(recovery, exposure) for recovery in chosen["labels"])  # the verdict on a surface corrects for it
    total = len(every) + len(countering)
    if out is not None:
        check_path(out)
    if progress is not None and not callable(progress):
        raise TypeError(f"progress: expected a function, got {type(progress).__name__}")
    folder = None if out is None else Path(out)
    known: dict[str, Record] = {}
    records: list[Record] = []
    resumed: list[Record] = []

    def carry_out(measurement: Measurement, later: Sequence[Recovery] = ()) -> Record:
        if max_seconds is not None:
            timetable.time_step(measurement.scored, exposure, suite.seed)
        fitted, cut = timetable.fit(measurement.scored, later)
        fit = replace(measurement, method=fitted) if cut and fitted is not None else measurement
        record = known.get(key_of(client, fit))
        if record is not None and record.outcome != Outcome.CRASHED and (fitted is None or not left_out(record.details)):
            resumed.append(record)
        else:
            if fitted is None:
                record = failure_record(client, measurement, Outcome.NOT_ATTEMPTED, cut, left_out=True)
            else:
                left = timetable.seconds_for([measurement.scored, *later])
                try:
                    with listening(_listener(progress, measurement, len(records), total, left, timetable)):
                        record = _run_or_record_crash(client, fit, attempts[fit.surface.name], exposing, suite.budget == "quick")
                    record = replace(record, warnings=[*record.warnings, cut]) if cut else record
                except OutOfTime as stop:
                    timetable.cuts.append(f"{measurement.scored.name} {stop}")
                    record = failure_record(client, measurement, Outcome.NOT_ATTEMPTED, timetable.cuts[-1], left_out=True)
            record = limits.attach(record, measurement) if limits else record
            if folder:
                write_record(folder, record)
        records.append(record)
        return record

    with lock_folder(folder), save_checkpoints(folder / CHECKPOINT_FOLDER if folder else None, checkpoint_every):
        known |= known_records(folder, client, *beside)
        protocol = {name: getattr(suite, name) for name in Protocol.__dataclass_fields__}
        if max_seconds is not None or progress is not None:
            done = {record.method for record in known.values() if record.outcome != Outcome.CRASHED and not left_out(record.details)}
            ahead = [method for method in every if max_seconds is not None or method.name not in done]
            timetable.time_steps(ahead, exposure, suite.seed, lambda name: progress and progress(Progress(name, 0, total, timed=True)))
        others = [method for surface in surfaces() if surface.key != "labels" for method in chosen[surface.name]]
        recovered = [
            (recovery, carry_out(Measurement(**protocol, labels=recovery), [*chosen["labels"][position + 1 :], *others]))
            for position, recovery in enumerate(chosen["labels"])
        ]
        source = "given" if suite.attack_labels == "given" else _label_source(recovered, suite.defenses if suite.adaptive else ())
        measurements = [
            Measurement(**protocol, labels=surface.label_source(method, source), method=method, adaptive=adaptive)
            for surface in surfaces()
            if surface.key != "labels"  # which the others build on
            for method in chosen[surface.name]
            for adaptive in ((True, False) if method in countering else (False,))
        ]
        for position, measurement in enumerate(measurements):
            carry_out(measurement, [other.scored for other in measurements[position + 1 :]])
    return Audit(records=tuple(records), resumed=len(resumed), cuts=tuple(timetable.cuts))


def _quick(methods: Sequence[Recovery], step: float, exposure: Exposure, timetable: Timetable) -> tuple[Recovery, ...]:
    """The methods of a surface as a quick audit runs them. What it leaves out is in the timetable."""
    fitted, left_out = within_quick_budget(methods, step)
    for position, method in enumerate(fitted):
        trained, said = quick_training(method, exposure)
        if trained is method:
            trained, said = quick_simulation(method, step, exposure)
        fitted[position] = method if trained is None else trained
        if position in left_out or trained is None:
            timetable.leave_out(method, left_out.get(position, said))
        elif said:
            timetable.cuts.append(said)
    return tuple(fitted)


def _ceilings_of(client: AuditedClient, suite: Suite, step: float, max_seconds: float | None) -> AuditCeilings | None:
    """The ceilings of the audited client, each of which takes no longer than one attack; None where nobody wants them."""
    if not suite.ceilings:
        return None
    allowed = [SHARE_OF_LIMIT * max_seconds] if max_seconds is not None else []
    allowed += [QUICK_SECONDS] if suite.budget == "quick" else []
    return AuditCeilings(client, suite, seconds=min(allowed, default=None), step=step, rounds=suite.rounds)


def _is_granted(method: LabelRecovery, exposure: Exposure) -> bool:
    try:
        check_needs(method, exposure, None)
    except Refused:
        return False
    return True


def _require_head(client: AuditedClient, suite: Suite) -> None:
    try:
        locate_head(client.model, tuple(client.batch.inputs.shape[1:]), allow_shift=suite.loss.shift_invariant)
    except Refused as refusal:
        raise Refused(f"{refusal}; to audit the inputs alone, set labels and features to []") from None


def _run_or_record_crash(client: AuditedClient, measurement: Measurement, attempts: int, exposing: Expose, spare: bool) -> Record:
    """The record of one method. A crash is recorded, so that the other methods run, and is tried again in the next audit."""
    try:
        return run(client, measurement, attempts=attempts, exposing=exposing, spare=spare)
    except Exception as error:
        return failure_record(client, measurement, Outcome.CRASHED, f"crashed with {type(error).__name__}: {error}")


def known_records(folder: Path | None, *clients: AuditedClient) -> dict[str, Record]:
    """The records that an earlier, perhaps killed, run of the same audit left in the folder."""
    if folder is None or not (folder / FILE_NAME).exists():
        return {}
    known = {record.key: record for record in read_records(folder)}
    descriptions = [describe(client.description) for client in clients]
    for record in known.values():
        if record.config["subject"] not in descriptions:
            raise ValueError(f"{folder}: holds the records of another model or batch; choose another folder or remove it")
    return known


def _label_source(recovered: list[tuple[LabelRecovery, Record]], defenses: tuple[Defense, ...]) -> LabelRecovery | Literal["optimised"]:
    """The label recovery that the attacks build on: one that proves its labels, else the most trusted. The truth plays no part."""
    passive = [(recovery, record) for recovery, record in recovered if not isinstance(recovery, Tampering)]
    usable = [(recovery, record) for recovery, record in passive if record.outcome in USABLE_OUTCOMES]
    proved = [recovery for recovery, record in usable if record.details.get("certified")]
    ranked = sorted((recovery for recovery, _ in usable), key=lambda recovery: distrust(recovery, defenses))
    return (proved + ranked)[0] if usable else "optimised"


def _listener(
    progress: Callable[[Progress], None] | None,
    measurement: Measurement,
    position: int,
    methods: int,
    left: float | None,
    timetable: Timetable,
) -> Listener:
    where = Progress(measurement.scored.name, position, methods, left=left)
    if progress is not None:
        progress(where)

    def listen(done: int, steps: int, note: str) -> None:
        timetable.stop_if_late(done, steps)
        if progress is not None:
            progress(replace(where, done=done, steps=steps, note=note))

    return listen
