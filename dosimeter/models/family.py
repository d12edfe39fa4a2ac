"""What several architectures share: registration of builders, a common network class, and checks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor, nn

from dosimeter.options import mismatch
from dosimeter.registry import MODELS

Builder = TypeVar("Builder", bound=Callable[..., Any])


class ConvolutionalNetwork(nn.Module):
    """Convolutions, their maps averaged down to `side` x `side`, and linear layers; torchvision's names for the three."""

    def __init__(self, features: nn.Sequential, side: int, classifier: nn.Sequential) -> None:
        super().__init__()
        self.features = features
        self.avgpool = nn.AdaptiveAvgPool2d(side)
        self.classifier = classifier

    def forward(self, inputs: Tensor) -> Tensor:
        return self.classifier(self.avgpool(self.features(inputs)).flatten(1))


def register_member(name: str, description: str) -> Callable[[Builder], Builder]:
    """Register a builder that a family made, under its own name and help text."""

    def decorate(builder: Builder) -> Builder:
        builder.__name__ = builder.__qualname__ = name
        builder.__doc__ = description
        return MODELS.register(name)(builder)

    return decorate


def require_size(size: int, least: int) -> None:
    """Refuse inputs that the pooling would shrink to nothing."""
    if size < least:
        raise mismatch("size", f"at least {least} pixels", size)


def dropout_layer(probability: float) -> nn.Module:
    """Dropout, or an identity, which draws no random numbers, where the probability is 0."""
    return nn.Dropout(probability) if probability > 0 else nn.Identity()
