"""A last layer that is no linear module: a kernel of one pixel, bare parameters, a layer on tokens that are averaged."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dosimeter.inspection.layer import LinearLayer
from dosimeter.network.probing import forward
from dosimeter.randomness import generator

TOLERANCE = 1e-3  # relative residual up to which a gradient has the form of a last layer's
SUM_TOLERANCE = 1e-4  # how far from 1 the outputs may sum and still be probabilities
SMALLEST_PROBABILITY = 1e-38  # smaller ones are raised to it before the logarithm


def logits_of(outputs: Tensor) -> Tensor:
    """The outputs (B, C), or their logarithms where they are probabilities: these equal the logits up to a constant per sample."""
    ends_in_softmax = outputs.shape[1] > 1 and bool((outputs >= 0).all()) and bool(((outputs.sum(1) - 1).abs() < SUM_TOLERANCE).all())
    return outputs.clamp_min(SMALLEST_PROBABILITY).log() if ends_in_softmax else outputs


def find_acting_head(model: nn.Module, inputs: Tensor, classes: int) -> LinearLayer | None:
    """The parameter W (C, H) for which every sample's logits are W f + β b plus terms without W and b; None where there is none.

    The proof: let r sum to 0. Then ∂(r · z_i) / ∂W = r f_iᵀ, whatever pools or scales the layer's outputs. The same gradient
    gives the feature f_i. Likewise ∂(r · z_i) / ∂b = β r.
    """
    parameters = dict(model.named_parameters())
    weights = [name for name, p in parameters.items() if p.numel() > classes > 1 and _per_class(p, classes) is not None]
    vectors = [name for name, p in parameters.items() if p.numel() == classes]
    chosen = {name: parameters[name].detach().clone().requires_grad_() for name in (*weights, *vectors)}
    direction = torch.randn(classes, generator=generator(0, "acting head")).to(inputs)
    direction = direction - direction.mean()
    features: dict[str, list[Tensor]] = {name: [] for name in chosen}  # (H,) of each sample, of a vector (1,)
    for one in inputs.split(1):
        with torch.enable_grad():
            along = (logits_of(forward(model, chosen, one)) @ direction).sum()
        if not along.requires_grad or not features:
            return None
        gradients = torch.autograd.grad(along, [chosen[name] for name in features], allow_unused=True)
        found = {name: _feature(g, direction) for name, g in zip(features, gradients, strict=True)}
        features = {name: [*features[name], value] for name, value in found.items() if value is not None}
    heads = {name: torch.stack(features[name]) for name in weights if features.get(name)}
    name = next((name for name in reversed(heads) if bool(heads[name].any())), None)
    if name is None:
        return None
    weight = _per_class(parameters[name].detach(), classes)
    factors = {vector: torch.stack(features[vector]) for vector in vectors if features.get(vector)}  # β of each sample: (B, 1)
    steady = [v for v, f in factors.items() if float(f.max() - f.min()) <= TOLERANCE * float(f.abs().max()) and bool(f.any())]
    bias = sum((factors[vector].mean() * parameters[vector].detach().flatten() for vector in steady), torch.zeros(classes).to(inputs))
    assert weight is not None
    short = name.removesuffix(".weight")
    return LinearLayer(name=short, parameter=name, weight=weight, bias=bias if steady else None, received=heads[name], applied=False)


def _per_class(parameter: Tensor, classes: int) -> Tensor | None:
    """A matrix, or a kernel of one pixel, with a row or a column for each class, as (C, H); None for other parameters."""
    if parameter.ndim < 2 or parameter.numel() != parameter.shape[0] * parameter.shape[1]:
        return None
    matrix = parameter.flatten(1)
    return matrix if len(matrix) == classes else matrix.T if matrix.shape[1] == classes else None


def _feature(gradient: Tensor | None, direction: Tensor) -> Tensor | None:
    """f of a gradient r fᵀ (C, H) or r f (C,): (H,) or (1,); None where the gradient has another form."""
    if gradient is None:
        return None
    matrix = gradient.reshape(-1, 1) if gradient.numel() == len(direction) else _per_class(gradient, len(direction))
    assert matrix is not None
    feature = matrix.T @ direction / direction.square().sum()
    fits = (matrix - direction[:, None] * feature).norm() <= TOLERANCE * matrix.norm()
    return feature if bool(fits) else None
