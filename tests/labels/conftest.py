"""Small exposures with known labels, for the label recoveries."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dosimeter.client.observe import observe
from dosimeter.interfaces import Exposure, Loss
from dosimeter.types import Batch

DATA = Path(os.environ.get("DOSIMETER_DATA") or Path(__file__).resolve().parents[3] / "shared" / "data")


def perceptron(classes: int, activation: type[nn.Module] = nn.ReLU, features: int = 64, seed: int = 0, bias: bool = True) -> nn.Module:
    """An untrained network with one hidden layer on 32 inputs."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(32, features, bias=bias), activation(), nn.Linear(features, classes, bias=bias)).eval()


def random_inputs(size: int, seed: int = 0) -> Tensor:
    return torch.rand(size, 32, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def inputs() -> Callable[..., Tensor]:
    """(size, seed) -> the inputs that `expose` trains on."""
    return random_inputs


@pytest.fixture
def expose() -> Callable[..., Exposure]:
    """(labels, classes) -> what the server sees of a small network trained on random inputs with these labels."""

    def build(
        labels: list[int] | Tensor,
        classes: int = 10,
        *,
        activation: type[nn.Module] = nn.ReLU,
        loss: Loss | None = None,
        seed: int = 0,
        bias: bool = True,
        declare: bool = True,
        auxiliary_per_class: int = 0,
        model: nn.Module | None = None,
    ) -> Exposure:
        targets = torch.as_tensor(labels)
        auxiliary = None
        if auxiliary_per_class:
            auxiliary = Batch(random_inputs(auxiliary_per_class * classes, seed + 1000), torch.arange(classes).repeat(auxiliary_per_class))
        model = model if model is not None else perceptron(classes, activation, seed=seed, bias=bias)
        return observe(model, Batch(random_inputs(len(targets), seed), targets), loss=loss, auxiliary=auxiliary, declare_batch_size=declare)

    return build


@pytest.fixture
def data_file() -> Callable[[str], Path]:
    """A file of the shared data; skips, saying so, where it is absent."""

    def find(name: str) -> Path:
        path = DATA / name
        if not path.exists():
            pytest.skip(f"{path} is absent")
        return path

    return find


@pytest.fixture
def images(data_file: Callable[[str], Path]) -> Callable[[str], tuple[Tensor, Tensor, Tensor, Tensor]]:
    """A data set's (train images, train labels, test images, test labels), per channel of mean 0 and deviation 1."""

    def load(name: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        arrays = np.load(data_file(f"{name}.npz"))
        train, test = (torch.from_numpy(arrays[f"{part}_images"]).permute(0, 3, 1, 2).float() / 255 for part in ("train", "test"))
        train_labels, test_labels = (torch.from_numpy(arrays[f"{part}_labels"]).long() for part in ("train", "test"))
        mean, deviation = (statistic((0, 2, 3))[:, None, None] for statistic in (train.mean, train.std))
        return (train - mean) / deviation, train_labels, (test - mean) / deviation, test_labels

    return load
