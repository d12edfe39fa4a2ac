"""The squared error that remains when an update with noise is read as well as it can be."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from scipy.stats import t as student
from torch import Generator, Tensor

from dosimeter.engines.bounds.gaussian_prior import GaussianPrior

EXACT_UP_TO = 256  # numbers in an input: up to here the whole matrix is formed
HIDDEN_PROBES = 2  # random signs for the count of hidden directions, which is shown and gates nothing
DEFLATED = 8  # directions of the prior with the largest variance, along which the trace is taken without random signs
NEGLIGIBLE = 1e-9  # relative, of a squared error
EXTRA_PROBES = DEFLATED + HIDDEN_PROBES  # vectors beside the random signs

Information = Callable[[Tensor], Tensor]  # (n, d) -> (n, d): the Fisher information's products with n vectors


@dataclass(frozen=True, kw_only=True)
class RemainingError:
    """tr (F + Λ⁻¹)⁻¹: the mean squared error that remains, summed over the input's numbers, and what the update shows."""

    squared: float  # an estimate that errs downwards, so that no attacker looks worse than it is
    spread: float  # half of its 99 % interval, rounding included; 0 where the trace was taken exactly
    hidden: float  # Σ 1/(1 + λ): the number of directions in which the prior says more than the update
    bits: float  # ½ Σ log₂(1 + λ): the mutual information of update and input, if the update is linear
    size: int  # numbers in the input

    def psnr(self, end: Literal["low", "middle", "high"] = "high") -> float:
        """The mean squared error as a PSNR of values in [0, 1]: the upper end of its interval, its middle or its lower end."""
        squared = self.squared + {"low": self.spread, "middle": 0.0, "high": -self.spread}[end]
        return math.inf if squared <= 0 else 10 * math.log10(self.size / squared)

    def less(self, excess: float) -> RemainingError:
        """The same with `excess` taken off the squared error."""
        return replace(self, squared=max(self.squared - excess, 0.0))


def remaining_error(information: Information, prior: GaussianPrior, *, probes: int = 6, steps: int = 12, rng: Generator) -> RemainingError:
    """tr (F + Λ⁻¹)⁻¹ for the Fisher information F of the update and the prior's covariance Λ.

    Van Trees, "Detection, Estimation, and Modulation Theory" I, 1968, Section 2.4.3: the error covariance of every estimator, biased
    or not, is at least (E F + J)⁻¹. The expectation is over the prior, and J is the prior's own information, Λ⁻¹ for a Gaussian.
    Where the update is linear in the input and the noise is Gaussian, the posterior mean reaches it.

    With A = Λ^½ F Λ^½ the trace is tr M for M = Λ^½ (I + A)⁻¹ Λ^½. Small inputs take it exactly. Else it is Σ uᵀ M u over the directions u
    in which the prior varies most, and Hutchinson's random signs z estimate the rest. `steps` Lanczos steps give each zᵀ M z by Gauss
    quadrature, which never exceeds it: Golub & Meurant, "Matrices, Moments and Quadrature", 1994.
    """
    size, product = len(prior.mean), whitened(information, prior)
    if size <= EXACT_UP_TO:
        return _exact_error(product(torch.eye(size, dtype=torch.float64, device=prior.mean.device)), prior)
    signs = torch.randint(0, 2, (probes, size), generator=rng, device=rng.device).to(prior.mean) * 2 - 1
    widest = prior.directions[:, :DEFLATED]  # (d, k)
    starts = prior.root(torch.cat((widest.T, signs - (signs @ widest) @ widest.T)))
    values, weights = quadrature(product, torch.cat((starts, signs[:HIDDEN_PROBES])), steps)
    inverse, bits = (weights / (1 + values)).sum(1), (weights * torch.log2(1 + values)).sum(1) / 2
    deflated, count = widest.shape[1], len(starts)
    rest, spread = _estimate_rest(inverse[deflated:count], starts[deflated:], prior.variance - float(starts[:deflated].square().sum()))
    return RemainingError(
        squared=float(inverse[:deflated].sum()) + rest,
        spread=spread,
        hidden=float(inverse[count:].mean()),
        bits=float(bits[count:].mean()),
        size=size,
    )


def averaged_error(roots: Sequence[Tensor], prior: GaussianPrior) -> RemainingError:
    """The same, with the information of several inputs averaged and with the interval of this average.

    `roots` are matrices G (m, d) with GᵀG = A, such as Jacobians in the prior's units: they keep what squaring would round away.
    """
    whole = _error_of_root(torch.cat(list(roots)) / math.sqrt(len(roots)), prior)
    if len(roots) == 1:
        return whole
    without = [
        _error_of_root(torch.cat([root for other, root in enumerate(roots) if other != place]) / math.sqrt(len(roots) - 1), prior).squared
        for place in range(len(roots))
    ]
    squared, spread = jackknife(whole.squared, without)
    return replace(whole, squared=min(squared, whole.squared), spread=whole.spread + spread)


