"""Label smoothing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Generator

from dosimeter.client.checks import check_batch
from dosimeter.client.losses import CrossEntropy, Smoothing
from dosimeter.interfaces import Client, Defense
from dosimeter.options import Fraction
from dosimeter.registry import DEFENSES
from dosimeter.types import Batch, ProtectedUnit


@DEFENSES.register("label_smoothing")
@dataclass(frozen=True, kw_only=True)
class LabelSmoothing(Defense):
    """Trains towards softened labels.

    Szegedy et al., "Rethinking the Inception Architecture for Computer Vision", CVPR 2016; soft-labels Section 2, thesis chapter 3.
    Plain cross-entropy takes the smoothing as its own option, so that the server, which knows the loss, replays it exactly.
    Any other loss gets softened targets. `convention` is that of the cross-entropy loss.
    """

    side: ClassVar = "data"
    replaces: ClassVar[bool] = False  # a smoothed label still has its class on top
    voids: ClassVar[frozenset[ProtectedUnit]] = frozenset()  # each label is smoothed by itself
    promise: ClassVar[str] = "nothing: the smoothing is public, and the largest entry is still the label"
    breaks: ClassVar[str] = "little: calibration changes, accuracy often gains"

    smoothing: Fraction
    convention: Smoothing = "pytorch"

    def distorts(self) -> bool:
        return False

    def __call__(self, client: Client, rng: Generator) -> Client:
        if self.smoothing == 0:
            return client
        if isinstance(client.loss, CrossEntropy) and client.loss.smoothing == 0:
            return replace(client, loss=replace(client.loss, smoothing=self.smoothing, convention=self.convention))
        classes = check_batch(client.model, client.batch, "batch")
        smooth = CrossEntropy(smoothing=self.smoothing, convention=self.convention).smooth_targets
        return replace(client, batch=Batch(client.batch.inputs, smooth(client.batch.targets, classes, client.batch.inputs.dtype)))
