"""Pictures from the activation maps that a convolution's gradient gives away."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Generator

from dosimeter.engines.downward.pictures import Descent, descend, draw
from dosimeter.interfaces import Attack, Exposure
from dosimeter.options import NonNegativeFloat, PositiveFloat, PositiveInt
from dosimeter.registry import ATTACKS
from dosimeter.types import Knowledge, LabelEstimate, Outcome, Reconstruction


@ATTACKS.register("maps")
@dataclass(frozen=True, kw_only=True)
class Maps(Attack):
    """Draws each sample from its exact activation maps, which linear algebra reads off the gradient layer by layer.

    Ours. One convolution's gradient gives the maps of the whole batch (`shifts`), without labels and batch size. From there a backward pass
    gives the slopes at the layers below. A layer with known slopes gives up its input by least squares: the recursion of Zhu and Blaschko,
    "R-GAP: Recursive Gradient Attack on Privacy", ICLR 2021, for whole batches and residual networks. What remains is to invert the lowest
    maps, by Gauss-Newton steps.
    Departures from R-GAP: all kernel offsets and all layers that share an input are one least-squares problem. Doubtful entries of
    rectifiers are settled by its residual. Below the last layer that it determines, inputs are found by optimisation.
    """

    needs: ClassVar[frozenset[Knowledge]] = frozenset({Knowledge.HEAD_GRADIENT})
    quick: ClassVar[dict[str, Any]] = {"steps": 12}

    layer: str | None = None  # the convolution whose maps come first; none: the first one that shows them
    steps: PositiveInt = 60  # of Gauss-Newton
    products: PositiveInt = 20  # by the Gauss-Newton matrix, a step at most
    total_variation: NonNegativeFloat = 0.0  # at the first step, in units of the maps' misfit
    seconds: PositiveFloat | None = None  # after which no further step begins

    def __call__(self, exposure: Exposure, labels: LabelEstimate | None, rng: Generator) -> Reconstruction:
        seed = int(torch.randint(2**31, (1,), generator=rng, device=rng.device))
        descent = descend(exposure, layer=self.layer, seed=seed)
        drawn = draw(
            exposure,
            descent,
            rng,
            steps=self.steps,
            products=self.products,
            variation=self.total_variation,
            seconds=self.seconds,
        )
        unknown = torch.full((len(drawn.inputs),), -1, dtype=torch.int64, device=drawn.inputs.device)
        return Reconstruction(
            inputs=drawn.inputs,
            labels=unknown if descent.labels is None else descent.labels.to(drawn.inputs.device),
            objective=float(drawn.losses.mean()),
            normalization=exposure.public.normalization,
            outcome=Outcome.PARTIAL if descent.doubt else Outcome.COMPLETED,
            message=_message(descent),
        )


def _message(descent: Descent) -> str:
    """Where the maps begin and how far down they are exact."""
    lowest = descent.names.get(descent.lowest.value, descent.start)
    part = "" if descent.lowest.whole else f" ({float(descent.lowest.known.double().mean()):.0%} of it)"
    words = [descent.doubt] if descent.doubt else []
    words.append(f"maps of {len(descent.certified)} samples at {descent.start}, {int(descent.certified.sum())} of them certified")
    if lowest != descent.start:
        words.append(f"from there by least squares down to the input of {lowest}{part}")
    return "; ".join(words)
