"""The part of a model behind what one layer receives: runs on given maps, without running what stands before.

Every operation of a forward pass is counted. Those before the maps return what they returned once, those behind them run. A shortcut
that takes the same maps gets the given ones too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter

from dosimeter.network.probing import forward


@dataclass(frozen=True, kw_only=True)
class Tail:
    """From a layer's input to the inputs of another layer."""

    model: nn.Module
    parameters: dict[str, Tensor]  # in double precision
    buffers: dict[str, Tensor]  # likewise
    probes: Tensor
    past: tuple[Any, ...]  # what the operations before the one that gives the maps return
    wanted: str  # the layer whose inputs are asked for

    def __call__(self, maps: Tensor) -> Tensor:
        """(B, *shape) maps, as many as there are probes, -> what the wanted layer receives: (B, H)."""
        received = self.replay(maps).received
        assert received is not None
        return received

    def replay(self, maps: Tensor) -> _Replay:
        tensors = self.parameters | {name: buffer.clone() for name, buffer in self.buffers.items()}  # a pass may write into buffers
        replay = _Replay(self.past, maps, tensors[f"{self.wanted}.weight" if self.wanted else "weight"])
        with torch.no_grad(), replay:
            forward(self.model, tensors, self.probes)
        return replay


def find_tail(model: nn.Module, layer: str, wanted: str, probes: Tensor) -> Tail | None:
    """The tail from what `layer` receives to what `wanted` receives.

    None where a shortcut leads past `layer`, so that its input does not tell what follows.
    `probes` are any inputs of the model: only their number matters.
    """
    parameters = {name: parameter.detach().double() for name, parameter in model.named_parameters()}
    buffers = {name: _in_double(buffer) for name, buffer in model.named_buffers()}
    probes = probes.double()
    pads = getattr(model.get_submodule(layer), "padding_mode", "zeros") != "zeros"
    record = _Record(parameters[f"{layer}.weight" if layer else "weight"], pads=pads)
    tensors = parameters | {name: buffer.clone() for name, buffer in buffers.items()}
    with torch.no_grad(), record:
        forward(model, tensors, probes)
    if record.maps is None:
        return None
    past = tuple(_placeholder(value) for value in record.returned[: record.maps])
    tail = Tail(model=model, parameters=parameters, buffers=buffers, probes=probes, past=past, wanted=wanted)
    maps = record.returned[record.maps]
    return tail if isinstance(maps, Tensor) and tail.replay(maps).alone else None


def _in_double(buffer: Tensor) -> Tensor:
    return buffer.detach().double() if buffer.is_floating_point() else buffer.detach().clone()


def _placeholder(value: Any) -> Any:
    """A tensor of the same shape that takes no memory; anything else as it is."""
    return value.new_zeros(()).expand(value.shape) if isinstance(value, Tensor) else value


class _Record(TorchFunctionMode):
    """Counts operations and finds the one that gives what a layer with this weight receives.

    A layer that `pads` calls an operation for it, before its own.
    """

    def __init__(self, weight: Tensor, *, pads: bool) -> None:
        super().__init__()
        self.weight, self.pads, self.maps = weight, pads, None
        self.returned: list[Any] = []
        self.firsts: list[Any] = []  # what each operation got first

    def __torch_function__(self, function: Callable[..., Any], types: Any, arguments: Sequence[Any] = (), options: Any = None) -> Any:
        if self.maps is None and len(arguments) > 1 and arguments[1] is self.weight:
            given = self._position(arguments[0])
            self.maps = self._position(self.firsts[given]) if self.pads and given is not None else given
        value = function(*arguments, **(options or {}))
        self.returned.append(value)
        self.firsts.append(arguments[0] if arguments else None)
        return value

    def _position(self, wanted: Any) -> int | None:
        given = [index for index, value in enumerate(self.returned) if value is wanted]
        return given[-1] if given else None


class _Replay(TorchFunctionMode):
    """Returns the past, then the maps, and runs what follows until a layer with this weight has received its inputs."""

    def __init__(self, past: tuple[Any, ...], maps: Tensor, weight: Tensor) -> None:
        super().__init__()
        self.past, self.maps, self.weight = past, maps, weight
        self.gone = {id(value) for value in past if isinstance(value, Tensor)}
        self.count, self.received = 0, None
        self.alone = True  # nothing but the maps and the model's own tensors goes into what follows

    def __torch_function__(self, function: Callable[..., Any], types: Any, arguments: Sequence[Any] = (), options: Any = None) -> Any:
        index, self.count = self.count, self.count + 1
        if index < len(self.past):
            return self.past[index]
        if index == len(self.past):
            return self.maps
        self.alone = self.alone and not any(id(value) in self.gone for value in tree_iter((arguments, options)))
        if len(arguments) > 1 and arguments[1] is self.weight:
            self.received = arguments[0]
        return function(*arguments, **(options or {}))
