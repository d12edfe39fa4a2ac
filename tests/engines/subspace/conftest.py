"""Heads with planted samples, in float64, for the modules of the subspace method."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from dosimeter.engines.subspace.equations import Equations, build_equations
from dosimeter.engines.subspace.spectrum import factor


@dataclass(frozen=True, kw_only=True)
class Planted:
    """A head's gradient, and the samples that it was made of."""

    equations: Equations
    gradient: Tensor  # (C, H)
    bias_gradient: Tensor  # (C,)
    features: Tensor  # (B, H)
    labels: Tensor  # (B,)
    t: Tensor  # (B, B) the samples' coordinates

    @property
    def size(self) -> int:
        return len(self.labels)


@pytest.fixture
def plant() -> Callable[..., Planted]:
    """(size, classes, features, ...) -> a head with that many samples; `noise` on the gradient, `bias_known` for the server."""

    def build(
        size: int = 6,
        classes: int = 30,
        features: int = 50,
        *,
        labels: Tensor | None = None,
        soft: Tensor | None = None,
        noise: float = 0.0,
        scale: float = 1.0,
        bias_known: bool = False,
        seed: int = 0,
    ) -> Planted:
        rng = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=rng, dtype=torch.float64)

        weight, bias = draw(classes, features) / math.sqrt(3 * features), draw(classes) / math.sqrt(features)
        f = torch.relu(draw(features) + draw(size, features))
        labels = torch.randint(0, classes, (size,), generator=rng) if labels is None else labels
        error = torch.softmax(f @ weight.T + bias, 1) - (one_hot(labels, classes) if soft is None else soft)
        gradient = scale * error.T @ f / size + noise * draw(classes, features)
        bias_gradient = scale * error.mean(0)
        spectrum = factor(gradient, 1e-16, rng, at_most=size)
        equations = build_equations(spectrum, weight, bias, model_unit=2e-16, bias_gradient=bias_gradient if bias_known else None)
        t = f @ spectrum.right.T / spectrum.values
        return Planted(equations=equations, gradient=gradient, bias_gradient=bias_gradient, features=f, labels=labels, t=t)

    return build


@pytest.fixture
def distance_to() -> Callable[[Tensor, Tensor], Tensor]:
    """(n, H) found and (B, H) true features -> each found feature's relative distance to the nearest true one."""

    def measure(found: Tensor, truth: Tensor) -> Tensor:
        distance = torch.cdist(found, truth, compute_mode="donot_use_mm_for_euclid_dist").min(1).values
        return distance / torch.linalg.vector_norm(found, dim=1)

    return measure
