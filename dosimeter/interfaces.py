"""The interfaces, with one abstract method each: training, loss, defense, recovery, attack, metric; and the values that hold them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Generator, Tensor, nn

from dosimeter.options import check_fields
from dosimeter.types import (
    Accounting,
    Batch,
    Ceiling,
    Distortion,
    Encoding,
    Estimate,
    FeatureEstimate,
    Guarantee,
    Knowledge,
    LabelEstimate,
    MapEstimate,
    Normalization,
    Outcome,
    PrivacyReading,
    ProtectedUnit,
    Reconstruction,
    Refused,
    TargetEstimate,
    TokenEstimate,
    Update,
)

# Numbers with one class or several labels a sample, with numbers as targets, or with an output at each place of a grid; token ids with one
# output a text, or at each position.
InputKind = Literal["numbers", "regressions", "grids", "texts", "positions"]
TargetKind = Literal["classes", "labels", "numbers"]  # one class a sample or place; any number of labels; numbers
SIDES = ("data", "model", "training", "update")  # what a defense changes, in the order in which they act


@dataclass(frozen=True, kw_only=True)
class Method(ABC):
    """A frozen keyword-only dataclass whose fields are the method's options, checked when it is built."""

    name: ClassVar[str] = ""  # set by the registry
    needs: ClassVar[frozenset[Knowledge]] = frozenset()
    partial_labels: ClassVar[bool] = False  # takes labels of which some are unknown
    reads_any_update: ClassVar[bool] = False  # True: reads updates that are no sum of gradients too, such as Adam's
    reads_closings: ClassVar[bool] = False  # True: takes a sigmoid or the like behind the head into account, which else is refused
    quick: ClassVar[dict[str, Any]] = {}  # options for an audit of a minute, where the defaults take longer

    def __post_init__(self) -> None:
        check_fields(self)

    @classmethod
    def definition_error(cls) -> str:
        """What a class of this kind leaves unsaid or says wrongly, so that it cannot be registered; "" where nothing is missing."""
        return ""

    def counter(self, defense: Defense) -> str:
        """A sentence for the record: how this method itself counters a defense."""
        return f"{self.name} has no counter of its own here"


