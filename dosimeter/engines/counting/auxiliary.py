"""The features and gradients of data that the server has: auxiliary samples, or dummies of uniform noise or random tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Generator, Tensor

from dosimeter.interfaces import Exposure, Loss
from dosimeter.network.head import Head
from dosimeter.network.operations import forward_flops
from dosimeter.network.random_texts import random_texts
from dosimeter.network.received import received_by
from dosimeter.normalization import from_pixels
from dosimeter.types import Refused

Source = Literal["available", "auxiliary", "dummy"]
""""available" means auxiliary samples where the threat model grants them, else dummies."""

DUMMIES, FEWEST_DUMMIES = 256, 32  # random samples where there are no auxiliary ones
DUMMY_FLOPS = 3e11  # of all their passes; a model that takes more for one sees fewer of them
CHUNK = 2**22  # logits held at once


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The server's own samples, as the layer `name` receives them."""

    features: Tensor  # (n, H)
    labels: Tensor | None  # (n,), None for dummies


def reference_at(exposure: Exposure, layer: str, source: Source, rng: Generator) -> Reference:
    """Run auxiliary or dummy data through the model, in the client's mode, up to `layer`."""
    inputs, labels = _data(exposure, source, rng)
    size, pieces = exposure.public.batch_size, None
    if exposure.public.train_mode and size:  # batch norm depends on the batch: take the client's batch size
        pieces = max(1, len(inputs) // size)
    try:
        features = received_by(exposure.model, layer, inputs, pieces=pieces)
    except ValueError as error:  # batch norm in train mode takes no single vector
        raise Refused(f"the model in train mode cannot run on batches of {size}, the declared batch size: {error}") from error
    return Reference(features=features, labels=labels)


def logits_in_chunks(head: Head, features: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """(rows, logits of these rows in float64), never more than `CHUNK` numbers at once."""
    step = max(1, CHUNK // head.classes)
    for first in range(0, len(features), step):
        rows = slice(first, first + step)
        yield rows, head.logits(features[rows].double())


def class_gradients(loss: Loss, head: Head, reference: Reference, factor: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Per class j, the mean of ∂ℓ/∂z_j over its own samples and over those of the other classes: (C,), (C,).

    `factor` (n,) weighs each sample's gradient. Every class has the same weight, however many samples it has. A class without
    samples gets the gradient of the mean logits, labelled as that class.
    """
    labels = reference.labels
    assert labels is not None
    per_class = torch.bincount(labels, minlength=head.classes)  # (C,)
    seen = per_class > 0
    if int(seen.sum()) < 2:
        raise Refused("auxiliary: expected samples of at least two classes, got one class")
    weight = 1 / per_class[labels].double()
    if factor is not None:
        weight = weight * factor.double()
    total, own, mean_logits = (torch.zeros(head.classes, dtype=torch.float64, device=labels.device) for _ in range(3))
    for rows, logits in logits_in_chunks(head, reference.features):
        gradients = weight[rows, None] * loss.logit_gradient(logits, labels[rows])  # (rows, C)
        total += gradients.sum(0)
        own.index_add_(0, labels[rows], gradients.gather(1, labels[rows, None])[:, 0])
        mean_logits += logits.sum(0) / len(labels)
    negative = (total - own) / (seen.sum() - seen.double())
    if not bool(seen.all()):
        scale = 1.0 if factor is None else factor.double().mean()
        own = torch.where(seen, own, scale * _own_gradients(loss, mean_logits))
    return own, negative


def _own_gradients(loss: Loss, logits: Tensor) -> Tensor:
    """∂ℓ(z, j)/∂z_j of one sample's logits z (C,), for every label j: (C,)."""
    classes = torch.arange(len(logits), device=logits.device)
    pieces = classes.split(max(1, CHUNK // len(logits)))
    return torch.cat([loss.logit_gradient(logits.expand(len(j), -1), j).gather(1, j[:, None])[:, 0] for j in pieces])


def _data(exposure: Exposure, source: Source, rng: Generator) -> tuple[Any, Tensor | None]:
    if exposure.auxiliary is not None and source != "dummy":
        targets = exposure.auxiliary.targets
        return exposure.auxiliary.inputs, targets.argmax(1) if targets.ndim == 2 else targets
    if source == "auxiliary":
        raise Refused('auxiliary data are not granted here; source="dummy" does without')
    if exposure.public.blank is not None:
        return random_texts(exposure.model, exposure.public.blank, DUMMIES, rng), None
    parameter = next(exposure.model.parameters())
    pixels = torch.rand((_dummies(exposure), *exposure.public.input_shape), generator=rng, device=rng.device)
    return from_pixels(pixels, exposure.public.normalization).to(parameter), None


def _dummies(exposure: Exposure) -> int:
    """How many random samples go through the model: as many as the operations allow, and no fewer than the client's batch."""
    parameter = next(exposure.model.parameters())
    flops = forward_flops(exposure.model, parameter.new_zeros(1, *exposure.public.input_shape))
    allowed = int(DUMMY_FLOPS / flops) if flops else DUMMIES
    return max(min(DUMMIES, allowed), FEWEST_DUMMIES, min(DUMMIES, exposure.public.batch_size or 1))
