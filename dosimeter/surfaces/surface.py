"""Surfaces: what can leak. A surface owns all rules about itself: scores, nulls, verdict, headline metric and words."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Generic, Literal, TypeVar

from torch import Generator

from dosimeter.interfaces import Exposure, InputKind, Public, Recovery
from dosimeter.registry import METRICS, Registry
from dosimeter.surfaces.scores import Comparison, Scores, Values, columns_of, median, number
from dosimeter.surfaces.verdicts import Verdict
from dosimeter.types import Batch, Evidence, Knowledge, LabelEstimate, Record, Refused

Estimate = TypeVar("Estimate")
MISFIT = "misfit"  # in the details of a record without scores: see `Surface.misfit`
SEE_TOKENS = "dm.recover_tokens reads the tokens"


class Surface(ABC, Generic[Estimate]):
    """One kind of private information that an update can leak, and all rules about it.

    A surface is one file in this package and its test. `score`, `judge`, the records, the report, the terminal, the gate and the
    grid of defenses find it by the type of an estimate or by its name in a record.
    """

    name: ClassVar[str] = ""  # set by the registry; stands in every record
    position: ClassVar[int]  # surfaces are listed in ascending order
    estimate: ClassVar[type]  # what its methods return
    methods: ClassVar[Registry[Any]]
    key: ClassVar[str]  # of its method in an experiment's file; names the method's random stream too
    plural: ClassVar[str]  # of its methods in an audit's file and in `dosimeter list`

    headline: ClassVar[str]  # the metric that stands for the surface: in rankings, tables and plots
    visible: ClassVar[str] = ""  # the metric closest to what an eye sees, which orders the evidence; "": the headline
    also_plotted: ClassVar[tuple[str, ...]] = ()  # metrics that are drawn beside the headline
    plot: ClassVar[Literal["shares", "errors", "samples"]]  # on a track of 0 to 100 %, on a logarithmic one, or sample by sample

    reads: ClassVar[tuple[InputKind, ...]] = ("numbers",)  # the clients whose updates its methods read
    per_sample: ClassVar[bool] = True  # False: its headline is one number a batch
    takes_labels: ClassVar[bool] = True  # the methods build on labels, whose source is said
    has_foreign_null: ClassVar[bool] = True  # the same method is run on another client's gradient
    gate_waits: ClassVar[bool] = True  # `--fail-on leaked` gives no answer while none of its methods gave one
    asks_about_candidates: ClassVar[bool] = False  # the server also holds the private samples, among others, and asks which they are
    optional: ClassVar[bool] = False  # left out of an audit that leaves out another surface, unless its methods are named
    needs_head: ClassVar[bool] = False  # no method works on a model without a last linear layer
    grid_methods: ClassVar[Mapping[str, Mapping[str, Any]]] = {}  # name -> options: the strong methods that a grid of defenses tries
    headless_methods: ClassVar[tuple[str, ...]] = ()  # added to the grid where a defense hides the head

    description: ClassVar[str]  # what it is, for a newcomer
    if_leaked: ClassVar[str]  # what each verdict means for the client
    if_not_shown: ClassVar[str]
    if_unverified: ClassVar[str] = (
        "A method gave an answer, and the private samples that would tell whether it is right are not at hand. "
        "It is neither a leak that was shown nor a sign of safety."
    )
    if_not_attempted: ClassVar[str] = (
        "None of the methods that were asked for runs in this setting, so nothing was tried. "
        "That says nothing about safety: a method that is not here may well succeed."
    )
    if_impossible: ClassVar[str] = (
        "A proof shows that no method can tell this batch from random ones. Another setting may open this surface again."
    )
    headline_covers: ClassVar[str] = ""  # what of the surface the headline measures, where that is not all of it
    without_ceiling: ClassVar[str] = ""  # why no bound on it is known, where none is
    null_words: ClassVar[Mapping[str, tuple[str, str]]]  # null -> its name on the page, and what it means
    share_words: ClassVar[str]  # what the share of a grid cell is, after "of <surface>"
    beaten_words: ClassVar[str] = "beats every null"  # what marks a sample in plots and pictures
    counting_words: ClassVar[str] = ""  # when one sample counts as leaked, as a sentence

    def check_reads(self, method: Recovery, public: Public) -> None:
        """Refuse a client whose inputs or outputs are of a kind that no method of this surface reads."""
        if public.kind in self.reads:
            return
        if public.kind == "grids":
            raise Refused(f"{method.name} reads one output a sample, and this model has one at each place of a grid")
        if public.kind in ("numbers", "regressions"):
            raise Refused(f"{method.name} reads token ids, and this model takes numbers")
        if "texts" in self.reads:
            raise Refused(f"{method.name} reads one output a sample, and this model has one at each position of a text; {SEE_TOKENS}")
        raise Refused(f"{method.name} looks for {self.name} that are numbers, and this model takes token ids; {SEE_TOKENS}")

    def recover(self, method: Any, exposure: Exposure, labels: LabelEstimate | None, rng: Generator) -> Estimate:
        """What a method of this surface recovers."""
        return method(exposure, labels, rng) if self.takes_labels else method(exposure, rng)

    def label_source(self, method: Recovery, source: Any) -> Any:
        """Where a method gets its labels in an audit: from `source`, or from itself ("optimised")."""
        return source if Knowledge.LABELS in method.needs else "optimised"

    def objective_at_truth(self, method: Any, exposure: Exposure, found: Estimate, truth: Batch) -> float | None:
        """The method's own objective at the private batch, which tells under-optimisation from impossibility; None without one."""
        return None

    @abstractmethod
    def score(self, found: Estimate, comparison: Comparison) -> Scores:
        """The scores of an estimate and of its nulls against the truth."""

    @abstractmethod
    def judge(self, found: Estimate, scores: Scores, attempts: int) -> tuple[Verdict, str]:
        """The verdict and its reason; `attempts` is how many methods are tried on the same batch."""

    @abstractmethod
    def beats_nulls(self, value: float | None, rivals: Values) -> bool:
        """Whether one sample's headline shows a leak, given the headline of each of its nulls."""

    def headline_in(self, metrics: Mapping[str, Any]) -> str:
        """The metric that stands for the surface among those that were computed."""
        return self.headline

    def evidence_metric(self, metrics: Mapping[str, Any]) -> str:
        """The metric that stands beside each piece of evidence."""
        return self.headline_in(metrics)

    def rule_of(self, metric: str) -> Callable[[float | None, Values], bool]:
        """`beats_nulls` for values of this metric."""
        return self.beats_nulls

    def may_leak(self, found: Estimate, scores: Scores) -> bool:
        """Whether the estimate beats the nulls that were scored, so that the null of a foreign gradient can change the verdict."""
        return True

    def meaning(self, verdict: Verdict) -> str:
        """What a verdict on the surface means for the client."""
        return {
            Verdict.LEAKED: self.if_leaked,
            Verdict.PROVED: self.if_leaked,
            Verdict.UNVERIFIED: self.if_unverified,
            Verdict.NOT_SHOWN: self.if_not_shown,
            Verdict.NOT_ATTEMPTED: self.if_not_attempted,
            Verdict.IMPOSSIBLE: self.if_impossible,
            Verdict.NOT_MEASURED: "Every method on this surface was stopped by an error, so nothing is known about it.",
        }[verdict]

    def check_scorable(self, truth: Batch) -> None:
        """Refuse a private batch that the scores of this surface would misread."""

    def proves(self, found: Any) -> bool:
        """Whether the method claims to have proved any of it."""
        return bool(found.premises)

    def proof(self, found: Any) -> str:
        """What the method proves, as a sentence; "" where it proves nothing."""
        return "proved from the update alone" if self.proves(found) else ""

    def proved_samples(self, found: Any, scores: Scores) -> list[bool]:
        """Which values of the headline are proved from the update alone, in the truth's order; nothing where none is."""
        return []

    def without_proof(self, found: Any, message: str) -> Any:
        """The estimate without its proofs and premises."""
        return replace(found, premises=(), message=message)

    def count_guesses(self, found: Estimate) -> int:
        """How many samples an estimate holds; 0 where it is one answer for the whole batch."""
        return 0

    def merge(self, estimates: Sequence[Estimate], count: int) -> Estimate:
        """One estimate of at most `count` guesses, from several of the same method. For the foreign null."""
        return estimates[0]

    def details(self, found: Estimate, exposure: Exposure, truth: Batch) -> dict[str, Any]:
        """What the record says about the estimate beside its scores, as plain JSON."""
        return {}

    def misfit(self, found: Estimate, exposure: Exposure) -> float | None:
        """How far an update of what was found is from the one that was sent, relative to the latter; None where nothing tells.

        It ranks answers that nobody can score.
        """
        return None

    def shortfalls(self, details: Mapping[str, Any]) -> list[str]:
        """Warnings that the method may have fallen short of what it can show."""
        return []

    def evidence(self, found: Estimate, comparison: Comparison | None = None, scores: Scores | None = None) -> list[Evidence]:
        """What a reader can see of the estimate, beside the private thing and its nulls; nothing where there is nothing to see.

        Without a comparison and scores the truth is not known, and the evidence is what was recovered alone.
        """
        return []

    def facts(self, details: Mapping[str, Any]) -> list[str]:
        """What the report says about a method beside its numbers, from a record's details."""
        return []

    def advice(self, details: Sequence[Mapping[str, Any]]) -> list[str]:
        """What a client can do where this surface leaks, in sentences, from the figures of the details of all its records."""
        return []

    def curves(self, details: Mapping[str, Any]) -> Mapping[str, Any]:
        """Points (x, y) in [0, 1] of the curves that the page draws of a method, by name."""
        return {}

    def share(self, record: Record) -> float:
        """The share of a record's samples that beat their nulls."""
        metric = self.headline_in(record.metrics)
        values = record.metrics[metric]
        columns = columns_of(record.nulls, metric)
        rivals = list(zip(*columns)) or [()] * len(values)
        return sum(map(self.rule_of(metric), values, rivals)) / len(values)

    def leaked_share(self, methods: Sequence[Sequence[Record]]) -> float:
        """How much leaks in a grid cell: the mean over batches of the method that shows most; 0 where no leak is shown."""
        return max(sum(self.share(r) for r in batches if r.verdict == Verdict.LEAKED) / len(batches) for batches in methods)

    def doubt(self, methods: Sequence[Sequence[Record]]) -> str:
        """A sentence where a grid cell looks leaked but its batches do not suffice to tell; else an empty text."""
        return ""

    def advantage(self, record: Record) -> float:
        """The median headline of a record, with the sign such that more is worse for the client.

        Without scores the answer that explains the update best says most; −∞ where nothing tells.
        """
        if not record.metrics:
            return -number(record.details.get(MISFIT), math.inf)
        metric = self.headline_in(record.metrics)
        sign = 1 if METRICS.build(metric).higher_is_better else -1
        values = [number(value, -sign * math.inf) for value in record.metrics.get(metric, [])]
        return sign * median(values) if values else -math.inf


SURFACES: Registry[Surface[Any]] = Registry("surface", "dosimeter.surfaces", Surface)


def surfaces() -> list[Surface[Any]]:
    """Every surface, in order."""
    return sorted((surface_named(name) for name in SURFACES), key=lambda surface: surface.position)


def surface_names() -> tuple[str, ...]:
    return tuple(surface.name for surface in surfaces())


def surface_named(name: str) -> Surface[Any]:
    return SURFACES.entry(name, "surface")()


def surface_of_method(method: Recovery) -> Surface[Any]:
    """The surface that a method recovers."""
    for surface in surfaces():
        if surface.methods.interface is not None and isinstance(method, surface.methods.interface):
            return surface
    raise TypeError(f"method: expected a method of {', '.join(surface_names())}, got {type(method).__name__}")


def surface_of(found: object) -> Surface[Any]:
    """The surface whose methods return this type of estimate."""
    for surface in surfaces():
        if isinstance(found, surface.estimate):
            return surface
    known = ", ".join(surface.estimate.__name__ for surface in surfaces())
    raise TypeError(f"found: expected an estimate out of {known}, got {type(found).__name__}")
