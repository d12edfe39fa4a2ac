"""PRECODE: a variational bottleneck before the classifier."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from typing import ClassVar, cast

import torch
from torch import Generator, Tensor, nn

from dosimeter.interfaces import Client, Defense
from dosimeter.network.head import locate_head
from dosimeter.options import PositiveInt
from dosimeter.registry import DEFENSES
from dosimeter.types import Refused


@DEFENSES.register("precode")
@dataclass(frozen=True, kw_only=True)
class Precode(Defense):
    """Puts a random bottleneck before the classifier, so that the gradients of one batch differ from pass to pass.

    Scheliga, Mäder & Seeland, "PRECODE: A Generic Model Extension to Prevent Deep Gradient Leakage", WACV 2022: the features h
    are encoded as a mean and a log-variance of `width` dimensions, z = μ + σ ε is drawn, and a decoder maps z to the classifier.
    Departure: the KL term of the paper's loss (its β) is left out, since a loss here sees logits alone. The term keeps σ from
    shrinking over a training run and hardly changes the gradient of one round. In eval mode z = μ.
    """

    side: ClassVar = "model"
    promise: ClassVar[str] = "nothing: Balunović et al. (ICLR 2022) and later work attack it by drawing ε along"
    breaks: ClassVar[str] = "a trained model: the bottleneck starts untrained, so it must be there from the first round"

    width: PositiveInt = 256

    def distorts(self) -> bool:
        return False

    def __call__(self, client: Client, rng: Generator) -> Client:
        if not client.model.training:
            raise Refused("precode draws its bottleneck in train mode only, and this client trains in eval mode: call model.train() first")
        name, _ = locate_head(client.model, tuple(client.batch.inputs.shape[1:]), client.loss.shift_invariant)
        model = copy.deepcopy(client.model)
        head = model.get_submodule(name)
        extended = BottleneckedHead(VariationalBottleneck(cast(Tensor, head.weight), self.width, rng), head)
        if not name:
            return replace(client, model=extended)
        parent, _, attribute = name.rpartition(".")
        model.get_submodule(parent).add_module(attribute, extended)
        return replace(client, model=model)


class VariationalBottleneck(nn.Module):
    """h -> (μ, log σ²) -> z = μ + σ ε -> ĥ, of the same width as h. In eval mode ε = 0."""

    def __init__(self, like: Tensor, width: int, rng: Generator) -> None:
        super().__init__()
        features = like.shape[1]
        self.encoder = _linear(features, 2 * width, like, rng)
        self.decoder = _linear(width, features, like, rng)

    def forward(self, features: Tensor) -> Tensor:
        mean, log_variance = self.encoder(features).chunk(2, dim=-1)
        if self.training:
            mean = mean + (log_variance / 2).exp() * torch.randn_like(mean)
        return self.decoder(mean)


class BottleneckedHead(nn.Module):
    """The bottleneck, then the classifier as it was."""

    def __init__(self, bottleneck: VariationalBottleneck, head: nn.Module) -> None:
        super().__init__()
        self.bottleneck, self.head = bottleneck, head

    def forward(self, features: Tensor) -> Tensor:
        return self.head(self.bottleneck(features))


def _linear(inputs: int, outputs: int, like: Tensor, rng: Generator) -> nn.Linear:
    """PyTorch's own initialisation of a linear layer, U(±1/√inputs), drawn from `rng`."""
    layer = cast(nn.Linear, nn.utils.skip_init(nn.Linear, inputs, outputs, device=like.device, dtype=like.dtype))
    bound = 1 / math.sqrt(inputs)
    with torch.no_grad():
        for parameter in layer.parameters():
            uniform = torch.rand(parameter.shape, generator=rng, dtype=parameter.dtype, device=rng.device)
            parameter.copy_(uniform * 2 * bound - bound)
    return layer
