"""The values that flow from a private batch to a report: frozen dataclasses without behaviour."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

ID_TYPES = (torch.int64, torch.int32)  # of token ids; bytes of a picture are no ids
FEW_ENTRIES = 16  # of a tensor that is printed whole
Update = dict[str, Tensor]  # by parameter name; a layer that the client withholds is absent


def short_repr(value: Any) -> str:
    """A dataclass in a line or a few: a long tensor by its shape, what has its default left out."""
    shown = []
    for one in fields(value):
        content = getattr(value, one.name)
        if isinstance(content, Tensor):
            shown.append(f"{one.name}={content.tolist() if content.numel() <= FEW_ENTRIES else f'tensor{tuple(content.shape)}'}")
        elif isinstance(content, (int, float, str, bool)) and content != one.default:
            shown.append(f"{one.name}={str(content) if isinstance(content, StrEnum) else repr(content)}")
    return f"{type(value).__name__}({', '.join(shown)})"


class Refused(ValueError):
    """A method that does not run here: the message says why and what would make it run. It proves nothing about other methods.

    `details` is what a record keeps of what was seen on the way.
    """

    def __init__(self, reason: str = "", *, details: Mapping[str, Any] | None = None) -> None:
        super().__init__(reason)
        self.details: Mapping[str, Any] = details or {}


class Impossible(Refused):
    """A proof that no method can work here. `theorem` is the sentence that proves it."""

    def __init__(self, reason: str, *, theorem: str) -> None:
        super().__init__(f"{reason}: {theorem}")
        self.reason, self.theorem = reason, theorem


class Outcome(StrEnum):
    """How an attempt ended. A failed attack is a finding, never a traceback."""

    COMPLETED = "completed"  # ran to its end; the scores say how well
    PARTIAL = "partial"  # part of the answer was found, the rest is marked as a guess
    AMBIGUOUS = "ambiguous"  # several answers explain the update equally well
    DIVERGED = "diverged"  # the optimisation left the finite numbers
    SINGULAR = "singular"  # the equations do not determine the answer
    CRASHED = "crashed"  # a defect in the method or in the model's own code; the next audit tries again
    NOT_ATTEMPTED = "not attempted"  # the method does not run here; another one may well succeed
    IMPOSSIBLE = "impossible"  # a theorem, which the estimate names, forbids it to every method


class Knowledge(StrEnum):
    """What a method may need of the threat model; checked before it runs."""

    HEAD_GRADIENT = "head gradient"
    BIAS_GRADIENT = "head bias gradient"
    BATCH_SIZE = "batch size"
    LABELS = "labels"
    AUXILIARY = "auxiliary data"
    CANDIDATES = "candidates"
    SINGLE_SAMPLE = "a batch of one"
    SOFTMAX_LOSS = "softmax cross-entropy"
    TAMPERED_MODEL = "tampered model"


class NamedInputs:
    """Several tensors (B, ...) that a model takes by name, as a tokenizer gives them. They are cut, moved and copied together.

    `main` is the tensor that the samples are read from: the token ids (B, T), or the first tensor.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = dict(tensors)

    @property
    def main(self) -> Tensor:
        rows = (one for name, one in self.tensors.items() if one.ndim == 2 and one.dtype in ID_TYPES and "mask" not in name)
        return self.tensors.get("input_ids", next(rows, next(iter(self.tensors.values()))))

    @property
    def shape(self) -> torch.Size:
        return self.main.shape

    @property
    def device(self) -> torch.device:
        return self.main.device

    def each(self, change: Callable[[Tensor], Tensor]) -> NamedInputs:
        return NamedInputs({name: change(tensor) for name, tensor in self.tensors.items()})

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def by_place(self) -> bool:
        """Whether the model takes the tensors in their order, not by name."""
        return all(name.isdecimal() for name in self.tensors)

    @property
    def are_numbers(self) -> bool:
        return all(tensor.is_floating_point() for tensor in self.tensors.values())

    def joined(self) -> Tensor:
        """All numbers of a sample in one row: (B, D)."""
        return torch.cat([tensor.flatten(1) for tensor in self.tensors.values()], 1)

    def __len__(self) -> int:
        return len(self.main)

    def __iter__(self) -> Iterator[NamedInputs]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, chosen: Any) -> NamedInputs:
        return self.each(lambda tensor: tensor[chosen])

    def clone(self) -> NamedInputs:
        return self.each(Tensor.clone)

    def double(self) -> Tensor:
        return self.main.double()

    def detach(self) -> NamedInputs:
        return self.each(Tensor.detach)


