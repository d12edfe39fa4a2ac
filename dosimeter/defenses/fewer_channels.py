"""A model with fewer channels."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import torch
from torch import Generator, Tensor, nn

from dosimeter.interfaces import Client, Defense
from dosimeter.network.head import locate_head
from dosimeter.network.probing import change_output
from dosimeter.options import Constraint
from dosimeter.registry import DEFENSES
from dosimeter.types import Encoding, Refused

Share = Annotated[float, Constraint("a number in (0, 1]", lambda value: 0 < value <= 1)]
CHANNELLED = (nn.modules.conv._ConvNd, nn.modules.batchnorm._BatchNorm)


@DEFENSES.register("fewer_channels")
@dataclass(frozen=True, kw_only=True)
class FewerChannels(Defense):
    """Trains only the first part of every convolution's channels.

    Zhu & Blaschko, "R-GAP: Recursive Gradient Attack on Privacy", ICLR 2021 (thesis Table 2.2, Architecture): fewer filters give
    fewer equations for the input. Of n channels the first ⌈kept · n⌉ stay.
    Departure: the other channels are set to zero rather than removed, so that shapes stay the same in any architecture. The
    output of such a channel, and of a batch norm behind it, is zero, and so are its gradients. The rest of the update is that
    of the smaller model. Group and layer norms still count the zeros.
    """

    side: ClassVar = "model"
    promise: ClassVar[str] = "nothing: there are fewer gradients, each as exact as before, and the head's are not touched"
    breaks: ClassVar[str] = "the accuracy of a trained model, until it is trained on; what a narrower model cannot learn"

    kept: Share = 0.5

    def distorts(self) -> bool:
        return False

    def encoding(self, before: Encoding) -> Encoding:
        return replace(before, sparse=before.sparse or self.kept < 1)

    def __call__(self, client: Client, rng: Generator) -> Client:
        if self.kept == 1:
            return client
        locate_head(client.model, tuple(client.batch.inputs.shape[1:]), client.loss.shift_invariant)  # else channels may be classes
        model = copy.deepcopy(client.model)
        if not any(isinstance(module, nn.modules.conv._ConvNd) for module in model.modules()):
            raise Refused("fewer_channels needs convolutions, and this model has none")
        for module in model.modules():
            if isinstance(module, CHANNELLED):
                change_output(module, _ShutChannels(kept=self.kept))
        return replace(client, model=model)


@dataclass(frozen=True, kw_only=True)
class _ShutChannels:
    """A hook behind a layer; an object and not a closure, so that the model can be copied and pickled."""

    kept: float

    def __call__(self, layer: nn.Module, received: tuple[Any, ...], given: Tensor) -> Tensor:
        """(B, channels, ...) -> the same with the last channels at zero. Outputs (B, features) are left alone."""
        if given.ndim < 3:
            return given
        channels = given.shape[1]
        stays = torch.arange(channels, device=given.device) < math.ceil(self.kept * channels - 1e-9)
        return given * stays.to(given).view(-1, *[1] * (given.ndim - 2))
