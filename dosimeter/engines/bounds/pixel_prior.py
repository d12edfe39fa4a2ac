"""One sample's pixels as the unknown: the prior from auxiliary samples, and the update's information about them."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Generator, Tensor

from dosimeter.engines.bounds.gaussian_prior import fit_gaussian
from dosimeter.engines.bounds.jacobian import Jacobian
from dosimeter.engines.bounds.remaining_error import Information, RemainingError, remaining_error
from dosimeter.interfaces import Mechanism
from dosimeter.network.copies import deep_copy
from dosimeter.normalization import from_pixels, to_pixels
from dosimeter.types import Batch, Refused


class PixelProblem:
    """A mechanism and the Gaussian of auxiliary pixels, in [0, 1]."""

    def __init__(self, mechanism: Mechanism, bound: str) -> None:
        inputs, auxiliary = mechanism.client.batch.inputs, mechanism.auxiliary
        if auxiliary is None or len(auxiliary.inputs) < 2:
            raise Refused(f"{bound} needs auxiliary samples, from which it estimates what an attacker expects")
        if not isinstance(inputs, Tensor):
            raise Refused(f"{bound} needs one tensor of real numbers; this batch has several tensors")
        if not inputs.is_floating_point():
            raise Refused(f"{bound} needs inputs of real numbers; these are {inputs.dtype}")
        if auxiliary.inputs.shape[1:] != inputs.shape[1:]:
            shapes = f"{tuple(inputs.shape[1:])}, got {tuple(auxiliary.inputs.shape[1:])}"
            raise Refused(f"{bound}: auxiliary: expected samples of the private ones' shape {shapes}")
        mechanism = _in_double_precision(mechanism)
        self.inputs, self.normalization = mechanism.client.batch.inputs, mechanism.normalization
        self.prior = fit_gaussian(to_pixels(auxiliary.inputs.double(), mechanism.normalization))
        self.jacobian = Jacobian(mechanism)
        zero = torch.zeros_like(self.inputs[:1])
        self.slope = (from_pixels(zero + 1, mechanism.normalization) - from_pixels(zero, mechanism.normalization)).flatten()  # 1/std

    @property
    def size(self) -> int:
        return len(self.prior.mean)

    @property
    def prior_psnr(self) -> float:
        """The PSNR of the auxiliary mean, without any update."""
        return 10 * math.log10(self.size / self.prior.variance)

    def local_error(self, sample: int, *, probes: int, steps: int, rng: Generator) -> RemainingError:
        """What remains if the update is linear, as it is around the sample's own input."""
        return remaining_error(self.information(sample, self.inputs[sample][None]), self.prior, probes=probes, steps=steps, rng=rng)

    def mean_error(self, sample: int, points: Tensor, *, probes: int, steps: int, rng: Generator) -> RemainingError:
        """What remains with the information averaged over pixels `points` (N, d) in the sample's place."""
        places = from_pixels(points.reshape(-1, *self.inputs.shape[1:]), self.normalization).to(self.inputs)
        return remaining_error(self.information(sample, places), self.prior, probes=probes, steps=steps, rng=rng)

    def information(self, sample: int, places: Tensor) -> Information:
        """The mean Fisher information about the pixels at `places` (N, *shape)."""

        def product(vectors: Tensor) -> Tensor:  # (n, d)
            directions = (self.slope * vectors).to(self.inputs).reshape(-1, *self.inputs.shape[1:])
            repeated = places.repeat(len(directions), *[1] * (places.ndim - 1))
            found = self.jacobian.normal(sample, repeated, directions.repeat_interleave(len(places), 0))
            return self.slope * found.reshape(len(directions), len(places), -1).to(torch.float64).mean(1)

        return product


def _in_double_precision(mechanism: Mechanism) -> Mechanism:
    """The same computation in float64: in float32, the rounding of JᵀJ would hide nothing that the rounding of the update hides."""
    client = mechanism.client
    batch = Batch(client.batch.inputs.double(), client.batch.targets)
    if client.batch.targets.is_floating_point():
        batch = Batch(batch.inputs, batch.targets.double())
    return replace(mechanism, client=replace(client, model=deep_copy(client.model).double(), batch=batch))
