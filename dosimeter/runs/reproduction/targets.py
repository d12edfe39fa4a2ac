"""A batch in which some samples are the targets of an active attack."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Generator, Tensor

from dosimeter.runs.measurement import AuditedClient, Measurement
from dosimeter.runs.reproduction.tables import Targets
from dosimeter.types import Batch


@dataclass(frozen=True)
class TargetedDraw:
    """The images and labels of a batch, and the positions of the target samples in it."""

    indices: Tensor  # (B,)
    labels: Tensor  # (B,)
    positions: tuple[int, ...]  # of the target samples
    classes: tuple[int, ...]  # of the target samples


def draw_with_targets(labels: Tensor, classes: int, targets: Targets, size: int, rng: Generator) -> TargetedDraw:
    """A batch of `size` whose target samples share one class, or have one class each. All other samples have other classes.

    Where a target class has too few images, images of other classes are relabelled. Where there are too few other images, some
    repeat.
    """
    if not targets.count < size:
        raise ValueError(f"targets.count: expected fewer than the {size} samples of the batch, got {targets.count}")
    if targets.classes == "own":
        wanted = torch.randperm(classes, generator=rng)[: targets.count]
    else:
        wanted = torch.randint(classes, (1,), generator=rng).expand(targets.count)
    order = torch.randperm(len(labels), generator=rng)
    strangers = order[~torch.isin(labels[order], wanted)]
    chosen: list[int] = []
    for target in wanted.tolist():
        candidates = torch.cat([order[labels[order] == target], strangers]).tolist()
        chosen.append(next(index for index in candidates if index not in chosen))
    others = strangers[~torch.isin(strangers, torch.tensor(chosen))]
    missing = size - targets.count
    others = others[torch.randint(len(others), (missing,), generator=rng) if missing > len(others) else slice(missing)]
    indices = torch.cat([torch.tensor(chosen), others])
    own = labels[indices].clone()
    own[: targets.count] = wanted
    mixed = torch.randperm(size, generator=rng)
    positions = (mixed < targets.count).nonzero().flatten()
    return TargetedDraw(indices[mixed], own[mixed], tuple(positions.tolist()), tuple(wanted.unique().tolist()))


def aim_at(measurement: Measurement, classes: tuple[int, ...]) -> Measurement:
    """The measurement, with `classes` as the targets of each method that has targets."""

    def with_targets(method):
        known = {option.name for option in fields(method)} if hasattr(method, "__dataclass_fields__") else set()
        return replace(method, targets=classes) if "targets" in known else method

    return replace(measurement, labels=with_targets(measurement.labels), method=with_targets(measurement.method))


def target_samples(client: AuditedClient) -> AuditedClient:
    """The same client with the target samples alone as its batch. An active attack is scored on them."""
    positions = torch.tensor(client.description["targets"], device=client.batch.inputs.device)
    batch = Batch(client.batch.inputs[positions], client.batch.targets[positions])
    return replace(client, batch=batch, description=client.description | {"targets": list(range(len(positions)))})
