"""Pictures from the activation maps that a convolution's gradient gives away."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Generator

from dosimeter.engines.downward.matching import Matching, match
from dosimeter.engines.downward.pictures import Descent, descend, draw, labels_of
from dosimeter.interfaces import Attack, Exposure
from dosimeter.options import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from dosimeter.registry import ATTACKS
from dosimeter.types import Knowledge, LabelEstimate, Outcome, Reconstruction


@ATTACKS.register("maps")
@dataclass(frozen=True, kw_only=True)
class Maps(Attack):
    """Draws each sample from its exact activation maps, which linear algebra reads off the gradient layer by layer.

    Ours. One convolution's gradient gives the maps of the whole batch (`shifts`), without labels and batch size. From there a backward pass
    gives the slopes at the layers below. A layer with known slopes gives up its input by least squares: the recursion of Zhu and Blaschko,
    "R-GAP: Recursive Gradient Attack on Privacy", ICLR 2021, for whole batches and residual networks. What remains is to invert the lowest
    maps, by Gauss-Newton steps from what a linear decoder sees in them.
    Departures from R-GAP: all kernel offsets and all layers that share an input are one least-squares problem. Doubtful entries of
    rectifiers are settled by its residual. Norms with statistics of their own are solved by a fixed point (`consistency`). Below the last
    layer that it determines, inputs are found by optimisation.
    """

    needs: ClassVar[frozenset[Knowledge]] = frozenset({Knowledge.HEAD_GRADIENT})
    quick: ClassVar[dict[str, Any]] = {"steps": 12, "approach": 100}
    begins_with_steps: ClassVar[bool] = False  # the walk down the layers comes first

    layer: str | None = None  # the convolution whose maps come first; none: the first one that shows them
    steps: PositiveInt = 60  # of Gauss-Newton, where the maps determine the pictures
    products: PositiveInt = 20  # by the Gauss-Newton matrix, a step at most
    total_variation: NonNegativeFloat = 0.0  # at the first step, in units of the maps' misfit
    approach: NonNegativeInt = 800  # steps of Adam, where the maps do not determine the pictures
    matching: NonNegativeInt = 0  # steps on the gradients below the maps too, after `approach`
    learning_rate: PositiveFloat = 0.03  # of Adam, as all that follow
    matching_variation: NonNegativeFloat = 0.1
    map_weight: NonNegativeFloat = 1.0
    precision: Literal["fp32", "tf32"] = "fp32"
    seconds: PositiveFloat | None = None  # of drawing, after which no further step begins; the maps come before

    def __call__(self, exposure: Exposure, labels: LabelEstimate | None, rng: Generator) -> Reconstruction:
        seed = int(torch.randint(2**31, (1,), generator=rng, device=rng.device))
        descent = descend(exposure, layer=self.layer, seed=seed)
        if self.matching or not descent.determines_inputs:
            matched = match(exposure, descent, rng, self._matching)
            inputs, objective, distance = matched.inputs, matched.objective, matched.distance
        else:
            given = {"steps": self.steps, "products": self.products, "variation": self.total_variation, "seconds": self.seconds}
            drawn = draw(exposure, descent, rng, **given)
            inputs, objective, distance = drawn.inputs, float(drawn.losses.mean()), None
        told = labels_of(exposure, descent, inputs) if descent.labels is None else descent.labels
        unknown = torch.full((len(inputs),), -1, dtype=torch.int64, device=inputs.device)
        return Reconstruction(
            inputs=inputs,
            labels=unknown if told is None else told.to(inputs.device),
            objective=objective,
            distance=distance,
            normalization=exposure.public.normalization,
            outcome=Outcome.PARTIAL if descent.doubt else Outcome.COMPLETED,
            message=_message(descent),
        )

    @property
    def _matching(self) -> Matching:
        return Matching(
            approach=self.approach,
            steps=self.matching,
            learning_rate=self.learning_rate,
            total_variation=self.matching_variation,
            map_weight=self.map_weight,
            precision=self.precision,
            seconds=self.seconds,
        )


def _message(descent: Descent) -> str:
    """Where the maps begin, how far down they are exact, and why no further."""
    lowest = descent.lowest
    name = descent.names.get(lowest.value, descent.start)
    words = [descent.doubt] if descent.doubt else []
    words.append(f"maps of {len(descent.certified)} samples at {descent.start}, {int(descent.certified.sum())} of them certified")
    if name != descent.start:
        part = "" if lowest.whole else f" ({float(lowest.known.double().mean()):.0%} of it)"
        factor = "" if lowest.freedom is None else f", up to a factor for each {lowest.freedom}"
        words.append(f"from there by least squares down to the input of {name}{part}{factor}")
    stopped = [value for value in descent.reasons if value <= lowest.value]
    if stopped:
        words.append(f"not further, since at the input of {descent.names.get(max(stopped), '')} {descent.reasons[max(stopped)]}")
    return "; ".join(words)
