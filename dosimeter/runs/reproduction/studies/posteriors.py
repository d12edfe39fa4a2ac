"""Probabilities of a class on its own samples and on the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Generator, Tensor

from dosimeter.options import NonNegativeInt
from dosimeter.runs.measurement import AuditedClient
from dosimeter.runs.reproduction.studies.last_layer import last_layer
from dosimeter.runs.reproduction.studies.study import STUDIES, Study


@STUDIES.register("posteriors")
@dataclass(frozen=True, kw_only=True)
class Posteriors(Study):
    """The probability that a model gives a class, on samples of the class (positive) and on others (negative).

    Zhang, "Unveiling the Shadows", PhD thesis, PolyU 2025: Section 3.5.1, Figs. 3.2 and 3.3. `separation` is the share of pairs of a
    positive and a negative sample in which the positive has the larger probability. Without a `class_id`, means over all classes; then
    `separated_classes` is the share of classes whose boxes do not touch: the lower quartile of the positive samples lies above the
    upper quartile of the negative ones.
    """

    quantities: ClassVar = {
        "positive_mean": False,
        "positive_deviation": False,
        "negative_mean": False,
        "negative_deviation": False,
        "gap": False,  # between the two means
        "separation": False,
        "separated_classes": False,
    }

    class_id: NonNegativeInt | None = None

    def __call__(self, client: AuditedClient, rng: Generator) -> dict[str, float | None]:
        head = last_layer(client)
        chosen = range(len(head.weight)) if self.class_id is None else [self.class_id]
        found = [_of_class(head.probabilities[:, k], head.labels == k) for k in chosen if int((head.labels == k).sum()) > 1]
        if not found:
            return dict.fromkeys(self.quantities)
        return dict(zip(self.quantities, torch.stack(found).mean(0).tolist()))


def _of_class(probabilities: Tensor, own: Tensor) -> Tensor:
    """The seven quantities of one class, from its probability on every sample (B,)."""
    positive, negative = probabilities[own], probabilities[~own]
    ahead = (positive[:, None] > negative).double().mean()
    apart = (positive.quantile(0.25) > negative.quantile(0.75)).double()
    return torch.stack([positive.mean(), positive.std(), negative.mean(), negative.std(), positive.mean() - negative.mean(), ahead, apart])
