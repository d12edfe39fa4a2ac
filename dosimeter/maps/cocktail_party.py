"""The Cocktail Party Attack: a linear layer's inputs as independent components of its gradient."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from dosimeter.engines.shifts.linear_rows import as_estimate, read_rows, scaled_inputs
from dosimeter.interfaces import Exposure, MapRecovery
from dosimeter.options import PositiveInt
from dosimeter.registry import MAPS
from dosimeter.types import MapEstimate

REST = 1e-10  # change of a direction, one minus its cosine, below which the iteration ends


@MAPS.register("cocktail_party")
@dataclass(frozen=True, kw_only=True)
class CocktailParty(MapRecovery):
    """Takes the samples for independent sources and a linear layer's gradient for their mixtures.

    Kariyappa et al., "Cocktail Party Attack: Breaking Aggregation-Based Privacy in Federated Learning Using Independent Component
    Analysis", ICML 2023. The gradient's row space is whitened, and a rotation makes the components as far from Gaussian as it can. The
    paper reports recognisable images for batches of up to 1,024 samples; components are never exact, since samples are not independent.
    Departures: symmetric FastICA with log cosh (Hyvärinen, IEEE Trans. Neural Networks 1999) in place of gradient descent on the same
    measure, without the paper's total variation and mutual-information terms; the bias gradient gives sign, scale and mean.
    """

    layer: str | None = None  # the linear layer by its name in the model; None: the first one
    iterations: PositiveInt = 400

    def __call__(self, exposure: Exposure, rng: Generator) -> MapEstimate:
        rows = read_rows(exposure, self.layer, self.name)
        centred = rows.right - rows.right.mean(1, keepdim=True)
        _, values, _ = torch.linalg.svd(centred, full_matrices=False)
        left, _, _ = torch.linalg.svd(centred @ centred.T)
        whitener = (left / values).T * centred.shape[1] ** 0.5  # (B, B)
        rotation = _rotate(whitener @ centred, self.iterations, rng)
        mixing = torch.linalg.inv(rotation @ whitener)  # X is Q⁻¹ R up to scale
        return as_estimate(rows, scaled_inputs(rows, mixing), "independent components are estimates: nothing is proved")


def _rotate(white: Tensor, iterations: int, rng: Generator) -> Tensor:
    """The rotation (B, B) of white signals (B, n) whose rows are least Gaussian: w ← E[x g(wᵀx)] − E[g'(wᵀx)] w, then orthonormal."""
    samples, length = white.shape
    rotation = _orthonormal(torch.randn(samples, samples, generator=rng, dtype=white.dtype, device=white.device))
    for _ in range(iterations):
        bent = torch.tanh(rotation @ white)
        updated = _orthonormal(bent @ white.T / length - (1 - bent.square()).mean(1, keepdim=True) * rotation)
        change = 1 - (updated * rotation).sum(1).abs().min()
        rotation = updated
        if float(change) < REST:
            break
    return rotation


def _orthonormal(matrix: Tensor) -> Tensor:
    left, _, right = torch.linalg.svd(matrix)
    return left @ right
