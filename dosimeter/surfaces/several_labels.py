"""Samples with any number of labels: label vectors of zeros and ones, their counts per class, and what guessing gets of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dosimeter.client.losses import as_distribution
from dosimeter.randomness import generator
from dosimeter.surfaces.assignment import assign
from dosimeter.surfaces.scores import Comparison, Scores, choose_metrics, compare_samples
from dosimeter.types import Evidence, LabelEstimate

GUESSED_BATCHES = 10_000  # drawn for the null, fewer where there are many classes
MOST_SAMPLES, CAPTION = 8, "the labels of each sample"
LARGEST_ERROR = 1e-2  # distance (L1) of a certified label vector from the true one

Chance = Callable[[Tensor, Tensor, Tensor], float]  # of luck: recovered counts, true counts, drawn counts


@dataclass(frozen=True)
class Guesses:
    """Batches in which every sample has each label with the probability that the label has."""

    rates: Tensor  # (C,)
    drawn: Tensor  # (N, C) counts

    @classmethod
    def of(cls, vectors: Tensor, auxiliary: Tensor | None) -> Guesses:
        """By how common each label is in the auxiliary data; without, by how common labels are in the batch, which favours guessing."""
        rates = vectors.mean().expand(vectors.shape[1])
        if auxiliary is not None:
            rates = (auxiliary.sum(0) + 1) / (len(auxiliary) + 2)
        draws = min(GUESSED_BATCHES, max(1_000, 2**24 // vectors.numel()))
        rng = generator(0, "label vector guesses", vectors.device)
        uniform = torch.rand(draws, *vectors.shape, generator=rng, device=vectors.device)
        return cls(rates=rates, drawn=(uniform < rates).sum(1))


def as_class_ids(targets: Tensor) -> Tensor:
    """Targets of a single logit, (B,) or (B, 1) zeros and ones, as class ids (B,); any other targets as they are."""
    single = targets.ndim == 1 or (targets.ndim == 2 and targets.shape[1] == 1)
    if not single or not targets.is_floating_point() or not bool(((targets == 0) | (targets == 1)).all()):
        return targets
    return targets.reshape(-1).long()


def are_vectors(targets: Tensor) -> bool:
    """Whether targets are label vectors of zeros and ones, over several labels: (B, C)."""
    return targets.ndim == 2 and targets.shape[1] > 1 and bool(((targets == 0) | (targets == 1)).all())


def score_several(found: LabelEstimate, comparison: Comparison, chance: Chance) -> Scores:
    """Compare how many samples have each label, and the samples' label vectors where the estimate has them."""
    wanted = comparison.truth.targets.to(found.counts.device, torch.float64)  # (B, C)
    counts = wanted.sum(0).long()
    auxiliary = (
        None if comparison.auxiliary is None else as_distribution(comparison.auxiliary.targets, wanted.shape[1], wanted.dtype).to(wanted)
    )
    guesses = Guesses.of(wanted, auxiliary)
    usable, unavailable = choose_metrics(comparison.metrics, "labels", None)
    by_batch = {name: metric for name, metric in usable.items() if metric.per_batch}
    by_sample = {name: metric for name, metric in usable.items() if not metric.per_batch} if found.soft is not None else {}
    per_metric = {name: metric(found.counts, counts) for name, metric in by_batch.items()}
    null = {name: metric(guesses.drawn, counts.expand_as(guesses.drawn)).mean(0, keepdim=True) for name, metric in by_batch.items()}
    assignment = None
    if found.soft is not None:
        rows = found.soft.to(wanted)
        assignment = assign(rows, wanted, order=1.0)
        per_metric |= compare_samples(by_sample, rows, wanted, assignment)
        null |= {name: metric(guesses.rates.expand_as(wanted), wanted) for name, metric in by_sample.items()}
    details: dict[str, Any] = {"chance": chance(found.counts, counts, guesses.drawn)}
    exposure = comparison.exposure
    replaced = exposure is not None and any(defense.replaces for defense in exposure.public.defenses)
    if not replaced and refutes(found, wanted, counts):
        details["false_certificates"] = 1
    return Scores(
        surface="labels", per_metric=per_metric, nulls={"prior": null}, assignment=assignment, unavailable=unavailable, details=details
    )


def vectors_shown(found: LabelEstimate, truth: Tensor | None) -> Evidence | None:
    """The labels of each sample, as ids, beside those of the private one that is nearest; None where the estimate has no label vectors."""
    if found.soft is None or not are_vectors(found.soft) or (truth is not None and not are_vectors(truth)):
        return None
    if truth is not None and truth.shape[1] != found.soft.shape[1]:
        return None
    rows = found.soft.double()
    if truth is None:
        return Evidence(kind="table", recovered=_named(rows[:MOST_SAMPLES]), caption=CAPTION)
    partners = assign(rows, truth.to(rows), order=1.0)[:MOST_SAMPLES].tolist()
    recovered = {name: _ids(rows[partner]) if partner >= 0 else "none" for name, partner in zip(_named(truth), partners)}
    return Evidence(kind="table", private=_named(truth[:MOST_SAMPLES]), recovered=recovered, caption=CAPTION)


def _named(vectors: Tensor) -> dict[str, str]:
    return {f"sample {i + 1}": _ids(vector) for i, vector in enumerate(vectors)}


def _ids(vector: Tensor) -> str:
    return ", ".join(map(str, vector.nonzero().flatten().tolist())) or "no label"


def refutes(found: LabelEstimate, vectors: Tensor, counts: Tensor) -> bool:
    """Whether the true label vectors (B, C) refute what an estimate proves: a part of its counts, all of them, or the vectors."""
    proved = found.details.get("proved")
    if proved is not None and bool((proved.to(counts) > counts).any()):
        return True
    if not found.certified:
        return False
    if not torch.equal(found.counts, counts):
        return True
    if found.soft is None:
        return False
    rows = found.soft.to(vectors)
    if len(rows) != len(vectors):
        return True
    partners = assign(rows, vectors, order=1.0)
    return bool(((rows[partners] - vectors).abs().sum(1) > LARGEST_ERROR).any())
