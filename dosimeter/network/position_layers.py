"""The layers that receive a vector at each position of a text, and what each vector depends on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dosimeter.network.probing import Received, record_received
from dosimeter.network.token_inputs import find_token_embedding, with_ids
from dosimeter.randomness import generator
from dosimeter.types import NamedInputs, Update

Reach = Literal["token", "earlier", "all"]  # what a vector depends on: its own token and place, earlier tokens too, or all tokens
ROUNDINGS = 256  # units in the last place by which the same vector, computed in another batch, may differ


@dataclass(frozen=True, kw_only=True)
class PositionLayer:
    """One matrix that multiplies a vector at each position."""

    name: str  # of the module
    parameter: str  # of the matrix in an update
    transposed: bool  # the matrix is (in, out)
    reach: Reach
    group: int  # layers that receive the same vectors have the same number; in the order in which the model runs them

    def rows(self, update: Update) -> Tensor | None:
        """The gradient as (out, in), each row a combination of received vectors; None where it was not sent."""
        change = update.get(self.parameter)
        return change if change is None or not self.transposed else change.T


def find_position_layers(model: nn.Module, blank: Any) -> list[PositionLayer]:
    """Every layer with a matrix that receives (n, t, d) for texts (n, t), in the order in which the model runs them.

    What its vectors depend on is read off two random texts that agree at every other position, and two that agree up to the middle.
    """
    main = blank.main if isinstance(blank, NamedInputs) else blank
    length, vocabulary = main.shape[1], find_token_embedding(model, blank).vocabulary
    ids = torch.randint(vocabulary, (3, length), generator=generator(0, "position probes")).to(main)
    here = torch.arange(length, device=ids.device)
    ids[1] = torch.where(here % 2 == 0, ids[0], ids[1])
    ids[2] = torch.where(here < (length + 1) // 2, ids[0], ids[2])
    calls = [call for call in record_received(model, with_ids(blank, ids)) if call.vectors.shape[:2] == ids.shape]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    layers: list[PositionLayer] = []
    groups: list[Tensor] = []
    for call in calls:
        turned = _orientation(call)
        if turned is None or id(call.weight) not in names:
            continue
        same = [number for number, seen in enumerate(groups) if seen.shape == call.vectors.shape and torch.equal(seen, call.vectors)]
        if not same:
            groups.append(call.vectors)
        group = same[0] if same else len(groups) - 1
        layers.append(
            PositionLayer(name=call.name, parameter=names[id(call.weight)], transposed=turned, reach=_reach(call.vectors, ids), group=group)
        )
    return layers


def _reach(vectors: Tensor, ids: Tensor) -> Reach:
    """What vectors (3, t, d) of the probes depend on."""
    shared = ids[0] == ids[1]
    if _same(vectors[0, shared], vectors[1, shared]):
        return "token"
    middle = (ids.shape[1] + 1) // 2
    return "earlier" if _same(vectors[0, :middle], vectors[2, :middle]) else "all"


def _same(one: Tensor, other: Tensor) -> bool:
    tolerance = ROUNDINGS * torch.finfo(one.dtype).eps * float(one.abs().max() if one.numel() else 0)
    return bool(((one - other).abs() <= tolerance).all())


def _orientation(call: Received) -> bool | None:
    """Whether the layer's matrix is (in, out); None where what the layer gives is no product with it."""
    if call.given is None:
        return False  # attention of PyTorch: (3 d, d) by definition
    for transposed in (False, True):
        matrix = call.weight.detach().T if transposed else call.weight.detach()
        if matrix.shape[1] != call.vectors.shape[-1] or matrix.shape[0] != call.given.shape[-1]:
            continue
        product = call.vectors @ matrix.T
        product = product if call.bias is None else product + call.bias.detach()
        if _same(product, call.given):
            return transposed
    return None