@dataclass(frozen=True, kw_only=True)
class Loss(Method):
    """A training loss. The client trains with it and the attacks replay the same object, so that no factor can differ."""

    shift_invariant: ClassVar[bool] = False  # adding a constant to a sample's logits changes nothing (softmax losses)
    takes_closings: ClassVar[bool] = False  # what follows the last layer, such as a sigmoid, counts as a part of the loss

    @abstractmethod
    def per_sample(self, logits: Tensor, targets: Tensor) -> Tensor:
        """(B, C) logits and (B,) or (B, C) targets -> (B,) losses."""

    @abstractmethod
    def logit_gradient(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The gradient of each sample's loss at its logits, in closed form: (B, C)."""

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        return self.per_sample(logits[:, None] if logits.ndim == 1 else logits, targets).mean()

    def said(self) -> str:
        """The loss as a sentence names it."""
        return self.name

    def steepest(self, classes: int) -> float:
        """The largest L1 norm of a sample's gradient at its logits; infinite where nothing bounds it."""
        return float("inf")

    def target_kind(self) -> TargetKind:
        """What the targets are, which attacks that guess them have to know."""
        return "classes"

    def target_shape(self, output: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of one sample's target, where targets are guessed beside outputs of this shape."""
        return output


@dataclass(frozen=True, kw_only=True)
class Training(Method):
    """What a client computes from its batch. The client runs it on the private batch, attacks replay it on guesses."""

    @abstractmethod
    def __call__(self, model: nn.Module, inputs: Tensor, targets: Tensor, loss: Loss, create_graph: bool = False) -> Update:
        """The update, in units of a gradient. With `create_graph` it is differentiable in inputs and targets. Nothing is mutated."""

    def local_steps(self, batch_size: int | None) -> int:
        """How often the client steps in one round. Refused where that depends on a batch size that nobody declares."""
        return 1

    def local_batches(self, batch_size: int | None) -> int | None:
        """How many mini-batches pass through the model in one round; None where what is declared does not tell."""
        return self.local_steps(batch_size)

    def largest_entry(self, batch_size: int | None) -> float:
        """How large an entry of the update can be, in units of a gradient, whatever the gradients are; ∞ where nothing bounds it."""
        return math.inf

    def largest_norm(self, batch_size: int | None) -> float:
        """The same of the norm of the whole update."""
        return math.inf

    def unit(self, batch_size: int | None) -> float:
        """What the change of the weights, before − after, is divided by to have the units of a gradient."""
        raise Refused(f"{self.name} has no learning rate that would turn a change of weights into a gradient")

    def gain(self, batch_size: int | None) -> float | None:
        """What the weights of the steps' gradients in the update add up to, as momentum raises it; None where it is no sum of gradients."""
        return None

    def decay(self, batch_size: int | None) -> float:
        """What weight decay alone multiplies the weights by in one round. Updates are differences to the weights times this."""
        return 1.0

    def preconditioning(self) -> str:
        """Why the update is no weighted sum of gradients, as behind Adam, so that only methods made for it can read it; "" where it is."""
        return ""

    def sample_term(self, gradient: Update) -> Update | None:
        """What a sample with this gradient of its own adds, where the update is a mean of such terms; None where it is not."""
        return None


@dataclass(frozen=True, kw_only=True)
class Client:
    """What a client holds before it trains. Defenses transform it; `observe` then runs its training and sends the update."""

    model: nn.Module
    batch: Batch
    training: Training
    loss: Loss
    outgoing: tuple[Callable[[Update], Update], ...] = ()  # applied to the update in this order


@dataclass(frozen=True, kw_only=True)
class Sampler(Method):
    """Draws a client's batch out of a data set by a distribution of labels."""

    @abstractmethod
    def __call__(self, labels: Tensor, batch_size: int, classes: int, rng: Generator) -> Tensor:
        """(N,) labels -> (batch_size,) distinct indices. A batch that the data cannot fill is refused."""


@dataclass(frozen=True, kw_only=True)
class Replay:
    """How an attack that matches updates counters one defense that it knows."""

    note: str  # for the record
    transform: Callable[[Update], Update] | None = None  # applied to the update of every guess; differentiable
    options: Mapping[str, Any] = field(default_factory=dict)  # changed options of the attack
    deviation: Mapping[str, float] = field(default_factory=dict)  # standard deviation of the error in each layer's entries


@dataclass(frozen=True, kw_only=True)
class Defense(Method):
    """A transformer of the client: of its data, its model, its training or what it sends.

    Everything that the rest of the code knows about a defense stands on its class. `__call__` and `distorts` must be defined.
    The other methods have defaults that claim nothing: no model of the distortion, no known scale, no counter, no guarantee.
    A defense of the data must also say whether it `replaces` the samples.
    """

    side: ClassVar[Literal["data", "model", "training", "update"]]  # what it changes; the sides act in this order
    promise: ClassVar[str] = "nothing"  # what the defense guarantees on paper
    breaks: ClassVar[str] = ""  # what it costs, or makes impossible
    replaces: ClassVar[bool] = False  # True: the client trains on other inputs, labels or features than its own
    changes_pixels: ClassVar[bool] = False  # True: computes with the inputs as numbers, so that token ids are refused
    pairs_labels: ClassVar[bool] = False  # True: each sample has two labels, in shares that the server does not know
    hides_head: ClassVar[bool] = False  # True: the head's gradient may be absent, or something else stands in its place
    noise_shape: ClassVar[Literal["normal", "laplace"]] = "normal"  # of the noise that it adds, where it adds any
    continuous: ClassVar[bool] = False  # True: what is sent is a continuous function of the update before, which autograd differentiates
    once: ClassVar[bool] = False  # True: acts once, before the first round; defenses of the model always do
    voids: ClassVar[frozenset[ProtectedUnit] | None] = None  # units whose guarantees do not hold beside this defense; see `voided_units`
    strengths: ClassVar[tuple[dict[str, Any], ...]] = ()  # options of a mild and a strong setting, for grids

    @abstractmethod
    def __call__(self, client: Client, rng: Generator) -> Client: ...

    @abstractmethod
    def distorts(self) -> bool:
        """Whether entries of the update differ from what training gave, apart from a common factor and absent layers."""

    def distortion(self, change: Tensor, public: Public) -> Distortion | None:
        """What is known of the true entries of a layer that was sent as `change`, where this defense distorts.

        A distortion claims that the errors of the entries are independent of one another. None means that there is no model:
        estimates ignore the defense, and nothing behind it is certified.
        """
        return None

    def is_modelled(self) -> bool:
        """Whether this defense defines `distortion`. Of a single layer it may still say nothing."""
        return type(self).distortion is not Defense.distortion

    @classmethod
    def definition_error(cls) -> str:
        if getattr(cls, "side", None) not in SIDES:
            return f"`side`: expected one of {', '.join(SIDES)}, got {getattr(cls, 'side', None)!r}"
        if cls.side == "data" and not any("replaces" in vars(parent) for parent in cls.__mro__ if parent is not Defense):
            return "it changes the data and does not say `replaces`: whether the client trains on other samples or labels than its own"
        for statement in ("distorts", "distortion", "scaling", "replay", "guarantee", "encoding"):
            if not callable(getattr(cls, statement)):
                return f"`{statement}`: expected a method, got {getattr(cls, statement)!r}"
        return ""

    def voided_units(self) -> frozenset[ProtectedUnit]:
        """The units whose guarantees do not hold beside this defense. Changed data may spread one sample over several, unless denied."""
        if self.voids is not None:
            return self.voids
        return frozenset({"sample"}) if self.side == "data" else frozenset()

    def scaling(self) -> Literal["none", "update", "layers", "unknown"]:
        """What an unknown factor multiplies: nothing, the whole update, each layer by its own factor, or unknown."""
        return "unknown"

    def unscaled(self, sent: Update) -> frozenset[str]:
        """The layers that this defense provably did not scale, if the update was sent as it left this defense."""
        return frozenset(sent) if self.scaling() == "none" else frozenset()

    def empties(self) -> bool:
        """Whether small entries are set to zero, including those of the head's bias."""
        return False

    def adds_noise(self) -> bool:
        """Whether every entry gets noise, which also fills the zeros of earlier defenses."""
        return False

    def replay(self, sent: Update, attack: Attack, later: Sequence[Defense]) -> Replay:
        """How an attack that knows this defense counters it. `sent` is the update, `later` are the defenses after this one."""
        if self.side == "model":
            return Replay(note="the server sent the model and replays it, adapted or not")
        return Replay(note="no counter is known here")

    def noise_floor(self, change: Tensor, batch_size: int) -> float:
        """The noise in each entry of a layer that is sent as `change`: 1/√(its Fisher information about the entry); 0 for none.

        Of Gaussian noise, the standard deviation. Bounds on every attacker are computed from it.
        """
        return 0.0

    def noise_multiplier_of(self, previous: Defense | None) -> tuple[ProtectedUnit, float] | None:
        """Gaussian noise over the most that one sample, or the whole batch, can move what is sent; None where neither is limited."""
        return None

    def in_round(self, number: int) -> Defense:
        """What this defense is so many rounds later in the same federation."""
        return self

    def training_behind(self, training: Training) -> Training:
        """What the client's training becomes behind this defense, as the server replays it."""
        return training

    def norm_bound(self) -> float:
        """The largest L2 norm that the update can have after this defense."""
        return float("inf")

    def guarantee(self, accounting: Accounting, previous: Defense | None) -> Guarantee | None:
        """The privacy guarantee of this defense. `previous` is the defense of the update directly before it."""
        return None

    def encoding(self, before: Encoding) -> Encoding:
        """How compactly an update can be encoded after this defense."""
        return before


@dataclass(frozen=True, kw_only=True)
class PrivacySetting(Method):
    """A privacy setting as a framework takes it: what it states, and what can be proved of what the framework's code does."""

    framework: ClassVar[str] = ""  # whose code was read, with the version

    @abstractmethod
    def readings(self, rounds: int, delta: float | None = None) -> tuple[PrivacyReading, ...]:
        """What is stated and what is proved after so many rounds of one client, at δ. Without one, it is the setting's own, or 1e-5."""

    def trial(self, reading: PrivacyReading, rounds: int, draws: int, rng: Generator) -> tuple[Tensor, Tensor] | None:
        """Scores (draws,) of what leaves for each of the two neighbours that are easiest to tell apart; None where nobody knows them."""
        return None

    def caveats(self) -> tuple[str, ...]:
        """What the proofs leave out, one sentence each."""
        return ()

    def declared(self, unit: float) -> tuple[tuple[str, dict[str, Any]], ...]:
        """The defenses, by name and options, that this setting is to an update whose weights moved by `unit` times itself."""
        return ()

    @classmethod
    def read(cls, thing: Any) -> dict[str, Any] | None:
        """The options of this setting in a framework's own object; None where the object is another."""
        return None


@dataclass(frozen=True, kw_only=True)
class Public:
    """What the protocol reveals by design, including the defenses (Kerckhoffs's principle)."""

    input_shape: tuple[int, ...]
    classes: int
    batch_size: int | None  # None: the client does not declare it
    loss: Loss
    training: Training
    train_mode: bool  # batch norm and dropout behave as in training
    normalization: Normalization = field(default_factory=Normalization)
    defenses: tuple[Defense, ...] = ()
    blank: Any = None  # for token inputs: one sample without content, as the model takes it; None: inputs are numbers
    output_shape: tuple[int, ...] | None = None  # of one sample, where it is not (classes,)

    @property
    def positions(self) -> bool:
        """The model has an output at each position of a text, or at each place of a grid."""
        return self.output_shape is not None and len(self.output_shape) > 1

    @property
    def kind(self) -> InputKind:
        if self.blank is None:
            return "grids" if self.positions else "regressions" if self.loss.target_kind() == "numbers" else "numbers"
        return "positions" if self.positions else "texts"


@dataclass(frozen=True, kw_only=True)
class Exposure:
    """All that the server has of one client in one round."""

    model: nn.Module  # as the server sent it
    update: Update
    public: Public
    auxiliary: Batch | None = None
    candidates: Batch | None = None  # samples that the server holds itself, and of which it asks whether they are in the batch
    buffers: Mapping[str, Tensor] = field(default_factory=dict)  # as the client sent them after its training, such as running statistics

    def without_inputs(self, outcome: Outcome, message: str) -> Reconstruction:
        """An empty reconstruction, with the reason why there is none."""
        like = next(iter(self.update.values()))
        return Reconstruction(
            inputs=like.new_zeros(0, *self.public.input_shape),
            labels=torch.zeros(0, dtype=torch.int64, device=like.device),
            objective=torch.inf,
            normalization=self.public.normalization,
            outcome=outcome,
            message=message,
        )


@dataclass(frozen=True, kw_only=True)
class Recovery(Method):
    """A method of the server: recovers something private from an exposure.

    The methods of one surface share an interface that derives from this one. Its `__call__` takes the exposure, the labels
    where the surface's methods build on them, and a generator.
    """


@dataclass(frozen=True, kw_only=True)
class LabelRecovery(Recovery):
    """Recovers the labels of a batch from an exposure."""

    # Where no recovery proves its labels, attacks take them from the recovery with the largest trust. 0: the last resort.
    trust: ClassVar[int] = 0
    trust_when_distorted: ClassVar[int | None] = None  # behind defenses that distort entries; None: the same
    needs_small_entries: ClassVar[bool] = False  # True: reads the bias or row sums, which pruning destroys

    @abstractmethod
    def __call__(self, exposure: Exposure, rng: Generator) -> LabelEstimate: ...


@dataclass(frozen=True, kw_only=True)
class FeatureRecovery(Recovery):
    """Recovers the inputs of the last linear layer from an exposure."""

    @abstractmethod
    def __call__(self, exposure: Exposure, labels: LabelEstimate | None, rng: Generator) -> FeatureEstimate: ...


@dataclass(frozen=True, kw_only=True)
class MapRecovery(Recovery):
    """Recovers the activation maps at the input of a convolution from an exposure."""

    @abstractmethod
    def __call__(self, exposure: Exposure, rng: Generator) -> MapEstimate: ...


@dataclass(frozen=True, kw_only=True)
class TokenRecovery(Recovery):
    """Recovers the tokens of a text from an exposure."""

    @abstractmethod
    def __call__(self, exposure: Exposure, rng: Generator) -> TokenEstimate: ...


@dataclass(frozen=True, kw_only=True)
class TargetRecovery(Recovery):
    """Recovers the targets of a regression from an exposure."""

    @abstractmethod
    def __call__(self, exposure: Exposure, rng: Generator) -> TargetEstimate: ...


@dataclass(frozen=True, kw_only=True)
class MembershipTest(Recovery):
    """Says which candidates, samples that the server holds itself, are in a client's batch. Each is judged by itself."""

    @abstractmethod
    def __call__(self, exposure: Exposure, candidates: Batch, rng: Generator) -> Estimate: ...


@dataclass(frozen=True, kw_only=True)
class Attack(Recovery):
    """Recovers the inputs themselves."""

    # What of the update the attack matches by replaying the client's training, and the defenses with it.
    matches: ClassVar[Literal["nothing", "direction", "whole"]] = "nothing"
    quick_rank: ClassVar[int] = 4  # a quick audit of a large model gives its time to the matching attacks of the lowest ranks

    @abstractmethod
    def __call__(self, exposure: Exposure, labels: LabelEstimate | None, rng: Generator) -> Reconstruction: ...

    def objective(self, exposure: Exposure, found: Reconstruction, inputs: Tensor, targets: Tensor) -> float | None:
        """What the attack minimised to get `found`, at other inputs and targets; None where it minimised nothing.

        At the truth a lower value shows that the attack is under-optimised.
        """
        return None


@dataclass(frozen=True, kw_only=True)
class Mechanism:
    """How an update comes about, as whoever audits a client knows it: what is computed, and the noise on what is sent."""

    client: Client  # behind the defenses of model and training, with the private batch
    transforms: tuple[Callable[[Update], Update], ...]  # continuous; applied before the noise
    floors: Mapping[str, float]  # the noise in each layer's entries, as `Defense.noise_floor` has it
    declared: bool  # False: the client adds no noise, and the floors are those of rounding
    noise_multipliers: Mapping[ProtectedUnit, float]  # noise over the most that one sample, or the whole batch, can change
    fixed_noise: bool = True  # False: the floors depend on the update itself, and so tell of it
    normalization: Normalization = field(default_factory=Normalization)
    auxiliary: Batch | None = None  # what an attacker knows of other inputs


@dataclass(frozen=True, kw_only=True)
class Bound(Method):
    """Limits what any attacker can learn from an update. It looks at the private batch, since no attacker runs it."""

    surface: ClassVar[str]  # what it limits
    metric: ClassVar[str]  # in whose units

    @abstractmethod
    def __call__(self, mechanism: Mechanism, rng: Generator) -> Ceiling: ...

    def as_measured(self, ceiling: Ceiling, details: Mapping[str, Any]) -> Ceiling:
        """The ceiling on the metric as an audit measured it, whose record has these details."""
        return ceiling

    def within(self, products: float, numbers: int) -> Bound:
        """The bound in so many products with the update's Jacobian for each sample of `numbers` numbers; refused where it needs more."""
        return self


class Tampering(ABC):
    """What a dishonest server does to the model before it is sent."""

    @abstractmethod
    def tamper(self, model: nn.Module) -> nn.Module:
        """A changed copy; the caller's model is never touched."""


@dataclass(frozen=True, kw_only=True)
class ActiveAttack(Attack, Tampering):
    """An attack by a dishonest server, which changes the model before it is sent."""


@dataclass(frozen=True, kw_only=True)
class Metric(Method):
    """Compares what was recovered with the truth: one number a sample (or one a batch for label counts)."""

    surface: ClassVar[str]  # the name of what it scores
    higher_is_better: ClassVar[bool]
    title: ClassVar[str] = ""  # on the report's page; "" for the name itself
    unit: ClassVar[str] = ""
    is_share: ClassVar[bool] = False  # in [0, 1], shown in per cent
    per_batch: ClassVar[bool] = False  # compares label counts (C,): one number for the whole batch

    @abstractmethod
    def __call__(self, recovered: Tensor, truth: Tensor) -> Tensor: ...

    def applies(self, shape: tuple[int, ...] | None) -> bool:
        """Whether the metric is made for samples of `shape` at all, so that a missing score is worth a word."""
        return True

    def unavailable(self, shape: tuple[int, ...] | None = None) -> str | None:
        """Why this metric cannot compare samples of `shape` here, or None where it can; without a shape, what this machine lacks."""
        return None


@dataclass(frozen=True, kw_only=True)
class GalleryMetric(Metric):
    """A metric that needs other samples than the private ones: the truth is looked for among them. No partner is assigned."""

    @abstractmethod
    def picks(self, recovered: Tensor, truth: Tensor, others: Tensor) -> Tensor:
        """The samples that are picked from the truth (B, *shape) followed by the others (N, *shape), each index once: (k,)."""

    @abstractmethod
    def size(self, private: int, others: int) -> int:
        """How many samples the gallery has, of those at hand."""
