"""Gradient matching that begins at drawn pictures and keeps to the exact maps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Generator, Tensor, nn

from dosimeter.engines.downward.pictures import Descent
from dosimeter.engines.matching.distances import Cosine
from dosimeter.engines.matching.optimisers import Adam
from dosimeter.engines.matching.priors import Prior, Seen, TotalVariation, batch_norm_prior
from dosimeter.engines.matching.recipe import Path, Precision, Recipe
from dosimeter.engines.matching.schedules import Rate
from dosimeter.engines.matching.solve import solve
from dosimeter.interfaces import Exposure
from dosimeter.types import LabelEstimate, Reconstruction, Refused


@dataclass(frozen=True, kw_only=True)
class MapMatch(Prior):
    """Each layer's input is its exact map: the mean over samples of ‖f(x) − map‖² / ‖map‖², summed over the layers."""

    maps: Mapping[str, tuple[Tensor, Tensor]]  # by module name: the map (B, *shape), and where it is known

    def __call__(self, inputs: Tensor, seen: Seen) -> Tensor:
        total = inputs.new_zeros(())
        for name, (maps, known) in self.maps.items():
            off = ((seen[name] - maps) * known).flatten(1).square().sum(1)
            total = total + (off / (maps * known).flatten(1).square().sum(1)).mean()
        return total

    def modules_to_watch(self, model: nn.Module) -> tuple[str, ...]:
        return tuple(self.maps)


@dataclass(frozen=True, kw_only=True)
class Matching:
    """How the joint matching goes: cosine distance, Adam along half a cosine, total variation, and the maps."""

    steps: int
    learning_rate: float
    total_variation: float
    map_weight: float
    batch_norm: float = 0.0
    per_layer: bool = False
    seconds: float | None = None
    path: Path = "auto"
    precision: Precision = "fp32"


def match(exposure: Exposure, descent: Descent, start: Tensor, rng: Generator, how: Matching) -> Reconstruction:
    """Match the update from `start` (B, *shape), under the labels that the head's slopes show."""
    if descent.labels is None:
        raise Refused("maps: matching needs the labels, and the head's gradient does not tell them here")
    like = next(exposure.model.parameters())
    maps = {descent.names[one.value]: (one.maps.to(like), one.known.to(like)) for one in descent.known if one.value in descent.names}
    priors: list[Prior] = [TotalVariation(weight=how.total_variation), MapMatch(weight=how.map_weight, maps=maps)]
    if how.batch_norm:
        priors.append(batch_norm_prior(exposure.model, weight=how.batch_norm))
    recipe = Recipe(
        distance=Cosine(per_layer=how.per_layer),
        optimiser=Adam(sign="raw"),
        rate=Rate(start=how.learning_rate, shape="cosine"),
        steps=how.steps,
        priors=tuple(priors),
        seconds=how.seconds,
        path=how.path,
        precision=how.precision,
    )
    labels = descent.labels.to(like.device)
    ids, soft = (labels, None) if labels.ndim == 1 else (labels.argmax(1), labels)
    sized = replace(exposure, public=replace(exposure.public, batch_size=len(start)))
    estimate = LabelEstimate(counts=ids.bincount(minlength=exposure.public.classes), labels=ids, soft=soft)
    return solve(sized, estimate, rng, recipe, start=start)
