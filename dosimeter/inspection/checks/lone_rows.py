"""Rows of a layer that takes the whole input and whose gradient would be one sample's (trap weights)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from dosimeter.inspection.finding import Measured
from dosimeter.inspection.layer import LinearLayer, rows_of
from dosimeter.inspection.received_model import Sent
from dosimeter.network.probing import outputs_with

DOMINATED = 0.99  # share of a row's gradient from which it is one sample's
FEWEST = 8  # samples, and rows that get a gradient: with fewer, honest rows are often one sample's
SHOWN = 3  # samples: in a network that others saturate, all rows are the one's that saturates it least


def measure(sent: Sent) -> Measured:
    """The share of rows of a linear layer on the raw input whose gradient comes from one sample; needs the client's data."""
    if not sent.on_input:
        return 0.0, "no layer takes the whole input, so that no row's gradient could be one sample"
    if sent.targets is None:
        return "it needs your data"
    if len(sent.inputs) < FEWEST or sent.logits.shape[1] < 2:
        return f"it needs {FEWEST} samples and two classes"
    shares = {layer.name: share for layer in sent.on_input if (share := _lone_share(_slopes(sent, layer))) is not None}
    if not shares:
        return f"fewer than {FEWEST} rows get a gradient, or your samples send none"
    name = max(shares, key=lambda key: shares[key])
    return shares[name], f"{shares[name]:.1%} of the rows of {name!r} would get their gradient from one of your samples alone"


def _lone_share(slopes: Tensor) -> float | None:
    """Of slopes (B, k); None where too few rows have any, and 0 where they all show the same one or two samples."""
    total = slopes.sum(0)
    shown = total > 1e-6 * total.max()
    if int(shown.sum()) < FEWEST:
        return None
    lone = shown & (slopes.amax(0) >= DOMINATED * total)
    return float(lone.sum() / shown.sum()) if len(slopes.argmax(0)[lone].unique()) >= SHOWN else 0.0


def _slopes(sent: Sent, layer: LinearLayer) -> Tensor:
    """How much the loss of each sample depends on each row's product with it, up to a factor for each sample: (B, k)."""
    assert sent.targets is not None
    if not layer.applied:
        return torch.stack([_of_parameter(sent, layer, i) for i in range(len(sent.inputs))])
    outputs, products = outputs_with(sent.model, layer.name, sent.inputs.detach().requires_grad_())
    return torch.autograd.grad(cross_entropy(outputs, sent.targets), products)[0].flatten(1).abs()


def _of_parameter(sent: Sent, layer: LinearLayer, index: int) -> Tensor:
    """The same of one sample (k,) for a weight that no module applies: the norms of its rows' gradients over the sample's."""
    assert sent.targets is not None
    weight = sent.model.get_parameter(layer.parameter).detach().clone().requires_grad_()
    one = slice(index, index + 1)
    with torch.enable_grad():
        outputs = torch.func.functional_call(sent.model, {layer.parameter: weight}, (sent.inputs[one],))
        (gradient,) = torch.autograd.grad(cross_entropy(outputs, sent.targets[one]), weight)
    rows = rows_of(gradient, layer.weight.shape[1])
    assert rows is not None
    return rows.norm(dim=1) / sent.inputs[index].norm().clamp_min(1e-30)
