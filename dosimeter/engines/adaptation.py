"""The server that knows the defenses in force (Kerckhoffs): for each, what simple mathematics undoes of it, or that nothing here does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, TypeVar

from torch import Tensor

from dosimeter.client.gradients import Gradient
from dosimeter.client.training import Replayable
from dosimeter.interfaces import Attack, Defense, Exposure, LabelRecovery, Method, Replay
from dosimeter.registry import FEATURES
from dosimeter.types import Update

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


@dataclass(frozen=True)
class ScaledLayers:
    """Layers times given tensors; the others as they are."""

    factors: dict[str, Tensor]

    def __call__(self, update: Update) -> Update:
        return {name: change * self.factors[name] if name in self.factors else change for name, change in update.items()}


def adapt(method: Kind, exposure: Exposure) -> Adapted[Kind]:
    """The method against the defenses that the exposure makes public; one note a defense, also where there is no counter.

    An attack that matches the update by replaying the client's training replays the defenses with it, as each defense says.
    Label and feature recoveries read the head's gradient as it is: what they do about a defense they say themselves.
    """
    defenses = exposure.public.defenses
    reader = _reader(method)  # of the head's gradient as it was sent
    if not defenses or not isinstance(method, Attack) or method.matches == "nothing" or reader is not method:
        notes = tuple(f"{defense.name}: {reader.counter(defense)}" for defense in defenses)
        return Adapted(method=method, exposure=exposure, notes=notes, changed=False)
    replays = [defense.replay(exposure.update, method, defenses[position + 1 :]) for position, defense in enumerate(defenses)]
    notes = [f"{defense.name}: {replay.note}" for defense, replay in zip(defenses, replays)]
    after = [replay.transform for replay in replays if replay.transform is not None]
    options: dict[str, Any] = {name: value for replay in replays for name, value in replay.options.items()}
    update, training = exposure.update, exposure.public.training
    if weights := _weights(update, replays):
        after.append(ScaledLayers(weights))
        update = {name: change * weights[name] for name, change in update.items()}
    if after and not isinstance(training, Replayable):
        notes.append(f"nothing more is replayed, as {training.name} has no replayable form")
        after.clear()
    if after:
        assert isinstance(training, Replayable)
        public = replace(exposure.public, training=Countered(each=training, after=tuple(after)))
        exposure = replace(exposure, public=public, update=update)
    adapted = replace(method, **options) if options else method
    return Adapted(method=adapted, exposure=exposure, notes=tuple(notes), changed=bool(after or options))


def distrust(recovery: LabelRecovery, defenses: Sequence[Defense]) -> tuple[bool, bool, int]:
    """A sort key of label recoveries that prove nothing: a server that knows the defenses trusts the first one most.

    Where a defense sets small entries to zero, those that need small entries come last.
    """
    trust = recovery.trust
    if recovery.trust_when_distorted is not None and any(defense.distorts() for defense in defenses):
        trust = recovery.trust_when_distorted
    return recovery.trust == 0, recovery.needs_small_entries and any(defense.empties() for defense in defenses), -trust


def _reader(method: Method) -> Method:
    """What reads the head's gradient: an attack's feature recovery where it builds on one, else the method itself."""
    features = getattr(method, "features", None)
    return method if features is None else FEATURES.build(features)


def _weights(update: Update, replays: Sequence[Replay]) -> dict[str, Tensor]:
    """One over each layer's known error, where the layers' errors differ; weighed by them the update keeps its norm."""
    sizes: dict[str, float] = {}
    for name, deviation in ((name, deviation) for replay in replays for name, deviation in replay.deviation.items()):
        sizes[name] = (sizes.get(name, 0.0) ** 2 + deviation**2) ** 0.5
    sizes = {name: size for name, size in sizes.items() if size > 0}
    if len(sizes) < len(update) or max(sizes.values()) < 1.001 * min(sizes.values()):
        return {}
    weighed = sum(float(change.square().sum()) / sizes[name] ** 2 for name, change in update.items())
    whole = sum(float(change.square().sum()) for change in update.values())
    unit = (whole / weighed) ** 0.5 if weighed else 1.0
    return {name: update[name].new_tensor(unit / size) for name, size in sizes.items()}
