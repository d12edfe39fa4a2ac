"""Other clients' batches. What a method recovers from their updates is the foreign null."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from dosimeter.client.checks import count_classes
from dosimeter.randomness import generator
from dosimeter.runs.measurement import AuditedClient
from dosimeter.surfaces.stand_ins import stand_ins_for
from dosimeter.types import Batch, Normalization

FOREIGN_DRAWS = 5  # batches that are tried before a null is given up


def foreign_batches(client: AuditedClient, seed: int) -> Iterator[Batch]:
    """The foreign batch of the client, then others for a method that refuses it or recovers too little from it.

    The others have the private batch's labels, with which the method did run: known labels are no leak of samples. The last two have
    labels that differ as far as there are classes. Their samples are auxiliary ones, or drawn ones where there are too few.
    """
    assert client.foreign is not None
    yield client.foreign
    for draw in range(1, FOREIGN_DRAWS):
        rng = generator(seed, f"foreign batch {draw}")
        samples = other_samples(client.model, client.batch, client.auxiliary or client.reference, client.normalization, rng)
        targets = client.batch.targets.roll(draw, 0)
        yield Batch(samples, _differing_labels(client, targets, rng) if draw >= FOREIGN_DRAWS - 2 and _are_ids(targets) else targets)


def _are_ids(targets: Tensor) -> bool:
    return targets.ndim == 1 and not targets.is_floating_point()


def _differing_labels(client: AuditedClient, targets: Tensor, rng: torch.Generator) -> Tensor:
    """Random labels (B,), none of which occurs twice before all classes do."""
    classes = max(2, count_classes(client.model, torch.zeros_like(client.batch.inputs[:1]).repeat_interleave(2, 0)))
    rounds = -(-len(targets) // classes)
    return torch.cat([torch.randperm(classes, generator=rng) for _ in range(rounds)])[: len(targets)].to(targets)


def other_samples(model: nn.Module, batch: Batch, known: Batch | None, normalization: Normalization, rng: torch.Generator) -> Any:
    """As many samples as the batch has: of the known ones at random, or drawn ones where too few are known."""
    size = len(batch.inputs)
    if known is not None and len(known.inputs) >= size:
        return known.inputs[torch.randperm(len(known.inputs), generator=rng)[:size].to(known.inputs.device)]
    drawn = stand_ins_for(model, batch.inputs, size, normalization, rng)
    return drawn.to(batch.inputs) if isinstance(drawn, Tensor) else drawn
