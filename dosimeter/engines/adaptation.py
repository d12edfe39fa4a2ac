"""The server that knows the defenses in force (Kerckhoffs): for each, what simple mathematics undoes of it, or that nothing here does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from dosimeter.client.training import Gradient, Replayable
from dosimeter.defenses.clipping import Clipping, clip_factor, cut, norm
from dosimeter.defenses.dpsgd import DPSGD
from dosimeter.defenses.gaussian_noise import GaussianNoise
from dosimeter.defenses.head_withheld import HeadWithheld
from dosimeter.defenses.laplace_noise import LaplaceNoise
from dosimeter.defenses.local_iterations import LocalIterations
from dosimeter.defenses.low_rank import LowRank
from dosimeter.defenses.mixup import Mixup
from dosimeter.defenses.outgoing import largest_magnitude
from dosimeter.defenses.pruning import Pruning
from dosimeter.defenses.quantisation import Quantisation
from dosimeter.defenses.secure_aggregation import SecureAggregation
from dosimeter.defenses.soteria import Soteria
from dosimeter.engines.subspace.distortion import distorts
from dosimeter.features.subspace import Subspace as SubspaceFeatures
from dosimeter.interfaces import Attack, Defense, Exposure, Method
from dosimeter.labels.gradient_bridge import GradientBridge
from dosimeter.labels.subspace import Subspace as SubspaceLabels
from dosimeter.types import Update

TRUSTED = ("subspace", "ilrg", "posterior", "llg", "zlg", "idlg")  # where no label recovery proves itself
TRUSTED_WHEN_NOISY = ("ilrg", "posterior", "llg", "zlg", "idlg", "subspace")  # what subspace proves comes first anyway
TRUSTED_WHEN_PRUNED = ("llg", "idlg", "subspace", "ilrg", "posterior", "zlg")  # those that do without the bias, which pruning empties

Kind = TypeVar("Kind", bound=Method)
Transform = Callable[[Update], Update]


@dataclass(frozen=True, kw_only=True)
class Adapted(Generic[Kind]):
    """A method and an exposure with the defenses taken into account, and what was done about each defense."""

    method: Kind
    exposure: Exposure
    notes: tuple[str, ...]
    changed: bool  # whether the method now does anything else than before


@dataclass(frozen=True, kw_only=True)
class Countered(Replayable):
    """The client's training, followed by what the server knows to have been done to the update since."""

    name: ClassVar[str] = "countered"

    each: Replayable
    after: tuple[Transform, ...]

    def replay(self, gradient: Gradient, parameters: Update, buffers: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Update:
        update = self.each.replay(gradient, parameters, buffers, inputs, targets)
        for transform in self.after:
            update = transform(update)
        return update


@dataclass
class _Plan:
    """What a matching attack is to do, gathered defense by defense."""

    exposure: Exposure
    after: list[Transform] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    deviation: dict[str, float] = field(default_factory=dict)  # known standard deviation of each layer's entries
    notes: list[str] = field(default_factory=list)


def adapt(method: Kind, exposure: Exposure) -> Adapted[Kind]:
    """The method against the defenses that the exposure makes public; one note a defense, also where there is no counter.

    An attack that matches the update by replaying the client's training replays the defenses with it, as far as they can be
    replayed. Label and feature recoveries read the head's gradient as it is: those that can cope with a defense do so by
    themselves, as the notes say.
    """
    defenses = exposure.public.defenses
    reads_features = getattr(method, "features", None) is not None  # of the head's gradient as it was sent
    if not defenses or not isinstance(method, Attack) or method.matches == "nothing" or reads_features:
        reader = SubspaceFeatures() if getattr(method, "features", None) == "subspace" else method
        notes = tuple(f"{defense.name}: {_of_itself(reader, defense)}" for defense in defenses)
        return Adapted(method=method, exposure=exposure, notes=notes, changed=False)
    plan = _Plan(exposure)
    for position, defense in enumerate(defenses):
        _counter(defense, method, plan, followed_by=defenses[position + 1 :])
    _weigh(plan)
    adapted = replace(method, **plan.options) if plan.options else method
    training = exposure.public.training
    if plan.after and not isinstance(training, Replayable):
        plan.notes.append(f"nothing more is replayed, as {training.name} has no replayable form")
        plan.after.clear()
    if plan.after:
        assert isinstance(training, Replayable)
        public = replace(exposure.public, training=Countered(each=training, after=tuple(plan.after)))
        exposure = replace(plan.exposure, public=public)
    return Adapted(method=adapted, exposure=exposure, notes=tuple(plan.notes), changed=bool(plan.after or plan.options))


def _of_itself(method: Method, defense: Defense) -> str:
    """What a method that is not rewritten does about a defense."""
    if isinstance(method, (SubspaceFeatures, SubspaceLabels)):
        if isinstance(defense, Clipping) and defense.mode != "value":
            return f"{method.name} is free of the gradient's scale"
        if isinstance(method, SubspaceFeatures) and distorts(defense):
            return f"what {method.name} cannot prove it guesses, as the most likely features under what this defense is known to do"
        if isinstance(defense, Mixup):
            return f"{method.name} takes samples of two labels apart"
    if isinstance(method, GradientBridge) and isinstance(defense, HeadWithheld):
        return f"{method.name} does without the head"
    return f"{method.name} has no counter of its own here"


def trusted(defenses: Sequence[Defense]) -> tuple[str, ...]:
    """Label recoveries in the order in which a server that knows the defenses trusts them, where none proves itself."""
    if any(isinstance(defense, Pruning) and defense.ratio > 0 for defense in defenses):
        return TRUSTED_WHEN_PRUNED
    return TRUSTED_WHEN_NOISY if any(distorts(defense) for defense in defenses) else TRUSTED


def _counter(defense: Defense, method: Attack, plan: _Plan, followed_by: Sequence[Defense]) -> None:
    update = plan.exposure.update
    note = "no counter is known here"
    match defense:
        case Clipping(mode="norm") if method.matches == "direction":
            note = "matching directions does not see a common scale"
        case Clipping():
            plan.after.append(_Clipped(max_norm=defense.max_norm, mode=defense.mode))
            note = "the clipping is replayed on the guess"
        case Pruning(ratio=0) | Soteria(ratio=0):
            note = "takes nothing out"
        case Pruning() | Soteria() if any(_is_noise(later) for later in followed_by):
            note = "the noise after it fills what it emptied, so which entries survived is not known and all are matched"
        case Pruning() | Soteria():
            emptied = _has_zeros if isinstance(defense, Pruning) else _has_empty_column
            layers = {name: (change != 0).to(change) for name, change in update.items() if emptied(change)}
            kept = sum(int(change.count_nonzero()) for change in update.values()) / max(1, sum(c.numel() for c in update.values()))
            note = f"only entries that survived are matched, {kept:.1%} of the update" if layers else "nothing that was sent is empty"
            plan.after += [_Scaled(layers)] if layers else []
        case LowRank():
            spaces = {name: space for name, change in update.items() if (space := _column_space(change, defense.rank)) is not None}
            note = "the guess is projected on the space of the factors that were sent" if spaces else "takes nothing out at this rank"
            plan.after += [_Projected(spaces)] if spaces else []
        case Quantisation() if defense.bits < 32:
            factor = 6 if defense.stochastic else 12
            for name, change in update.items():
                _add_deviation(plan, name, float(defense.step(change)) / factor**0.5 if change.numel() else 0.0)
            note = "every layer is weighed by the known variance of its rounding"
        case GaussianNoise() | LaplaceNoise():
            size = defense.std if isinstance(defense, GaussianNoise) else 2**0.5 * defense.scale
            for name, change in update.items():
                _add_deviation(plan, name, size * (largest_magnitude(change) if defense.relative else 1.0))
            note = "every layer is weighed by the noise's known variance" if defense.relative else _ONE_VARIANCE
        case DPSGD():
            note = f"the clipping of every sample is replayed with the training; {_ONE_VARIANCE}"
        case LocalIterations() | SecureAggregation():
            note = "replayed with the training, adapted or not"
        case Mixup() if any(item.name == "joint_labels" for item in fields(method)):
            plan.options["joint_labels"] = True
            note = "labels are soft and optimised along with the inputs"
        case _ if defense.side == "model":
            note = "the server sent the model and replays it, adapted or not"
    plan.notes.append(f"{defense.name}: {note}")


_ONE_VARIANCE = "one variance for all entries weighs them alike, so matching stays as it is"


def _add_deviation(plan: _Plan, name: str, size: float) -> None:
    plan.deviation[name] = (plan.deviation.get(name, 0.0) ** 2 + size**2) ** 0.5


def _weigh(plan: _Plan) -> None:
    """Divide each layer by its noise, on both sides, where the layers' noises differ; the update keeps its norm."""
    sizes = {name: size for name, size in plan.deviation.items() if size > 0}
    if len(sizes) < len(plan.exposure.update) or max(sizes.values()) < 1.001 * min(sizes.values()):
        return
    update = plan.exposure.update
    weighed = sum(float(change.square().sum()) / sizes[name] ** 2 for name, change in update.items())
    whole = sum(float(change.square().sum()) for change in update.values())
    unit = (whole / weighed) ** 0.5 if weighed else 1.0
    weights = {name: update[name].new_tensor(unit / size) for name, size in sizes.items()}
    plan.after.append(_Scaled(weights))
    plan.exposure = replace(plan.exposure, update={name: change * weights[name] for name, change in update.items()})


@dataclass(frozen=True)
class _Scaled:
    """Layers times given tensors; the others as they are."""

    by: dict[str, Tensor]

    def __call__(self, update: Update) -> Update:
        return {name: change * self.by[name] if name in self.by else change for name, change in update.items()}


@dataclass(frozen=True)
class _Projected:
    """Layers as matrices M turned into U Uᵀ M."""

    spaces: dict[str, Tensor]  # (rows, rank), orthonormal columns

    def __call__(self, update: Update) -> Update:
        return {name: self._one(change, self.spaces[name]) if name in self.spaces else change for name, change in update.items()}

    def _one(self, change: Tensor, space: Tensor) -> Tensor:
        return (space @ (space.T @ change.flatten(1))).reshape(change.shape)


@dataclass(frozen=True, kw_only=True)
class _Clipped:
    """The clipping defense, differentiable in what it clips and its scale included."""

    max_norm: float
    mode: str

    def __call__(self, update: Update) -> Update:
        if self.mode == "value":
            return {name: cut(change, self.max_norm) for name, change in update.items()}
        norms = {name: norm(change) for name, change in update.items()}
        if self.mode == "norm":
            norms = dict.fromkeys(norms, norm(torch.stack(list(norms.values()))))
        return {name: change * clip_factor(norms[name], self.max_norm).to(change) for name, change in update.items()}


def _is_noise(defense: Defense) -> bool:
    match defense:
        case GaussianNoise(std=size) | LaplaceNoise(scale=size):
            return size > 0
    return False


def _has_zeros(change: Tensor) -> bool:
    return not bool(change.all())


def _has_empty_column(change: Tensor) -> bool:
    return change.ndim == 2 and not bool(change.any(0).all())


def _column_space(change: Tensor, rank: int) -> Tensor | None:
    """The space of the left factor that the client sent; None for layers that `low_rank` leaves as they are."""
    if change.ndim < 2 or change.numel() == 0 or min(len(change), change[0].numel()) <= rank:
        return None
    left, values, _ = torch.linalg.svd(change.flatten(1).double(), full_matrices=False)
    real = values[:rank] > 1e-6 * values[0].clamp_min(torch.finfo(torch.float64).tiny)
    return left[:, :rank][:, real].to(change.dtype)
