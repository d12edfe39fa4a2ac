"""RGLA's estimate of a batch's loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Generator
from torch.nn.functional import cross_entropy

from dosimeter.runs.measurement import AuditedClient
from dosimeter.runs.reproduction.studies.last_layer import last_layer
from dosimeter.runs.reproduction.studies.study import STUDIES, Study


@STUDIES.register("loss_estimate")
@dataclass(frozen=True, kw_only=True)
class LossEstimate(Study):
    """How far Proposition 2's estimate of the loss is from the loss.

    "RGLA: Reverse Gradient Leakage Attack using Inverted Cross-Entropy Loss Function": Proposition 2, Appendix A.3, Table 5. Squared,
    since a batch whose samples are all predicted surely has the error (ln B)² if its labels differ, as in the last line of Table 5.
    `estimate_above_loss` is the estimate minus the loss. Jensen's inequality makes it large where samples differ.
    """

    quantities: ClassVar = {"loss_estimate_error": True, "estimate_above_loss": False, "batch_accuracy": False}

    def __call__(self, client: AuditedClient, rng: Generator) -> dict[str, float | None]:
        head = last_layer(client)
        counts = torch.bincount(head.labels, minlength=len(head.weight))  # (C,) λ
        shares = head.errors.mean(0) + counts / len(head.labels)  # (C,) ∇b + λ/B
        estimate = -float(shares[head.labels].log().mean())
        loss = float(cross_entropy(head.logits, head.labels))
        return {
            "loss_estimate_error": (estimate - loss) ** 2,
            "estimate_above_loss": estimate - loss,
            "batch_accuracy": float((head.logits.argmax(1) == head.labels).double().mean()),
        }
