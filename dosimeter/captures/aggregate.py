"""Several captures as a server behind secure aggregation sees them: their mean, and no single one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import torch
from torch import Tensor

from dosimeter.captures.capture import Capture, Facts
from dosimeter.client.training import FedSGD
from dosimeter.registry import DEFENSES

# The facts of all clients alike.
SHARED = (
    "kind",
    "before",
    "round",
    "training",
    "loss",
    "defenses",
    "privacy",
    "input_shape",
    "normalization",
    "mode",
)  # of all clients alike


def aggregate(captures: Sequence[Capture]) -> Capture:
    """The mean of several clients' updates of one round, weighted by their numbers of samples, as FedAvg's server has it.

    McMahan et al., AISTATS 2017: Algorithm 1. Bonawitz et al., CCS 2017, hide the single updates and show their sum. Clients with different
    facts, or with different numbers of steps, have no common unit and are refused. What defenses did to each update, such as clipping by
    a factor of its own, is no such defense of the mean: it is declared as `unmodelled`, and nothing is proved.
    """
    if not isinstance(captures, Sequence):
        raise TypeError(f"captures: expected a list of captures, got {type(captures).__name__}")
    if len(captures) < 2 or not all(isinstance(one, Capture) for one in captures):
        raise ValueError(f"captures: expected those of at least two clients, got {len(captures)}")
    first = captures[0]
    for name in SHARED:
        if any(getattr(one, name) != getattr(first, name) for one in captures):
            raise ValueError(f"captures: expected one {name} for all clients, got {[getattr(one, name) for one in captures][:4]}")
    sizes = tuple(one.batch_size for one in captures if one.batch_size is not None)
    if len(sizes) < len(captures):
        raise ValueError("captures: expected the batch_size of every client, since the mean is weighted by it")
    if any(one.update.keys() != first.update.keys() for one in captures) or any(one.clients > 1 for one in captures):
        raise ValueError("captures: expected the same tensors of every client, each of one client alone")
    steps = {(first.training or FedSGD()).local_steps(size) for size in sizes}
    if len(steps) > 1:
        raise ValueError(f"captures: clients took {sorted(steps)} steps, and updates of different numbers of steps have no common unit")
    shares = [size / sum(sizes) for size in sizes]
    update = {name: _mean([one.update[name] for one in captures], shares) for name in first.update}
    known = {each.name: getattr(first, each.name) for each in fields(Facts)}
    alone = first.privacy is not None and first.privacy.declared(1.0)
    if alone or any(defense.side == "update" for defense in first.defenses):
        known["defenses"] = (*first.defenses, DEFENSES.build("unmodelled"))
    together = {
        "privacy": None,  # of a single client
        "client": "+".join(one.client for one in captures)[:128],
        "clients": len(captures),
        "sizes": sizes,
        "batch_size": sum(sizes),
    }
    return replace(Capture(update=update, **known), **together)


def _mean(tensors: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    """The weighted mean in double precision; of whole numbers, such as counters, the largest."""
    if not tensors[0].is_floating_point():
        return torch.stack(list(tensors)).amax(0)
    return torch.stack([tensor.double() * share for tensor, share in zip(tensors, shares)]).sum(0).to(tensors[0].dtype)
