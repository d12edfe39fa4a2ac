"""Identification: does a recovered picture pick its original out of a gallery?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from scipy.stats import hypergeom
from torch import Tensor

from dosimeter.interfaces import GalleryMetric
from dosimeter.metrics import check_paired
from dosimeter.metrics.lpips import PerceptualSimilarity, perceptual_distances
from dosimeter.metrics.registration import overlay
from dosimeter.options import PositiveInt
from dosimeter.registry import METRICS


@METRICS.register("identification")
@dataclass(frozen=True, kw_only=True)
class Identification(GalleryMetric):
    """Share of the private pictures that some recovered picture picks out of a gallery of `gallery` pictures.

    Ours. The gallery holds the private pictures and others of their kind, from the auxiliary data. Every recovered picture picks the
    one that is most like it. A private picture that is picked counts as identified. Which picture is whose is not used.
    If the recovered pictures say nothing, the private pictures are any of the gallery: of N pictures each is picked with the
    probability k/N, where k different pictures were picked in all. That is the null: a record holds the number expected by chance, and
    the probability of as many as were identified, from the hypergeometric distribution.
    `correlation` is the likeness at the best shift and mirroring, whatever the brightness and contrast; `lpips` is the perceptual
    distance, which noise and blur mislead. Where fewer auxiliary pictures are at hand the gallery is smaller, and the record says so.
    """

    surface: ClassVar = "inputs"
    higher_is_better: ClassVar[bool] = True
    title: ClassVar[str] = "identified"
    is_share: ClassVar[bool] = True

    gallery: PositiveInt = 100
    likeness: Literal["correlation", "lpips"] = "correlation"

    def __call__(self, recovered: Tensor, truth: Tensor) -> Tensor:
        check_paired(self.name, recovered, truth, dimensions=4)
        return mark_picked(self.picks(recovered, truth, truth[:0]), len(truth)).to(truth.dtype)

    def picks(self, recovered: Tensor, truth: Tensor, others: Tensor) -> Tensor:
        """The gallery's pictures that are picked, each once; below B they are private: (k,)."""
        gallery = torch.cat([truth, others[: self.size(len(truth), len(others)) - len(truth)]]).to(recovered)
        if self.likeness == "lpips":
            return perceptual_distances(recovered.clamp(0, 1), gallery).argmin(1).unique()
        return overlay(recovered, gallery).correlation.argmax(1).unique()

    def size(self, private: int, others: int) -> int:
        """The gallery's size: `gallery`, but at least twice the batch, as far as the auxiliary pictures reach."""
        return min(max(self.gallery, 2 * private), private + others)

    def unavailable(self, shape: tuple[int, ...] | None = None) -> str | None:
        if shape is not None and (len(shape) != 3 or min(shape[1:]) < 4):
            return f"needs pictures of at least 4×4 pixels, got samples of shape {shape}"
        return PerceptualSimilarity().unavailable(shape) if self.likeness == "lpips" else None


def mark_picked(picked: Tensor, private: int) -> Tensor:
    """1 for each private picture that is picked, 0 for the others: (B,)."""
    return torch.isin(torch.arange(private, device=picked.device), picked).to(torch.float64)


def probability_by_chance(identified: int, picked: int, private: int, gallery: int) -> float:
    """The probability that at least `identified` of `picked` pictures are private, where `private` of `gallery` pictures are."""
    return float(hypergeom.sf(identified - 1, gallery, private, picked))