@dataclass(frozen=True, repr=False)
class Batch:
    """Private (or auxiliary) samples as the model takes them.

    From any torch Dataset: `dm.Batch(*next(iter(DataLoader(dataset, batch_size=8))))`. A mapping of tensors by name, such as a
    tokenizer's, is held as `NamedInputs`, and so is a tuple of tensors that the model takes in this order.
    """

    inputs: Any  # Tensor (B, *shape), or NamedInputs
    targets: Tensor  # (B,) class ids, (B, C) soft labels, or (B, T) token ids of which -100 is ignored

    def __post_init__(self) -> None:
        if isinstance(self.inputs, Mapping):
            object.__setattr__(self, "inputs", NamedInputs(self.inputs))
        if isinstance(self.inputs, tuple):
            object.__setattr__(self, "inputs", NamedInputs({str(place): tensor for place, tensor in enumerate(self.inputs)}))

    def __repr__(self) -> str:
        return short_repr(self)


def in_one_row(batch: Batch | None) -> Batch | None:
    """The batch with all numbers of a sample in one row, where it has several tensors of numbers; else as it is."""
    if batch is None or not isinstance(batch.inputs, NamedInputs) or not batch.inputs.are_numbers:
        return batch
    return Batch(batch.inputs.joined(), batch.targets)


@dataclass(frozen=True, kw_only=True)
class Normalization:
    """How pixels in [0, 1] became the model's inputs: (pixel - mean) / std, per channel."""

    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)


@dataclass(frozen=True, kw_only=True)
class Distortion:
    """What is known of the entries of one layer: live entries were sent with noise, the others lie between `low` and `high`."""

    noise: float  # standard deviation of the noise in a live entry
    live: Tensor  # bool, of the layer's shape
    low: Tensor  # of the layer's shape; lower bound of an entry that is not live, −∞ where nothing is known
    high: Tensor  # upper bound, likewise


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """How compactly a layer can be encoded after the defenses."""

    bits: int | None = None  # of one value; None: the width of its dtype
    rank: int | None = None  # of the layer's two factors; None: it is not factored
    sparse: bool = False  # a defense set entries to zero, and zeros are left out


Accountant = Literal["rdp", "gdp", "prv"]
ProtectedUnit = Literal["sample", "client", "label"]


@dataclass(frozen=True, kw_only=True)
class Accounting:
    """The rounds and the accountant that a privacy guarantee is computed for."""

    sample_rate: float = 1.0  # of a client's data in each round
    steps: int = 1  # rounds
    delta: float = 1e-5
    accountant: Accountant = "rdp"


@dataclass(frozen=True, kw_only=True)
class Guarantee:
    """(ε, δ)-differential privacy, and for whom."""

    epsilon: float
    delta: float
    unit: ProtectedUnit  # what may be exchanged between neighbouring data sets
    source: str  # the defenses that give it, and the accountant


@dataclass(frozen=True, kw_only=True)
class PrivacyReading:
    """What a privacy setting states, and what holds, for one kind of neighbour against one kind of reader."""

    unit: ProtectedUnit
    change: Literal["replaced", "left out"]  # how neighbouring data sets differ in one unit
    against: str  # who reads, such as "the server"
    stated: float | None  # the ε that was typed, or that the framework counts; None where it states none
    proved: float  # the ε that holds in all rounds together; infinite where nothing is proved
    delta: float
    found: float  # the most members that any test finds at 1 % false alarms
    reason: str  # the theorem with its figures, or why nothing is proved
    shown: float | None = None  # an ε that a trial of the mechanism exceeds, with 95 % confidence; None: no trial


