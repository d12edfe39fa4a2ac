"""The tensors of a received update by what they are: changes of parameters in a gradient's units, and buffers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dosimeter.client.checks import check_dense
from dosimeter.client.kinds import Kind
from dosimeter.types import Update

MAGNITUDE = re.compile(r"(\.lora_magnitude_vector)\.[^.]+\.weight$")  # of PEFT's DoRA
ADAPTER = re.compile(r"(\.lora_[A-Za-z_]+)\.[^.]+(?=\.|$)")  # of PEFT: the name of an adapter behind its matrices
SAVED = re.compile(r"\.modules_to_save\.[^.]+")
BASE = re.compile(r"\.base_layer(?=\.)")
WRAPPERS = frozenset({"module", "_orig_mod", "_module", "_fsdp_wrapped_module"})  # of DataParallel, torch.compile, Opacus and FSDP


@dataclass(frozen=True, kw_only=True)
class SentTensors:
    """What a client sent, sorted by the model's names. Numbers are as they were sent."""

    parameters: Update  # by the first name of a parameter that layers share
    buffers: dict[str, Tensor]
    unknown: tuple[str, ...] = ()  # names that the model lacks
    absent: tuple[str, ...] = ()  # trained parameters that were not sent


@dataclass(frozen=True, kw_only=True)
class Converted:
    """An update in a gradient's units, and the buffers after training."""

    update: Update
    buffers: dict[str, Tensor] = field(default_factory=dict)
    unmoved: tuple[str, ...] = ()  # trained parameters of which no entry moved: left out, as withheld ones
    thawed: tuple[str, ...] = ()  # parameters that are frozen in the model and moved


def sort_tensors(model: nn.Module, update: Any) -> SentTensors:
    """The tensors or arrays of an update by what the model has under their names."""
    if not isinstance(update, Mapping) or not all(isinstance(value, Tensor | np.ndarray) for value in update.values()):
        raise TypeError(f"update: expected tensors by parameter name, got {type(update).__name__}")
    device = next(model.parameters()).device
    own = unwrapped_names(model)
    named = {own(str(name)): as_tensor(value, f"update.{name}").to(device) for name, value in update.items()}
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    aliases = {name: first[id(parameter)] for name, parameter in model.named_parameters(remove_duplicate=False)}
    adapters = adapter_names(model)
    named = {name if name in aliases else adapters.get(name, name): value for name, value in named.items()}
    buffers = dict(model.named_buffers(remove_duplicate=False))
    parameters: Update = {}
    for name, tensor in named.items():
        if name in aliases and (name == aliases[name] or aliases[name] not in named):
            parameters[aliases[name]] = tensor
    return SentTensors(
        parameters=parameters,
        buffers={name: tensor for name, tensor in named.items() if name in buffers},
        unknown=tuple(name for name in named if name not in aliases and name not in buffers),
        absent=tuple(name for name, p in model.named_parameters() if p.requires_grad and name not in parameters),
    )


def unwrapped_names(model: nn.Module) -> Callable[[str], str]:
    """The model's own name for a sent one, where a model, or a part of it, was wrapped: by torch.compile, for example."""

    def bare(name: str) -> str:
        return ".".join(part for part in name.split(".") if part not in WRAPPERS)

    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    own = dict.fromkeys(name for name, _ in named)
    counts = Counter(map(bare, own))
    by_bare = {bare(name): name for name in own if counts[bare(name)] == 1}
    return lambda name: name if name in own else by_bare.get(bare(name), bare(name))


def adapter_names(model: nn.Module) -> dict[str, str]:
    """The names that PEFT gives an adapter's parameters in its `get_peft_model_state_dict`, and the model's own names for them.

    PEFT leaves the adapter's name out: `fc.lora_A.default.weight` is sent as `fc.lora_A.weight`, and `head.modules_to_save.default.weight`
    as `head.weight`. A wrapped layer's own weight, `fc.base_layer.weight`, is `fc.weight` in the model before. Of several adapters,
    the one that is trained counts; a name that stays ambiguous is left out.
    """
    found: dict[str, list[tuple[bool, str]]] = {}
    for name, parameter in model.named_parameters():
        short = BASE.sub("", SAVED.sub("", ADAPTER.sub(r"\1", MAGNITUDE.sub(r"\1", name))))
        if short != name:
            found.setdefault(short, []).append((parameter.requires_grad, name))
    trained = {short: [name for learns, name in names if learns] or [name for _, name in names] for short, names in found.items()}
    return {short: names[0] for short, names in trained.items() if len(names) == 1}


def convert(sent: SentTensors, model: nn.Module, kind: Kind, unit: float, decay: float = 1.0) -> Converted:
    """The update in a gradient's units: (decay · before − after) / unit. Differences are taken in double precision."""
    before = dict(model.named_parameters())
    if kind == "gradient":
        return Converted(update={name: change.detach().clone() for name, change in sent.parameters.items()}, buffers=dict(sent.buffers))
    moved: Update = {}
    for name, tensor in sent.parameters.items():
        weight = before[name].detach().double()
        moved[name] = tensor.double() - weight if kind == "weights" else tensor.double()
    still = tuple(name for name, change in moved.items() if not change.any())
    kept = [name for name in moved if name not in still] or list(moved)  # an update that is zero everywhere stays
    update = {
        name: (((decay - 1) * before[name].detach().double() - moved[name]) / unit).to(
            torch.promote_types(before[name].dtype, torch.float32)
        )
        for name in kept
    }
    olds = dict(model.named_buffers())
    buffers = {name: olds[name].detach() + value.to(olds[name].dtype) for name, value in sent.buffers.items() if name in olds}
    return Converted(
        update=update,
        buffers=dict(sent.buffers) if kind == "weights" else buffers,
        unmoved=tuple(name for name in still if before[name].requires_grad),
        thawed=tuple(name for name in kept if not before[name].requires_grad and name not in still),
    )


def as_tensor(value: Any, path: str) -> Tensor:
    """A tensor, or an array in any byte order, as a tensor that is part of no graph. What has no values is refused."""
    if isinstance(value, Tensor):
        check_dense(value, path)
        return value.detach()
    array = np.array(value)
    try:
        return torch.from_numpy(array.astype(array.dtype.newbyteorder("=")))
    except TypeError:
        raise TypeError(f"{path}: expected an array of numbers, got one of {array.dtype}") from None
