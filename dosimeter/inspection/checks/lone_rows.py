"""Rows of a first layer whose gradient would come from one sample alone (trap weights)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from dosimeter.inspection.finding import Measured
from dosimeter.inspection.layer import LinearLayer, rows_of
from dosimeter.inspection.received_model import ReceivedModel
from dosimeter.network.probing import forward, outputs_with

DOMINATED = 0.99  # share of a row's gradient from which on the row shows one sample
FEWEST = 8  # samples, and rows with a gradient: with fewer, honest rows often show one sample
FEWEST_SHOWN = 3  # samples: in a saturated network all rows show the one sample that saturates it least


def measure(received_model: ReceivedModel) -> Measured:
    """The share of rows of a linear layer on the raw input whose gradient comes from one sample. Needs the client's data."""
    if not received_model.on_input:
        return 0.0, "no layer takes the whole input, so that no row's gradient could be one sample"
    if received_model.targets is None:
        return "it needs your data"
    if len(received_model.inputs) < FEWEST or received_model.logits.shape[1] < 2:
        return f"it needs {FEWEST} samples and two classes"
    shares = {layer.name: share for layer in received_model.on_input if (share := _lone_share(_slopes(received_model, layer))) is not None}
    if not shares:
        return f"fewer than {FEWEST} rows get a gradient, or your samples send none"
    name = max(shares, key=lambda key: shares[key])
    return shares[name], f"{shares[name]:.1%} of the rows of {name!r} would get their gradient from one of your samples alone"


def _lone_share(slopes: Tensor) -> float | None:
    """The share, from slopes (B, k). None where too few rows have a gradient, and 0 where all rows show the same one or two samples."""
    total = slopes.sum(0)
    shown = total > 1e-6 * total.max()
    if int(shown.sum()) < FEWEST:
        return None
    lone = shown & (slopes.amax(0) >= DOMINATED * total)
    return float(lone.sum() / shown.sum()) if len(slopes.argmax(0)[lone].unique()) >= FEWEST_SHOWN else 0.0


def _slopes(received_model: ReceivedModel, layer: LinearLayer) -> Tensor:
    """|∂loss / ∂(row · sample)| for each sample and row, up to a factor for each sample: (B, k)."""
    assert received_model.targets is not None
    if not layer.applied:
        return torch.stack([_of_parameter(received_model, layer, i) for i in range(len(received_model.inputs))])
    outputs, products = outputs_with(received_model.model, layer.name, received_model.inputs.detach().requires_grad_())
    return torch.autograd.grad(cross_entropy(outputs, received_model.targets), products)[0].flatten(1).abs()


def _of_parameter(received_model: ReceivedModel, layer: LinearLayer, index: int) -> Tensor:
    """The slopes of one sample (k,) at a weight that no module applies: the norm of each row's gradient over the sample's norm."""
    assert received_model.targets is not None
    weight = received_model.model.get_parameter(layer.parameter).detach().clone().requires_grad_()
    one = slice(index, index + 1)
    with torch.enable_grad():
        outputs = forward(received_model.model, {layer.parameter: weight}, received_model.inputs[one])
        (gradient,) = torch.autograd.grad(cross_entropy(outputs, received_model.targets[one]), weight)
    rows = rows_of(gradient, layer.weight.shape[1])
    assert rows is not None
    return rows.norm(dim=1) / received_model.inputs[index].norm().clamp_min(1e-30)
