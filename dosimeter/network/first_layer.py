"""Weights and biases of layers on the raw input, proved on probes, whatever the rest of the network is."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dosimeter.linear_fit import linear_fit
from dosimeter.network.probing import forward, output_of, random_states, random_states_restored, record_arrivals
from dosimeter.randomness import generator

PROBES = 8
DECADES = 3  # probes hold numbers from 10^-3 to 10^3, so that a model that cuts its inputs shows it
GRAYS = (0.1, 0.9)  # samples of one value each: a model may treat dark and bright ones apart
TOLERANCE = 1e-4  # relative residual up to which gradients have a first layer's form
ROUNDINGS = 16  # units in the last place: the tolerance where it is coarser


def find_first_layers(model: nn.Module, input_shape: tuple[int, ...]) -> list[tuple[str, str]]:
    """Names of each weight (k, *) and bias (k,) of a layer W x + b on the flattened input; none where no layer is such.

    The proof: on n probes X (n, d) their gradients are Δᵀ X and Δᵀ 1 with the same Δ (n, k), which least squares finds. It covers
    modules, kernels as large as the input and bare parameters, in any mode. It fails where the weight is used twice, or where the
    input is changed before it. Means of several samples pass this test: so the layer must also receive each sample as it is.
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
        found += [(weight, bias) for bias in same[:1] if _takes_samples(model, weight, input_shape)]
    return found


def receives_raw_input(model: nn.Module, layer: str, input_shape: tuple[int, ...]) -> bool:
    """Whether the layer receives each sample once and as it is, in the model's own mode, and no random number is drawn before.

    Probes are pixels, numbers of all sizes, and samples of one value.
    """
    for probes in (raw_probes(model, input_shape), raw_probes(model, input_shape)[:PROBES]):
        try:
            arrivals = record_arrivals(model, probes, lambda name, _: name == layer)
        except Exception:  # a model may refuse numbers outside of its range; pixels are left
            continue
        return len(arrivals) == 1 and not arrivals[0].drawn and _same_samples(arrivals[0].received, probes)
    return False


def raw_probes(model: nn.Module, input_shape: tuple[int, ...]) -> Tensor:
    """Samples (n, *shape) that show what a model does to its inputs: the first `PROBES` are pixels."""
    rng = generator(0, "raw input probes")
    pixels = torch.rand(PROBES, *input_shape, generator=rng)
    sizes = 10 ** (DECADES * (2 * torch.rand(PROBES, *input_shape, generator=rng) - 1))
    signs = torch.rand(sizes.shape, generator=rng).sub(0.5).sign()
    grays = torch.tensor(GRAYS).reshape(-1, *[1] * len(input_shape)).expand(-1, *input_shape)
    return torch.cat([pixels, signs * sizes, grays]).to(next(model.parameters()))


def _takes_samples(model: nn.Module, weight: str, input_shape: tuple[int, ...]) -> bool:
    layer = weight.rpartition(".")[0]
    if isinstance(model.get_submodule(layer), nn.Linear | nn.modules.conv._ConvNd):
        return receives_raw_input(model, layer, input_shape)
    return _bare_weight_takes_samples(model, weight, input_shape)


def _bare_weight_takes_samples(model: nn.Module, weight: str, input_shape: tuple[int, ...]) -> bool:
    """The same of a weight that no module calls: one output's gradient holds its sample alone, and nothing is drawn in the whole pass.

    Batch norm in train mode joins the samples, so that nothing is shown there.
    """
    for probes in (raw_probes(model, input_shape), raw_probes(model, input_shape)[PROBES:]):
        gradient = _gradients(model, probes, [weight], outputs=1)[weight].flatten(1)
        sample = probes[:1].flatten(1).double()
        missed = gradient - gradient @ sample.T @ sample / sample.square().sum()
        if not bool(gradient.any()) or not float(missed.norm()) <= TOLERANCE * float(gradient.norm()):
            return False
    with random_states_restored() as before:
        output_of(model, probes)
        return random_states() == before


def _same_samples(received: object, probes: Tensor) -> bool:
    return isinstance(received, Tensor) and received.numel() == probes.numel() and torch.equal(received.flatten(1), probes.flatten(1))


def _gradients(model: nn.Module, inputs: Tensor, names: list[str], *, outputs: int | None = None) -> dict[str, Tensor]:
    """The gradients of a random combination of the (first) outputs, in float64; the model and all random states stay as they are."""
    chosen = {name: model.get_parameter(name).detach().clone().requires_grad_() for name in names}
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    with torch.enable_grad(), random_states_restored():
        output = forward(model, chosen | buffers, inputs)[:outputs]
        slopes = torch.randn(output.shape, generator=generator(0, "first layer slopes")).to(output)
        found = torch.autograd.grad(output, list(chosen.values()), slopes, allow_unused=True)
    return {name: torch.zeros_like(p).double() if g is None else g.double() for (name, p), g in zip(chosen.items(), found, strict=True)}


def _close(one: Tensor, other: Tensor, allowed: Tensor) -> bool:
    return bool(((one - other).norm() <= allowed.norm()).item())
