"""FGLA: a decoder draws the quotients of the head's weight and bias gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Generator

from dosimeter.engines.decoder.decoding import DecodingAttack
from dosimeter.features.quotient import quotient_features
from dosimeter.interfaces import Exposure
from dosimeter.network.head import find_head
from dosimeter.registry import ATTACKS
from dosimeter.types import FeatureEstimate, Knowledge, LabelEstimate, Refused


@ATTACKS.register("fgla")
@dataclass(frozen=True, kw_only=True)
class FGLA(DecodingAttack):
    """Divides each class's weight gradient by its bias gradient and has a decoder, trained on auxiliary images, draw the quotient.

    Xue et al., "Fast Generation-Based Gradient Leakage Attacks against Highly Compressed Gradients", INFOCOM 2023; rgla Eq. (1). Samples of
    one label share one quotient, the mean of their features, so that all of them come back as one picture. Without labels, every class
    with a negative bias gradient counts as present once.
    Departures: those of the decoder (see dosimeter/engines/decoder). Samples are matched to the truth one to one, and PSNR is taken for
    each image; the released code averages the squared error over the batch first.
    """

    needs: ClassVar[frozenset[Knowledge]] = DecodingAttack.needs | {Knowledge.BIAS_GRADIENT}
    quick: ClassVar[dict[str, Any]] = {"width": 32}

    def recover(self, exposure: Exposure, labels: LabelEstimate | None, rng: Generator) -> FeatureEstimate:
        head = find_head(exposure)
        assert head.weight_gradient is not None
        assert head.bias_gradient is not None
        present = (head.bias_gradient < 0).nonzero()[:, 0] if labels is None else labels.labels.to(head.bias_gradient.device)
        if len(present) == 0:
            raise Refused("fgla finds no class with a negative bias gradient; pass labels=")
        features = quotient_features(head.weight_gradient.double(), head.bias_gradient.double(), present)
        usable = features.isfinite().all(1)  # a bias gradient that a defense set to zero has no quotient
        features = torch.where(usable[:, None], features, torch.zeros_like(features))
        missing = int((~usable).sum())
        return FeatureEstimate(
            features=features.to(head.weight.dtype),
            labels=present,
            residual=torch.full_like(features[:, 0], torch.nan),
            certified=torch.zeros_like(present, dtype=torch.bool),
            batch_size=len(present),
            message=f"{missing} of {len(present)} quotients divide by zero and were drawn as the zero feature" if missing else "",
        )
