"""Models of which a dishonest server sends each client another copy."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from dosimeter.network.copies import deep_copy

DEAD = -1.0  # the bias of a layer whose weights are zero: a ReLU behind it neither answers nor has a slope


class SentPerClient(nn.Module, ABC):
    """A model that every client gets another copy of. Its own weights are those of one client."""

    @abstractmethod
    def of_client(self, number: int) -> nn.Module:
        """What the client of this number is sent."""


class PerClient(SentPerClient):
    """The body for one client, and a copy whose `silenced` layers are dead for every other client."""

    def __init__(self, body: nn.Module, target: int, silenced: tuple[str, ...]) -> None:
        super().__init__()
        self.body, self.target, self.silenced = body, target, silenced

    def forward(self, inputs: Tensor) -> Tensor:
        return self.body(inputs)

    def of_client(self, number: int) -> nn.Module:
        if number == self.target:
            return self
        other = copy.deepcopy(self)
        other.body = silence(other.body, self.silenced)
        return other


def silence(model: nn.Module, layers: tuple[str, ...]) -> nn.Module:
    """A copy in which these layers answer `DEAD` to everything, or 0 without a bias."""
    model = deep_copy(model)
    with torch.no_grad():
        for name in layers:
            for key, parameter in model.get_submodule(name).named_parameters(recurse=False):
                parameter.fill_(DEAD if "bias" in key else 0.0)
    return model


def of_client(model: nn.Module, number: int) -> nn.Module:
    """The model as one client is sent it."""
    return model.of_client(number) if isinstance(model, SentPerClient) else model
