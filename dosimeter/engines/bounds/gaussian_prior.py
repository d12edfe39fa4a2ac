"""What an attacker expects of an input before the update arrives: a Gaussian fitted to auxiliary samples."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from dosimeter.types import Refused


@dataclass(frozen=True, kw_only=True)
class GaussianPrior:
    """N(mean, Λ) over inputs flattened to d numbers, in float64."""

    mean: Tensor  # (d,)
    directions: Tensor  # (d, r) orthonormal
    deviations: Tensor  # (r,) standard deviations along the directions
    floor: float  # standard deviation in all other directions

    @property
    def variance(self) -> float:
        """The mean squared error of the best guess without the update, summed over the d numbers."""
        return float(self.deviations.square().sum()) + (len(self.mean) - len(self.deviations)) * self.floor**2

    def root(self, vector: Tensor) -> Tensor:
        """Λ^½ v of vectors (..., d), for the covariance Λ."""
        inside = vector @ self.directions
        return self.floor * vector + (inside * (self.deviations - self.floor)) @ self.directions.T

    def draw(self, count: int, rng: Generator) -> Tensor:
        """(count, d) inputs."""
        noise = torch.randn(count, len(self.mean), generator=rng, dtype=torch.float64, device=rng.device)
        return self.mean + self.root(noise)


def fit_gaussian(samples: Tensor) -> GaussianPrior:
    """The Gaussian of `samples` (N, *shape), its covariance shrunk towards the identity.

    Ledoit & Wolf, "A well-conditioned estimator for large-dimensional covariance matrices", J. Multivariate Analysis 2004: Λ = (1 − ρ) S +
    ρ m I,
    with S the samples' covariance, m the mean of its diagonal, and ρ their estimate of the best share. With fewer samples than numbers, S
    is singular; Λ is not.
    """
    flat = samples.detach().to(torch.float64).flatten(1)
    count, size = flat.shape
    if count < 2:
        raise Refused(f"a prior needs at least 2 auxiliary samples to have a spread; here are {count}")
    mean = flat.mean(0)
    centred = flat - mean
    gram = centred @ centred.T / count  # (N, N); its non-zero eigenvalues are those of S
    scale = float(gram.trace()) / size  # m
    if scale <= 0:
        raise Refused("the auxiliary samples are all the same: no prior can be fitted to them")
    spread = float(gram.square().sum()) / size - scale**2  # d²
    fourth = float(centred.square().sum(1).square().sum()) / count / size
    error = (fourth - float(gram.square().sum()) / size) / count  # b²
    share = min(max(error / spread, 0.0), 1.0) if spread > 0 else 1.0
    _, values, rows = torch.linalg.svd(centred / count**0.5, full_matrices=False)
    live = values > values[0] * 1e-10
    directions, kept = rows[live].T, values[live].square()
    floor = (share * scale) ** 0.5
    return GaussianPrior(mean=mean, directions=directions, deviations=((1 - share) * kept + share * scale).sqrt(), floor=floor)
