"""Small classifiers with known features, for the feature recoveries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

import dosimeter as dm
from dosimeter.interfaces import Exposure
from dosimeter.network.head import find_head
from dosimeter.network.probing import input_of
from dosimeter.types import FeatureEstimate


@dataclass(frozen=True)
class Case:
    """An exposure and the truth behind it."""

    exposure: Exposure
    features: Tensor  # (B, H) float64
    labels: Tensor  # (B,)


def perceptron(classes: int, features: int, *, bias: bool, activation: type[nn.Module], dtype: torch.dtype, seed: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = (nn.Linear(64, features), nn.BatchNorm1d(features), activation(), nn.Linear(features, classes, bias=bias))
        return nn.Sequential(*layers).to(dtype)


def case_of(model: nn.Module, inputs: Tensor, labels: Tensor, **options: Any) -> Case:
    exposure = dm.observe(model, dm.Batch(inputs, labels), normalization=dm.Normalization(mean=(0.5,), std=(0.1,)), **options)
    return Case(exposure, input_of(model, find_head(exposure).name, inputs).double(), labels)


@pytest.fixture
def make() -> Callable[..., Case]:
    """(labels, classes, ...) -> a case on random inputs; train mode unless `train=False`."""

    def build(
        labels: list[int] | Tensor | int,
        classes: int = 100,
        features: int = 128,
        *,
        bias: bool = True,
        activation: type[nn.Module] = nn.ReLU,
        dtype: torch.dtype = torch.float32,
        train: bool = True,
        seed: int = 0,
        **options: Any,
    ) -> Case:
        rng = torch.Generator().manual_seed(seed)
        if isinstance(labels, int):
            labels = torch.randint(0, classes, (labels,), generator=rng)
        targets = torch.as_tensor(labels)
        model = perceptron(classes, features, bias=bias, activation=activation, dtype=dtype, seed=seed).train(train)
        return case_of(model, torch.rand(len(targets), 64, generator=rng).to(dtype), targets, **options)

    return build


def errors(found: FeatureEstimate, case: Case) -> Tensor:
    """The relative error of each recovered feature against the true sample of its label that it is assigned to; infinite without one."""
    distance = torch.cdist(found.features.double(), case.features, compute_mode="donot_use_mm_for_euclid_dist")
    relative = distance / torch.linalg.vector_norm(case.features, dim=1)
    relative = torch.where(found.labels[:, None] == case.labels, relative, torch.inf)
    rows, columns = linear_sum_assignment(relative.clamp_max(1e9).numpy())
    result = torch.full((len(found.features),), torch.inf, dtype=torch.float64)
    result[torch.from_numpy(rows)] = relative[rows, columns]
    return result


def false_certificates(found: FeatureEstimate, case: Case) -> int:
    error = errors(found, case)
    assert found.error_bar is not None
    return int((found.certified & ((error > found.error_bar) | (error > 1e-2))).sum())


@pytest.fixture
def error_of() -> Callable[[FeatureEstimate, Case], Tensor]:
    return errors


@pytest.fixture
def false_count() -> Callable[[FeatureEstimate, Case], int]:
    return false_certificates