def jackknife(whole: float, without: Sequence[float]) -> tuple[float, float]:
    """A function of a mean with its bias taken off, and half of its 99 % interval, from its values without each part of the data.

    Efron & Stein, "The jackknife estimate of variance", Annals of Statistics 1981.
    """
    count = len(without)
    middle = sum(without) / count
    variance = (count - 1) / count * sum((value - middle) ** 2 for value in without)
    return max(count * whole - (count - 1) * middle, 0.0), float(student.ppf(0.995, count - 1)) * math.sqrt(variance)


def whitened(information: Information, prior: GaussianPrior) -> Information:
    """A = Λ^½ F Λ^½ as products with vectors."""

    def product(vectors: Tensor) -> Tensor:
        return prior.root(information(prior.root(vectors)).to(torch.float64))

    return product


def _exact_error(matrix: Tensor, prior: GaussianPrior) -> RemainingError:
    """From A itself, whose own rounding may hide a direction or show one."""
    values, vectors = torch.linalg.eigh((matrix + matrix.T) / 2)
    values = values.clamp(min=0)
    rounding = len(matrix) * torch.finfo(values.dtype).eps * values[-1]
    return _error_along(vectors.T, torch.where(values > rounding, values, 0), values + rounding, prior)


def _error_of_root(root: Tensor, prior: GaussianPrior) -> RemainingError:
    """From G (m, d) with GᵀG = A."""
    missing = root.new_zeros(max(0, root.shape[1] - len(root)), root.shape[1])
    _, values, directions = torch.linalg.svd(torch.cat((root, missing)), full_matrices=False)
    rounding = len(values) * torch.finfo(values.dtype).eps * values[0]
    return _error_along(directions, torch.where(values > rounding, values, 0).square(), (values + rounding).square(), prior)


def _error_along(directions: Tensor, values: Tensor, most: Tensor, prior: GaussianPrior) -> RemainingError:
    """From the eigenvectors of A (rows), its eigenvalues, and the most that these may be."""
    weights = prior.root(directions).square().sum(1)
    shares = 1 / (1 + values)
    squared, spread = float((weights * shares).sum()), float((weights * (shares - 1 / (1 + most))).sum())
    spread = spread if spread > NEGLIGIBLE * squared else 0.0
    return RemainingError(
        squared=squared, spread=spread, hidden=float(shares.sum()), bits=float(-shares.log2().sum() / 2), size=len(values)
    )


def _estimate_rest(found: Tensor, starts: Tensor, prior: float) -> tuple[float, float]:
    """The mean of zᵀ M z over the probes, and half of its 99 % interval.

    Where the update says little, M is nearly Λ, whose trace `prior` is known. Then the difference of both is the steadier estimate.
    """
    if len(found) == 1:
        return float(found[0]), math.inf
    estimates = [found, prior - (starts.square().sum(1) - found)]
    steadiest = min(estimates, key=lambda values: float(values.std()))
    quantile = float(student.ppf(0.995, len(found) - 1))
    return float(steadiest.mean()), quantile * float(steadiest.std()) / math.sqrt(len(found))


def quadrature(product: Information, starts: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Nodes and weights (n, steps) with sᵀ f(A) s ≈ Σ weights · f(nodes) for each row s of `starts` (n, d).

    Lanczos with full reorthogonalisation. For f(λ) = 1/(1 + λ) the sum never exceeds sᵀ f(A) s.
    """
    norms = starts.norm(dim=1).clamp(min=torch.finfo(starts.dtype).tiny)
    basis = (starts / norms[:, None])[:, None]  # (n, k, d)
    steps = min(steps, starts.shape[1])
    tridiagonal = starts.new_zeros(len(starts), steps, steps)
    for step in range(steps):
        following = product(basis[:, -1])
        tridiagonal[:, step, step] = (following * basis[:, -1]).sum(1)
        if step + 1 == steps:
            break
        for _ in range(2):
            following = following - torch.einsum("nk,nkd->nd", torch.einsum("nkd,nd->nk", basis, following), basis)
        length = following.norm(dim=1)
        length = torch.where(length > 1e-12 * tridiagonal[:, 0, 0].abs().clamp(min=1), length, 0)  # 0: the whole space is found
        tridiagonal[:, step, step + 1] = tridiagonal[:, step + 1, step] = length
        following = torch.where(length[:, None] > 0, following / length.clamp(min=torch.finfo(length.dtype).tiny)[:, None], 0)
        basis = torch.cat((basis, following[:, None]), 1)
    values, vectors = torch.linalg.eigh(tridiagonal)
    return values.clamp(min=0), norms.square()[:, None] * vectors[:, 0].square()
