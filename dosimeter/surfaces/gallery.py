"""Galleries: a private sample among others of its kind, and whether what was recovered picks it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dosimeter.interfaces import GalleryMetric, Metric
from dosimeter.metrics.identification import Identification, mark_picked, probability_by_chance
from dosimeter.randomness import generator

SIZES = (100, 1_000)  # of the galleries that a record tells of, as far as the auxiliary samples reach
NO_GALLERY = "needs auxiliary samples, among which the private ones are looked for"


def split_metrics(metrics: Mapping[str, Metric]) -> tuple[dict[str, Metric], dict[str, GalleryMetric]]:
    """The metrics of pairs, and those that need a gallery."""
    galleries = {name: metric for name, metric in metrics.items() if isinstance(metric, GalleryMetric)}
    return {name: metric for name, metric in metrics.items() if name not in galleries}, galleries


def draw_decoys(auxiliary: Tensor) -> Tensor:
    """The auxiliary samples in random order, the same for every method and null."""
    return auxiliary[torch.randperm(len(auxiliary), generator=generator(0, "gallery")).to(auxiliary.device)]


def identify(metrics: Mapping[str, GalleryMetric], recovered: Tensor, truth: Tensor, decoys: Tensor) -> dict[str, Tensor]:
    """1 for each private sample that is picked, 0 for the others, by each metric: (B,)."""
    return {name: mark_picked(_picks(metric, recovered, truth, decoys), len(truth)) for name, metric in metrics.items()}


def describe_galleries(metric: Identification, recovered: Tensor, truth: Tensor, decoys: Tensor) -> list[dict[str, Any]]:
    """For each size that the samples reach: how many are identified, how many would be by chance, and the probability of so many."""
    private, described = len(truth), []
    for size in dict.fromkeys((metric.gallery, *(size for size in SIZES if size <= private + len(decoys)))):
        sized = replace(metric, gallery=size)
        picked, reached = _picks(sized, recovered, truth, decoys), sized.size(private, len(decoys))
        identified = int((picked < private).sum())
        described.append(
            {
                "gallery": reached,
                "private": private,
                "identified": identified,
                "by_chance": len(picked) * private / reached,
                "probability": probability_by_chance(identified, len(picked), private, reached),
            }
        )
    return described


def gallery_facts(described: list[dict[str, Any]]) -> list[str]:
    return [
        f"{one['identified']} of {one['private']} private pictures are picked out of a gallery of {one['gallery']:,}, "
        f"{one['by_chance']:.2g} expected by chance (probability {one['probability']:.1g})"
        for one in described
    ]


def _picks(metric: GalleryMetric, recovered: Tensor, truth: Tensor, decoys: Tensor) -> Tensor:
    sound = recovered[recovered.flatten(1).isfinite().all(1)]
    if not len(sound):
        return torch.zeros(0, dtype=torch.long, device=truth.device)
    return metric.picks(sound.to(truth), truth, decoys.to(truth))
