"""The distributions of a head's features and probabilities over a batch and over other images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Generator, Tensor

from dosimeter.runs.measurement import AuditedClient
from dosimeter.runs.reproduction.studies.last_layer import last_layer, last_layer_on
from dosimeter.runs.reproduction.studies.study import STUDIES, Study


@STUDIES.register("head_distributions")
@dataclass(frozen=True, kw_only=True)
class HeadDistributions(Study):
    """Whether features and probabilities look Gaussian, and whether other images tell their means.

    Zhang, "Unveiling the Shadows", PhD thesis, PolyU 2025: Assumptions 1 and 2, Section 4.5.2, Fig. 4.2. `skew` and `kurtosis` (of a
    normal distribution: 0 and 3) are medians over dimensions. `mean_error` is the distance between the means over the batch and over
    the auxiliary images, relative to the former. `mean_probability` is the mean over classes, with the deviation over classes beside it.
    """

    quantities: ClassVar = {
        "feature_skew": False,
        "feature_kurtosis": False,
        "feature_mean_error": True,
        "probability_skew": False,
        "probability_kurtosis": False,
        "probability_mean_error": True,
        "mean_probability": False,
        "probability_deviation": False,
    }

    def __call__(self, client: AuditedClient, rng: Generator) -> dict[str, float | None]:
        assert client.auxiliary is not None, "this study needs auxiliary images: data.auxiliary"
        own = last_layer(client)
        others = last_layer_on(client, client.auxiliary.inputs, client.auxiliary.targets)
        means = own.probabilities.mean(0)  # (C,)
        return {
            **_shape("feature", own.features, others.features),
            **_shape("probability", own.probabilities, others.probabilities),
            "mean_probability": float(means.mean()),
            "probability_deviation": float(means.std()),
        }


def _shape(name: str, values: Tensor, others: Tensor) -> dict[str, float | None]:
    """Of values (B, n) beside the same dimensions of other samples."""
    centred = values - values.mean(0)
    spread = centred.square().mean(0).sqrt()
    scaled = (centred / spread)[:, spread > 0]
    error = (values.mean(0) - others.mean(0)).norm() / values.mean(0).norm()
    return {
        f"{name}_skew": float(torch.median(scaled.pow(3).mean(0).abs())),
        f"{name}_kurtosis": float(torch.median(scaled.pow(4).mean(0))),
        f"{name}_mean_error": float(error),
    }
