"""The squared error that remains when an update with noise is read as well as it can be."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from dosimeter.engines.bounds.gaussian_prior import GaussianPrior
from dosimeter.engines.bounds.jacobian import SampleJacobian

EXACT_UP_TO = 256  # numbers in an input: up to here the whole matrix is formed
HIDDEN_PROBES = 2  # random signs for the count of hidden directions, which is shown and gates nothing
NORMAL_99 = 2.576  # two-sided quantile of the normal distribution

Information = Callable[[Tensor], Tensor]  # (d,) -> (d,): the Fisher information's product with a vector


@dataclass(frozen=True, kw_only=True)
class RemainingError:
    """tr (F + Λ⁻¹)⁻¹: the mean squared error that remains, summed over the input's numbers, and what the update shows."""

    squared: float  # an estimate that errs downwards, so that an attacker looks no worse than it is
    spread: float  # half of its 99 % interval; 0 where the trace was taken exactly
    hidden: float  # Σ 1/(1 + λ): the number of directions in which the prior says more than the update
    size: int  # numbers in the input
    prior: float  # the squared error without the update

    @property
    def least(self) -> float:
        """The lower end of the interval."""
        return max(self.squared - self.spread, 0.0)

    def psnr(self, span: float = 1.0) -> float:
        """The PSNR that no attacker exceeds on average, for inputs whose values span `span`."""
        return math.inf if self.least <= 0 else 10 * math.log10(span**2 * self.size / self.least)


def remaining_error(information: Information, prior: GaussianPrior, *, probes: int = 8, steps: int = 60, rng: Generator) -> RemainingError:
    """tr (F + Λ⁻¹)⁻¹ for the Fisher information F of the update and the prior's covariance Λ.

    Van Trees, "Detection, Estimation, and Modulation Theory" I, 1968, Section 2.4.3: the error covariance of every estimator, biased or not, is at
    least (E F + J)⁻¹, where the expectation is over the prior and J is the prior's own information, Λ⁻¹ for a Gaussian. Where the update is linear in the input and the
    noise Gaussian, the posterior mean reaches it.

    With A = Λ^½ F Λ^½ the trace is tr Λ^½ (I + A)⁻¹ Λ^½. Small inputs take it exactly. Else Hutchinson's random signs z estimate it,
    and `steps` Lanczos steps give each zᵀ Λ^½ (I + A)⁻¹ Λ^½ z by Gauss quadrature, which never exceeds it: Golub & Meurant, "Matrices, Moments and Quadrature", 1994.
    """
    size = len(prior.mean)

    def whitened(vector: Tensor) -> Tensor:
        return prior.root(information(prior.root(vector)).to(torch.float64))

    if size <= EXACT_UP_TO:
        basis = torch.eye(size, dtype=torch.float64, device=prior.mean.device)
        matrix = torch.stack([whitened(column) for column in basis])
        values, vectors = torch.linalg.eigh((matrix + matrix.T) / 2)
        shares = 1 / (1 + values.clamp(min=0))
        squared = float((prior.root(vectors.T).square().sum(1) * shares).sum())
        return RemainingError(squared=squared, spread=0.0, hidden=float(shares.sum()), size=size, prior=prior.variance)
    signs = torch.randint(0, 2, (probes, size), generator=rng, device=rng.device).to(prior.mean) * 2 - 1
    found = torch.tensor([_inverse_form(whitened, prior.root(sign), steps) for sign in signs], dtype=torch.float64)
    hidden = sum(_inverse_form(whitened, sign, steps) for sign in signs[:HIDDEN_PROBES]) / len(signs[:HIDDEN_PROBES])
    spread = NORMAL_99 * float(found.std()) / math.sqrt(probes) if probes > 1 else math.inf
    return RemainingError(squared=float(found.mean()), spread=spread, hidden=hidden, size=size, prior=prior.variance)


def local_information(jacobian: SampleJacobian) -> Information:
    """F = JᵀJ at the sample's own input."""
    return lambda vector: jacobian.normal(vector.reshape(jacobian.shape)).flatten()


def mean_information(jacobian: SampleJacobian, points: Tensor) -> Information:
    """E F over the inputs `points` (N, *shape) in the sample's place."""
    places = [jacobian.at(point) for point in points]
    return lambda vector: torch.stack([place.normal(vector.reshape(place.shape)).flatten() for place in places]).mean(0)


def _inverse_form(product: Callable[[Tensor], Tensor], start: Tensor, steps: int) -> float:
    """startᵀ (I + A)⁻¹ start from below, by Lanczos with full reorthogonalisation."""
    norm = float(start.norm())
    if norm == 0:
        return 0.0
    basis, diagonal, off = [start / norm], [], []
    for step in range(min(steps, len(start))):
        following = product(basis[-1])
        diagonal.append(float(following @ basis[-1]))
        known = torch.stack(basis)
        for _ in range(2):
            following = following - known.T @ (known @ following)
        length = float(following.norm())
        if length <= 1e-12 * max(1.0, abs(diagonal[0])) or step + 1 == min(steps, len(start)):
            break
        off.append(length)
        basis.append(following / length)
    tridiagonal = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
    for place, value in enumerate(off[: len(diagonal) - 1]):
        tridiagonal[place, place + 1] = tridiagonal[place + 1, place] = value
    values, vectors = torch.linalg.eigh(tridiagonal)
    return norm**2 * float((vectors[0].square() / (1 + values.clamp(min=0))).sum())
