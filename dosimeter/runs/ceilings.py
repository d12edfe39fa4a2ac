"""What no attacker can do with a client's update, by every bound that fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from dosimeter.engines.bounds.mechanism import mechanism_of
from dosimeter.interfaces import Bound, Defense, Loss, Training
from dosimeter.options import check_value
from dosimeter.randomness import generator
from dosimeter.registry import BOUNDS
from dosimeter.types import Batch, Ceiling, Normalization, Refused


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """The ceilings that could be computed, and the reason for each bound that could not."""

    found: tuple[Ceiling, ...]
    refused: dict[str, str]  # by the bound's name

    def lowest(self, surface: str, metric: str) -> Ceiling | None:
        """The ceiling that allows the least; a proved one goes before an estimate."""
        fitting = [ceiling for ceiling in self.found if (ceiling.surface, ceiling.metric) == (surface, metric)]
        return min(fitting, key=lambda ceiling: (not ceiling.proved, float(ceiling.values.mean())), default=None)


def ceilings(
    model: nn.Module,
    batch: Batch,
    *,
    training: Training | str | None = None,
    defenses: Sequence[Defense | str] = (),
    loss: Loss | nn.Module | Callable[..., Tensor] | str | None = None,
    normalization: Normalization | None = None,
    auxiliary: Batch | None = None,
    bounds: Bound | str | Sequence[Bound | str] = "all",
    seed: int = 0,
) -> Ceilings:
    """Limit what any attacker learns from the update that `observe` would expose with the same arguments.

    A ceiling holds under its `assumptions`. Where `proved` is False, it is an estimate.
    """
    seed = check_value(int, seed, "seed")
    if not isinstance(bounds, (str, Bound, Sequence)):
        raise TypeError(f"bounds: expected the name of a bound, a Bound, or a list of them, got {type(bounds).__name__}")
    if auxiliary is not None and not isinstance(auxiliary, Batch):
        raise TypeError(f"auxiliary: expected a Batch, got {type(auxiliary).__name__}")
    wanted = BOUNDS.names() if bounds == "all" else [bounds] if isinstance(bounds, (str, Bound)) else bounds
    chosen = [BOUNDS.resolve(bound) for bound in wanted]
    found, refused = [], {}
    try:
        mechanism = mechanism_of(
            model,
            batch,
            training=training,
            defenses=defenses,
            loss=loss,
            normalization=normalization,
            auxiliary=auxiliary,
            seed=seed,
        )
    except Refused as reason:
        return Ceilings(found=(), refused={bound.name: str(reason) for bound in chosen})
    for bound in chosen:
        try:
            found.append(bound(mechanism, generator(seed, f"bound {bound.name}", batch.inputs.device)))
        except Refused as reason:
            refused[bound.name] = str(reason)
    return Ceilings(found=tuple(found), refused=refused)
