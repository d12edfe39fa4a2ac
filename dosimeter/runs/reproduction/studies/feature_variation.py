"""The coefficient of variation of sorted features."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Generator, Tensor

from dosimeter.options import Fraction
from dosimeter.runs.measurement import AuditedClient
from dosimeter.runs.reproduction.studies.last_layer import last_layer
from dosimeter.runs.reproduction.studies.study import STUDIES, Study


@STUDIES.register("feature_variation")
@dataclass(frozen=True, kw_only=True)
class FeatureVariation(Study):
    """Which places of the sorted features vary least from image to image.

    Ye et al., "High-Fidelity Gradient Inversion in Distributed Learning", AAAI 2024: Eq. (5) and Fig. 3. The features of each image are
    sorted, and every place has a standard deviation over the images, divided by its mean. `fall` and `rise` compare the mean of the
    first and of the last `ends` of the places with the least one. `least_at` is the least one's place, from 0 to 1.
    Departure: places whose mean is 0, behind a ReLU, have no coefficient and are left out.
    """

    quantities: ClassVar = {"least_variation": True, "fall": False, "rise": False, "least_at": False}

    ends: Fraction = 0.02

    def __call__(self, client: AuditedClient, rng: Generator) -> dict[str, float | None]:
        ordered = last_layer(client).features.sort(1).values  # (B, H)
        mean = ordered.mean(0)
        varying = mean.abs() > 0
        variation = (ordered.std(0)[varying] / mean[varying]).abs()  # (n,)
        least, count = variation.min(), max(1, round(self.ends * len(variation)))
        return {
            "least_variation": float(least),
            "fall": _ratio(variation[:count], least),
            "rise": _ratio(variation[-count:], least),
            "least_at": int(variation.argmin()) / max(1, len(variation) - 1),
        }


def _ratio(variation: Tensor, least: Tensor) -> float:
    return float(variation.mean() / least)
