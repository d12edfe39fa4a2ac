"""Dropout before the classifier."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

from torch import Generator, Tensor, nn
from torch.nn.functional import dropout

from dosimeter.interfaces import Client, Defense
from dosimeter.network.head import locate_head
from dosimeter.network.probing import change_input
from dosimeter.options import Constraint
from dosimeter.registry import DEFENSES
from dosimeter.types import Refused

Rate = Annotated[float, Constraint("a number in [0, 1)", lambda value: 0 <= value < 1)]


@DEFENSES.register("dropout")
@dataclass(frozen=True, kw_only=True)
class Dropout(Defense):
    """Drops a random part of the features before the last linear layer.

    Zheng, "Dropout against Deep Leakage from Gradients", 2021 (thesis Table 2.2). The server knows the model and the rate but
    not the masks, which are drawn while the client trains. Parameter names stay as they are.
    """

    side: ClassVar = "model"
    replaces: ClassVar[bool] = True
    promise: ClassVar[str] = "nothing: the masks can be optimised along with the inputs"
    breaks: ClassVar[str] = "little: it is a regulariser; it does nothing in eval mode"

    rate: Rate = 0.5

    def distorts(self) -> bool:
        return False

    def __call__(self, client: Client, rng: Generator) -> Client:
        if self.rate == 0:
            return client
        if not client.model.training:
            raise Refused("dropout acts in train mode only, and this client trains in eval mode: call model.train() first")
        head, _ = locate_head(client.model, tuple(client.batch.inputs.shape[1:]), client.loss.shift_invariant)
        model = copy.deepcopy(client.model)
        change_input(model.get_submodule(head), _DropFeatures(rate=self.rate))
        return replace(client, model=model)


@dataclass(frozen=True, kw_only=True)
class _DropFeatures:
    """A hook before a layer; an object and not a closure, so that the model can be copied and pickled."""

    rate: float

    def __call__(self, layer: nn.Module, received: tuple[Tensor, ...]) -> tuple[Any, ...]:
        return (dropout(received[0], self.rate, layer.training), *received[1:])
