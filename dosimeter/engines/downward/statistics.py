"""A start for inputs behind batch norm in train mode: first the statistics are unknowns of their own.

In train mode a norm divides by the statistics of the batch that it receives. So a faint guess becomes as loud as a picture, and Gauss-
Newton steps from there end in local minima. But the statistics of two batches of pictures hardly differ: those of noise with the spectrum
of photographs, 1 / f, are a tenth off. So the norms get the statistics of such noise, and multiply and add as in eval mode. Inputs and
statistics are found together, whether or not they belong to each other. The inputs are near enough for steps in train mode.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from dosimeter.engines.downward.inversion import MapTargets, invert
from dosimeter.engines.downward.norms import affine_names, given, keeps_statistics, replace_norms
from dosimeter.network.tape import Named, Operation
from dosimeter.normalization import from_pixels
from dosimeter.types import Normalization

NOISE_PICTURES = 64
LIGHT, CONTRAST = 0.47, 0.22  # of photographs, in pixels
SHARED, OWN = 0.9, 0.45  # of the contrast: by all colours, and by each
STEEPNESS = 1.3  # of the spectrum, as a power of the frequency
FAR = 10.0  # bound of the statistics' unknowns: logarithms of scales, and means in units of a deviation


@dataclass(frozen=True, kw_only=True)
class FreeNorm:
    """One batch norm whose statistics are unknowns: z = γ (y − mean) / deviation + β."""

    output: int
    mean: Tensor  # (C,) of the first guess
    deviation: Tensor  # (C,)
    weight: Tensor  # (C,) γ
    bias: Tensor  # (C,) β

    def affine(self, shift: Tensor, logarithm: Tensor) -> tuple[Tensor, Tensor]:
        """What y is multiplied by, and what is added, for statistics that are off by `shift` deviations and e^`logarithm`."""
        scale = self.weight / self.deviation * (-logarithm).exp()
        return scale, self.bias - (self.mean + shift * self.deviation) * scale


def start_in_train_mode(
    targets: MapTargets,
    start: Tensor,
    bounds: tuple[Tensor, Tensor],
    normalization: Normalization,
    rng: Generator,
    *,
    steps: int,
    products: int,
    seconds: float | None,
) -> Tensor:
    """Inputs (B, *shape) near the ones that lead to the maps; `start` where the model has no batch norm in train mode below them."""
    noise = from_pixels(photographic_noise(NOISE_PICTURES, tuple(start.shape[1:]), rng).to(start), normalization)
    norms = _free_norms(targets, noise)
    if not norms:
        return start
    tape, sizes = replace_norms(targets.tape, [one.output for one in norms]), [len(one.mean) for one in norms]
    count = start.numel()

    def residuals(packed: Tensor) -> Tensor:
        unknowns = packed[0, count:].split([size for size in sizes for _ in range(2)])
        tensors = dict(targets.tensors)
        for norm, shift, logarithm in zip(norms, unknowns[::2], unknowns[1::2]):
            tensors |= dict(zip(affine_names(norm.output), norm.affine(shift, logarithm)))
        relaxed = replace(targets, tape=tape, tensors=tensors)
        return relaxed.residuals(packed[0, :count].reshape(start.shape)).reshape(1, -1)

    def packed(inputs: Tensor, unknowns: float) -> Tensor:
        return torch.cat([inputs.expand_as(start).flatten(), start.new_full((2 * sum(sizes),), unknowns)])[None]

    low, high = packed(bounds[0], -FAR), packed(bounds[1], FAR)
    found = invert(residuals, packed(start, 0.0), (low, high), steps=steps, products=products, seconds=seconds)
    return found.inputs[0, :count].reshape(start.shape)


def photographic_noise(count: int, shape: tuple[int, ...], rng: Generator) -> Tensor:
    """Pictures (count, *shape) of noise with the spectrum, the light and the contrast of photographs; plain noise without a grid."""
    if len(shape) != 3:
        return torch.rand((count, *shape), generator=rng, device=rng.device)
    channels, height, width = shape
    down, right = torch.fft.fftfreq(height)[:, None], torch.fft.rfftfreq(width)[None]
    frequency = (down.square() + right.square()).sqrt().clamp_min(1 / max(height, width)).to(rng.device)
    white = torch.randn(count, channels + 1, height, width // 2 + 1, 2, generator=rng, device=rng.device)
    waves = torch.fft.irfft2(torch.view_as_complex(white) / frequency**STEEPNESS, s=(height, width))
    waves = waves / waves.flatten(2).std(2).mean()
    return (LIGHT + CONTRAST * (SHARED * waves[:, :1] + OWN * waves[:, 1:])).clamp(0, 1)


def _free_norms(targets: MapTargets, noise: Tensor) -> list[FreeNorm]:
    """The batch norms in train mode below the maps, with the statistics that the noise has there."""
    tape = targets.tape
    below = tape.ancestors([one.value for one in targets.maps])
    chosen = [one for one in below if one and _in_train_mode(tape.operation(one))]
    if not chosen:
        return []
    with torch.no_grad():
        received = tape.run({0: noise}, targets.tensors, [tape.operation(one).sources[0] for one in chosen])
    found = []
    for output, maps in zip(chosen, received):
        named = given(tape.operation(output))
        variance, mean = torch.var_mean(maps, dim=[0, *range(2, maps.ndim)], correction=0)
        weight, bias = (targets.tensors[one.name] if isinstance(one := named.get(name), Named) else None for name in ("weight", "bias"))
        deviation = (variance + named["eps"]).sqrt()
        found.append(
            FreeNorm(
                output=output,
                mean=mean,
                deviation=deviation,
                weight=torch.ones_like(mean) if weight is None else weight,
                bias=torch.zeros_like(mean) if bias is None else bias,
            )
        )
    return found


def _in_train_mode(operation: Operation) -> bool:
    return operation.function is F.batch_norm and keeps_statistics(operation)