@dataclass(frozen=True, kw_only=True, repr=False)
class Estimate:
    """What a method of any surface found."""

    outcome: Outcome = Outcome.COMPLETED
    theorem: str = ""  # why no method can do it, where the outcome is impossible
    message: str = ""
    premises: tuple[str, ...] = ()  # what its proofs take for granted and the update cannot refute; one short sentence each

    show: ClassVar[Callable[[Any], str] | None] = None  # what a notebook shows of it; set by dosimeter.runs.server

    def _repr_html_(self) -> str | None:
        return None if Estimate.show is None else Estimate.show(self)

    def __repr__(self) -> str:
        return short_repr(self)


@dataclass(frozen=True, kw_only=True, repr=False)
class LabelEstimate(Estimate):
    """What a label recovery found."""

    counts: Tensor  # (C,) int64, samples per class
    labels: Tensor  # (B,) int64, each class repeated as often as counted, in ascending order
    soft: Tensor | None = None  # (B, C)
    scores: Tensor | None = None  # (C,) the larger, the likelier the class is present
    certified: bool = False  # proved from the gradient alone, under `premises`
    confidence: float | None = None  # in [0, 1], where the method has one
    details: Mapping[str, Tensor] = field(default_factory=dict)  # what the method computed on the way, by name


@dataclass(frozen=True, kw_only=True, repr=False)
class FeatureEstimate(Estimate):
    """Recovered inputs of the last linear layer."""

    features: Tensor  # (n, H)
    labels: Tensor  # (n,) int64
    residual: Tensor  # (n,) relative part of the gradient that each sample leaves unexplained
    certified: Tensor  # (n,) bool
    error_bar: Tensor | None = None  # (n,) bound on the relative feature error
    soft: Tensor | None = None  # (n, C)
    batch_size: int | None = None  # as recovered from the gradient
    complete: bool = False  # the samples explain the whole gradient


@dataclass(frozen=True, kw_only=True)
class MapLayer:
    """What was tried on one layer, and why its maps were not read where they were not."""

    name: str
    positions: int  # of one sample's map
    most_samples: int  # the largest batch that the layer's channels can hold
    certified: int  # samples
    reason: str  # "" where the maps were read
    channels: int = 0  # on the layer's narrower side: as many positions can its gradient tell apart
    seen: int = 0  # positions of the whole batch that its spectrum shows; 0 where it shows no whole number of samples
    gap: float = 0.0  # between the last singular value of the signal and the first of the noise
    hiding_noise: float = 0.0  # standard deviation of noise on each entry of the gradient that drowns the last singular value; 0 unknown
    hiding_share: float = 0.0  # the same, over the root mean square of an entry


@dataclass(frozen=True, kw_only=True)
class JoinedSamples:
    """What else follows of each sample from its maps, in the order of the maps."""

    maps: Mapping[str, Tensor]  # by layer, (B, C, H, W)
    features: Tensor  # (B, H) what the head receives
    labels: Tensor | None  # (B,), None where the slopes at the logits are not those of cross-entropy with single labels
    misfits: Mapping[str, float]  # by layer: how far its gradient is from what these inputs explain, relative


@dataclass(frozen=True, kw_only=True, repr=False)
class MapEstimate(Estimate):
    """Recovered inputs of one convolution, the samples in no particular order."""

    maps: Tensor  # (B, C, H, W)
    layer: str
    layers: tuple[MapLayer, ...]  # all that were tried, in the order in which the model runs them
    batch_size: int  # as recovered from the gradient, at least: samples that differ from one another and leave a trace
    certified: Tensor  # (B,) bool
    error_bars: Tensor  # (B,) bound on the relative error of each map
    samples: JoinedSamples | None = None  # None where no forward pass leads from the maps to the head


