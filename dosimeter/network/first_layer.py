"""Weights and biases of layers on the raw input, proved on probes, whatever the rest of the network is."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dosimeter.linear_fit import linear_fit
from dosimeter.network.probing import forward
from dosimeter.randomness import generator

PROBES = 8
TOLERANCE = 1e-4  # relative residual up to which gradients have a first layer's form
ROUNDINGS = 16  # units in the last place: the tolerance where it is coarser


def find_first_layers(model: nn.Module, input_shape: tuple[int, ...]) -> list[tuple[str, str]]:
    """Names of each weight (k, *) and bias (k,) of a layer W x + b on the flattened input; none where no layer is such.

    The proof: on n probes X (n, d) their gradients are Δᵀ X and Δᵀ 1 with the same Δ (n, k), which least squares finds. It covers
    modules, kernels as large as the input and bare parameters, in any mode. It fails where the weight is used twice, or where the
    input is changed before it.
    """
    parameters = dict(model.named_parameters())
    size = torch.Size(input_shape).numel()
    weights = [name for name, p in parameters.items() if p.ndim >= 2 and p.numel() == len(p) * size]
    biases = [name for name, p in parameters.items() if p.ndim == 1 and len(p) in {len(parameters[weight]) for weight in weights}]
    if not weights or not biases:
        return []
    probes = torch.rand(min(PROBES, size), *input_shape, generator=generator(0, "first layer probes")).to(parameters[weights[0]])
    gradients = _gradients(model, probes, [*weights, *biases])
    flat = probes.flatten(1).double()  # (n, d)
    tolerance = max(TOLERANCE, ROUNDINGS * torch.finfo(probes.dtype).eps)
    found = []
    for weight in weights:
        gradient = gradients[weight].flatten(1)  # (k, d)
        slopes = linear_fit(flat.T, gradient.T)  # (n, k)
        if not bool(gradient.any()) or float((slopes.T @ flat - gradient).norm()) > tolerance * float(gradient.norm()):
            continue
        sums, scale = slopes.sum(0), slopes.abs().sum(0)
        same = [bias for bias in biases if len(gradients[bias]) == len(sums) and _close(gradients[bias], sums, tolerance * scale)]
        found += [(weight, bias) for bias in same[:1]]
    return found


def _gradients(model: nn.Module, inputs: Tensor, names: list[str]) -> dict[str, Tensor]:
    """The gradients of a random combination of the outputs, in float64; the model, its buffers and the random state stay as they are."""
    chosen = {name: model.get_parameter(name).detach().clone().requires_grad_() for name in names}
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    with torch.enable_grad(), torch.random.fork_rng([inputs.device] if inputs.is_cuda else []):
        output = forward(model, chosen | buffers, inputs)
        slopes = torch.randn(output.shape, generator=generator(0, "first layer slopes")).to(output)
        found = torch.autograd.grad(output, list(chosen.values()), slopes, allow_unused=True)
    return {name: torch.zeros_like(p).double() if g is None else g.double() for (name, p), g in zip(chosen.items(), found, strict=True)}


def _close(one: Tensor, other: Tensor, allowed: Tensor) -> bool:
    return bool(((one - other).norm() <= allowed.norm()).item())
