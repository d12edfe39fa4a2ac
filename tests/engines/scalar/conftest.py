"""The head gradient of one sample with a known feature, label and scalar."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from dosimeter.network.head import Head


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A head with one sample's gradient, and the truth behind it."""

    head: Head
    feature: np.ndarray  # (H,)
    probabilities: np.ndarray  # (C,)
    label: np.ndarray  # (C,)
    temperature: float

    @property
    def errors(self) -> np.ndarray:
        """(p − y) / τ, one possible scalar a row: (C,)."""
        return (self.probabilities - self.label) / self.temperature


@pytest.fixture
def sample() -> Callable[..., Sample]:
    """(label, seed, temperature, bias, dtype) -> a random head of 20 features that sees one sample with this label."""

    def draw(label, *, seed: int = 0, temperature: float = 1.0, bias: bool = True, dtype=torch.float64) -> Sample:
        rng = torch.Generator().manual_seed(seed)
        label = torch.as_tensor(label, dtype=torch.float64)
        weight = torch.randn(len(label), 20, generator=rng, dtype=torch.float64) / 3
        offset = 0.1 * torch.randn(len(label), generator=rng, dtype=torch.float64)
        feature = torch.rand(20, generator=rng, dtype=torch.float64)
        probabilities = torch.softmax((weight @ feature + (offset if bias else 0)) / temperature, 0)
        error = (probabilities - label) / temperature
        head = Head(
            name="",
            weight=weight.to(dtype),
            bias=offset.to(dtype) if bias else None,
            weight_gradient=torch.outer(error, feature).to(dtype),
            bias_gradient=error.to(dtype) if bias else None,
            non_negative=True,
            precision=torch.finfo(dtype).eps,
        )
        truth = {"feature": feature.numpy(), "probabilities": probabilities.numpy(), "label": label.numpy()}
        return Sample(head=head, temperature=temperature, **truth)

    return draw
