"""Models small enough to know every statistic by hand."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from dosimeter.inspection.received_model import ReceivedModel, receive_model
from dosimeter.types import Batch


def draw_perceptron(hidden: int = 24, classes: int = 10, seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Flatten(), nn.Linear(768, hidden), nn.ReLU(), nn.Linear(hidden, classes)).eval()


@pytest.fixture
def perceptron() -> Callable[..., nn.Sequential]:
    """(hidden, classes, seed) -> an untrained network on images of 3x16x16."""
    return draw_perceptron


@pytest.fixture
def received(data) -> Callable[..., ReceivedModel]:
    """(model, reference, with_data) -> the model as the checks see it, with the client's twelve images or without."""

    def build(model: nn.Module, reference: nn.Module | None = None, *, with_data: bool = True, targets=None) -> ReceivedModel:
        batch = data(16, 3)
        batch = Batch(batch.inputs, batch.targets if targets is None else targets) if with_data else None
        return receive_model(model, batch, reference)

    return build
