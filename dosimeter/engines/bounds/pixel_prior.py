"""One sample's pixels as the unknown: the prior from auxiliary samples, and the update's information about them."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import torch
from scipy.stats import f as fisher
from torch import Generator, Tensor, nn

from dosimeter.client.losses import OwnLoss
from dosimeter.engines.bounds.gaussian_prior import fit_gaussian
from dosimeter.engines.bounds.jacobian import Jacobian
from dosimeter.engines.bounds.remaining_error import (
    EXACT_UP_TO,
    Information,
    RemainingError,
    averaged_error,
    jackknife,
    remaining_error,
)
from dosimeter.interfaces import Mechanism
from dosimeter.network.copies import deep_copy
from dosimeter.normalization import from_pixels, to_pixels
from dosimeter.options import first_line
from dosimeter.types import Batch, Refused

LARGEST_JACOBIAN = 2**25  # entries of the whole Jacobian, held in memory at one time
PROVING_POINTS = 16  # draws of the prior from which on their scatter says how far their mean may be off
NOISE_TELLS = "The size of the noise follows the update, and what that size tells is not counted."
STEP_DRAWS = 64  # of the prior, between which the update may move more than its slopes explain
STEP_DOUBT = 1e-3  # the chance that a linear update seems to
NO_VARIANCE = 1e-3  # of the whole update, in units of its noise: so little moves no bound
DRAWS_AT_ONCE = 8
GROUPS = 4  # of the draws, of which the jackknife leaves out one at a time where Lanczos estimates the trace


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
        mechanism = _in_double_precision(mechanism, bound)
        self.inputs, self.normalization = mechanism.client.batch.inputs, mechanism.normalization
        if not bool(auxiliary.inputs.isfinite().all()):
            raise Refused(f"{bound}: auxiliary: has NaN or infinite values")
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
        if self.is_small:
            return averaged_error([self._root(sample, self.inputs[sample])], self.prior)
        return remaining_error(self.information(sample, self.inputs[sample][None]), self.prior, probes=probes, steps=steps, rng=rng)

    def mean_error(self, sample: int, points: Tensor, *, probes: int, steps: int, rng: Generator) -> RemainingError:
        """What remains with the information averaged over pixels `points` (N, d) in the sample's place.

        Few draws make it too large. The jackknife takes that off, and its interval says how far the draws scatter.
        """
        places = from_pixels(points.reshape(-1, *self.inputs.shape[1:]), self.normalization).to(self.inputs)
        if self.is_small:
            return averaged_error([self._root(sample, place) for place in places], self.prior)
        seed = int(torch.randint(0, 2**62, (), generator=rng, device=rng.device))

        def error(chosen: Tensor) -> RemainingError:  # the same random signs for all
            signs = torch.Generator(rng.device).manual_seed(seed)
            return remaining_error(self.information(sample, chosen), self.prior, probes=probes, steps=steps, rng=signs)

        whole = error(places)
        if len(places) == 1:
            return whole
        if len(places) < PROVING_POINTS:
            half = len(places) // 2
            return whole.less(max(error(places[:half]).squared - whole.squared, 0.0) * half / (len(places) - half))
        groups = [torch.arange(len(places)) % GROUPS != left_out for left_out in range(GROUPS)]
        squared, spread = jackknife(whole.squared, [error(places[kept]).squared for kept in groups])
        return replace(whole, squared=min(squared, whole.squared), spread=math.hypot(whole.spread, spread))

    def hides_steps(self, sample: int, rng: Generator) -> bool:
        """Whether the update moves more between inputs of the prior than its slopes there explain, as steep units make it.

        The Poincaré inequality of a Gaussian (Chernoff, "A note on an inequality involving the normal distribution", Annals of Probability
        1981): the variance of each entry u is at most E (∇u · z)², with z drawn from the prior around zero. Where it looks larger, draws of
        the slopes missed the steep places, and with them information.
        """
        shape = self.inputs.shape[1:]
        points = from_pixels(self.prior.draw(STEP_DRAWS, rng).reshape(-1, *shape), self.normalization).to(self.inputs)
        away = (self.slope * (self.prior.draw(STEP_DRAWS, rng) - self.prior.mean)).to(self.inputs).reshape(-1, *shape)
        origin = self.jacobian.sent(sample, points[:1])  # (1, entries)
        total, squared, explained = (torch.zeros_like(origin[0]) for _ in range(3))
        for piece, directions in zip(points.split(DRAWS_AT_ONCE), away.split(DRAWS_AT_ONCE)):
            explained += self.jacobian.pushed(sample, piece, directions).square().sum(0)
            moved = self.jacobian.sent(sample, piece) - origin
            total, squared = total + moved.sum(0), squared + moved.square().sum(0)
        variance, explained = (squared - total.square() / STEP_DRAWS) / (STEP_DRAWS - 1), explained / STEP_DRAWS
        largest_ratio = float(fisher.isf(STEP_DOUBT / len(variance), STEP_DRAWS - 1, STEP_DRAWS))
        return bool((variance > (largest_ratio * explained).clamp(min=NO_VARIANCE / len(variance))).any())

    @property
    def is_small(self) -> bool:
        """Whether the whole Jacobian is formed."""
        return self.size <= EXACT_UP_TO and self.size * self.jacobian.entries <= LARGEST_JACOBIAN

    def _root(self, sample: int, place: Tensor) -> Tensor:
        """G (d, d) with GᵀG the information at `place` (*shape) in the prior's units."""
        unit = torch.eye(self.size, dtype=torch.float64, device=self.prior.mean.device)
        directions = (self.slope * self.prior.root(unit)).to(self.inputs).reshape(-1, *self.inputs.shape[1:])
        return torch.linalg.qr(self.jacobian.columns(sample, place, directions).to(torch.float64).T, mode="r").R

    def information(self, sample: int, places: Tensor) -> Information:
        """The mean Fisher information about the pixels at `places` (N, *shape)."""

        def product(vectors: Tensor) -> Tensor:  # (n, d)
            directions = (self.slope * vectors).to(self.inputs).reshape(-1, *self.inputs.shape[1:])
            repeated = places.repeat(len(directions), *[1] * (places.ndim - 1))
            found = self.jacobian.normal(sample, repeated, directions.repeat_interleave(len(places), 0))
            return self.slope * found.reshape(len(directions), len(places), -1).to(torch.float64).mean(1)

        return product


def _in_double_precision(mechanism: Mechanism, bound: str) -> Mechanism:
    """The same computation in float64: in float32, the rounding of JᵀJ would hide nothing that the rounding of the update hides."""
    client = mechanism.client
    batch = Batch(client.batch.inputs.double(), client.batch.targets)
    if client.batch.targets.is_floating_point():
        batch = Batch(batch.inputs, batch.targets.double())
    loss = copy.deepcopy(client.loss)
    if isinstance(loss, OwnLoss) and isinstance(loss.function, nn.Module):
        loss.function.double()  # its weights
    client = replace(client, model=deep_copy(client.model).double(), batch=batch, loss=loss)
    try:
        client.training(deep_copy(client.model), batch.inputs, batch.targets, loss)
    except RuntimeError as error:
        raise Refused(f"{bound} computes in float64, which this model or loss does not take: {first_line(error)}") from error
    return replace(mechanism, client=client)
