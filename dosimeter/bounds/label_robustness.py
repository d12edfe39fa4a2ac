"""The agreement with a batch's labels that no attacker exceeds behind clipping and Gaussian noise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Generator

from dosimeter.client.checks import count_classes
from dosimeter.engines.bounds.label_chance import best_blind_agreement
from dosimeter.engines.bounds.reconstruction_robustness import success_bound
from dosimeter.interfaces import Bound, Mechanism
from dosimeter.network.copies import deep_copy
from dosimeter.registry import BOUNDS
from dosimeter.types import Ceiling, Refused


@BOUNDS.register("label_robustness")
@dataclass(frozen=True, kw_only=True)
class LabelRobustness(Bound):
    """Limits the mean agreement with a batch's labels (InsAcc) of any attacker who knows how common each class is.

    Hayes, Mahloujifar & Balle, "Bounding Training Data Reconstruction in DP-SGD", NeurIPS 2023: Theorem 2, with all labels of the batch as
    the secret. The chance without the update is the best guess by class frequencies of auxiliary samples, or by uniform ones. The whole
    batch moves the sum of clipped gradients by up to its size times the clipping norm.
    Departure: the success is a share in [0, 1], not an event. The trade-off function is concave, so the theorem holds for means of shares.
    """

    surface: ClassVar[str] = "labels"
    metric: ClassVar[str] = "insacc"

    def __call__(self, mechanism: Mechanism, rng: Generator) -> Ceiling:
        client, known = mechanism.client, mechanism.noise_multipliers
        size, targets = len(client.batch.targets), client.batch.targets
        if not known:
            raise Refused("label_robustness needs Gaussian noise on a clipped update: dpsgd, or clipping by norm before gaussian_noise")
        if targets.ndim != 1 or targets.is_floating_point():
            raise Refused("label_robustness needs one class a sample; these targets are of another kind")
        classes = max(2, count_classes(deep_copy(client.model), client.batch.inputs[[0, 0]]))
        told = None if mechanism.auxiliary is None else mechanism.auxiliary.targets.cpu()
        if told is not None and (told.ndim != 1 or told.is_floating_point()):
            told = None
        if told is not None and not bool(((told >= 0) & (told < classes)).all()):
            raise Refused(f"label_robustness: auxiliary: expected classes from 0 to {classes - 1}, as the model has outputs")
        counts = torch.zeros(classes) if told is None else torch.bincount(told, minlength=classes)
        frequencies = (counts.double() + 1) / (counts.double() + 1).sum()
        chance = best_blind_agreement(frequencies, size)
        multiplier = max(known["sample"] / size if "sample" in known else 0.0, known.get("client", 0.0))
        bound = success_bound(noise_multiplier=multiplier, chance=chance)
        drawn = "as often as in the auxiliary samples and one more of each class" if told is not None else "all classes alike"
        return Ceiling(
            bound=self.name,
            surface=self.surface,
            metric=self.metric,
            values=torch.full((size,), bound.high, dtype=torch.float64),
            proved=True,
            assumptions=(
                f"Labels are drawn independently, {drawn}.",
                "Without the update, the attacker knows no more of the labels.",
                "The value is a mean over labels and noise; one batch may show more.",
                "The update is sent once.",
            ),
            details={"chance": chance, "noise_multiplier": multiplier},
        )
