"""Rows of a layer that takes the whole input and whose gradient would be one sample's (trap weights)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from dosimeter.inspection.sent import Sent

DOMINATED = 0.99  # share of a row's gradient from which it is one sample's
FEWEST = 8  # samples, and rows that get a gradient: with fewer, honest rows are often one sample's


def measure(sent: Sent) -> tuple[float, str] | None:
    """The share of rows of a linear layer on the raw input whose gradient comes from one sample; needs the client's data."""
    flat = sent.inputs.flatten(1)
    layer = next((one for one in sent.hidden if one.received.shape == flat.shape and torch.equal(one.received, flat)), None)
    if layer is None or sent.targets is None or len(flat) < FEWEST or sent.logits.shape[1] < 2:
        return None
    caught: list[Tensor] = []
    module = sent.model.get_submodule(layer.name)
    hook = module.register_forward_hook(lambda _, __, z: caught.append(z))  # pyright: ignore[reportArgumentType]
    try:
        with torch.enable_grad():
            loss = cross_entropy(sent.model(sent.inputs.requires_grad_()), sent.targets)
            slope = torch.autograd.grad(loss, caught[0])[0].abs()  # (B, k)
    finally:
        hook.remove()
        sent.inputs.requires_grad_(False)
    total = slope.sum(0)
    shown = total > 1e-6 * total.max()
    if int(shown.sum()) < FEWEST:
        return None
    share = float((slope.amax(0)[shown] >= DOMINATED * total[shown]).double().mean())
    return share, f"{share:.1%} of the rows of {layer.name!r} would get their gradient from one of your {len(flat)} samples alone"