@dataclass(frozen=True, kw_only=True)
class TokenEstimate(Estimate):
    """Recovered tokens, by their ids in the vocabulary."""

    tokens: frozenset[int]  # that occur in the batch
    certified: frozenset[int] = frozenset()  # of these, proved from the gradient alone, under `premises`
    complete: bool = False  # proved: no other token of the vocabulary leaves a trace in the update
    error_bars: Mapping[int, float] = field(default_factory=dict)  # of a token: bound on the chance that the update shows it by accident
    sequences: tuple[tuple[int, ...], ...] = ()  # in no particular order
    certified_sequences: tuple[bool, ...] = ()  # one for each sequence
    details: Mapping[str, Any] = field(default_factory=dict)  # what the method computed on the way: plain JSON


@dataclass(frozen=True, kw_only=True, repr=False)
class TargetEstimate(Estimate):
    """Recovered targets of a regression, in no particular order."""

    targets: Tensor  # (n, *output), in their own units
    certified: Tensor  # (n,) bool
    error_bars: Tensor  # (n,) bound on the distance from the true target


@dataclass(frozen=True, kw_only=True, repr=False)
class Reconstruction(Estimate):
    """Recovered inputs, in the model's own scale."""

    inputs: Tensor  # (n, *shape)
    labels: Tensor  # (n,) class ids or (n, C) soft labels that the attack settled on
    objective: float  # the attack's own objective at `inputs`, prior included
    normalization: Normalization = field(default_factory=Normalization)
    restarts: tuple[float, ...] = ()  # the objective that each restart reached
    distance: float | None = None  # the matching distance alone, where the attack has one
    recipe: object = None  # what the attack minimised, where it minimises anything: `Attack.objective` evaluates it elsewhere
    nulls: Mapping[str, Tensor] = field(default_factory=dict)  # (n, *shape) what the attack draws without the gradient, by name


Exhibit = str | dict[str, str] | None  # a base64 PNG or a text; a table of names and values; None where there is nothing


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What was recovered, beside the private thing where the truth is known: a picture, a table or a text, for a reader to compare.

    `image` and `tiles` are base64 PNGs, of one sample and of many small maps. A `table` holds values by name. Everything is small.
    """

    kind: Literal["image", "tiles", "table", "text"]
    recovered: Exhibit
    private: Exhibit = None
    nulls: dict[str, Exhibit] = field(default_factory=dict)  # what can be had without the update, by the name of the null
    caption: str = ""  # what is shown, where "sample 3" does not say it
    sample: int | None = None  # in the truth's order, from 0; None: the evidence is of the whole batch
    score: float | None = None  # in the surface's `evidence_metric`


@dataclass(frozen=True, kw_only=True)
class Ceiling:
    """What no attacker can exceed, sample by sample, or an estimate of it."""

    bound: str  # the method that computed it
    surface: str  # what it limits
    metric: str  # in whose units
    values: Tensor  # (B,) float64, all the same where the metric is of the batch; a larger value allows a larger leak
    proved: bool  # True: holds for every attacker under `assumptions`; False: an estimate
    assumptions: tuple[str, ...]  # one short sentence each
    details: Mapping[str, Any] = field(default_factory=dict)  # plain numbers and lists of them, by name


@dataclass(frozen=True, kw_only=True, repr=False)
class Record:
    """One experiment, whole, as it stands in the records file; every field is plain JSON."""

    key: str  # hash of `config`
    config: dict[str, Any]
    surface: str  # labels, features or inputs; or utility, a defense's cost, which has no verdict
    method: str
    seed: int
    threat_model: dict[str, Any]
    metrics: dict[str, list[float | None]]  # per sample (labels: one value a batch)
    nulls: dict[str, dict[str, list[float | None]]]  # null name -> metric name -> per sample
    outcome: str
    verdict: str
    reason: str
    warnings: list[str]
    seconds: float
    versions: dict[str, str]  # of the packages; and "threads", since the last bits depend on their number
    details: dict[str, Any] = field(default_factory=dict)
    evidence: list[dict[str, Any]] = field(default_factory=list)  # what a reader can see of the leak: `Evidence` as plain JSON

    def __repr__(self) -> str:
        return f"Record({self.surface}, {self.method}: {self.verdict or self.outcome}; {self.reason})"
