"""The operations of one forward pass as a graph that runs again from any of its values.

Where `tail` runs the model's own code, a tape holds every operation with its arguments. So it can begin at several known values at once,
and stop at the ones that are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter, tree_map

from dosimeter.network.probing import forward

RECTIFIERS = frozenset({F.relu, torch.relu, Tensor.relu})
# An operation that writes into its argument would change the values that a replay is given.
OUT_OF_PLACE = {
    torch.relu_: torch.relu,
    Tensor.relu_: torch.relu,
    Tensor.add_: torch.add,
    Tensor.__iadd__: torch.add,
    Tensor.mul_: torch.mul,
}
RESHAPES = frozenset({torch.flatten, torch.reshape, Tensor.flatten, Tensor.reshape, Tensor.view})
CONVOLUTIONS = frozenset({F.conv2d, F.linear})


@dataclass(frozen=True)
class Value:
    """A value of the pass: the model's input is number 0, each operation gives the next ones."""

    number: int


@dataclass(frozen=True)
class Named:
    """A parameter or buffer of the model."""

    name: str


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One call of a function, with `Value` and `Named` in the place of tensors."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    part: int  # which tensor of what the function returns
    shape: tuple[int, ...]  # of this tensor

    @property
    def sources(self) -> list[int]:
        return [one.number for one in tree_iter((self.arguments, self.options)) if isinstance(one, Value)]

    @property
    def names(self) -> list[str]:
        return [one.name for one in tree_iter((self.arguments, self.options)) if isinstance(one, Named)]

    def __call__(self, values: Mapping[int, Tensor], tensors: Mapping[str, Tensor]) -> Tensor:
        def given(one: Any) -> Any:
            return values[one.number] if isinstance(one, Value) else tensors[one.name] if isinstance(one, Named) else one

        arguments, options = tree_map(given, (self.arguments, self.options))
        returned = [one for one in tree_iter(self.function(*arguments, **options)) if isinstance(one, Tensor)]
        return returned[self.part]


@dataclass(frozen=True, kw_only=True)
class Tape:
    """A forward pass of a batch. Value 0 is the input, and operation i gives value i + 1."""

    operations: tuple[Operation, ...]
    inputs: tuple[int, ...]  # the shape of value 0, samples first
    output: int  # the number of the model's output

    def operation(self, value: int) -> Operation:
        return self.operations[value - 1]

    def shape(self, value: int) -> tuple[int, ...]:
        return self.operation(value).shape if value else self.inputs

    def ancestors(self, wanted: Iterable[int], known: Iterable[int] = ()) -> list[int]:
        """The values that `wanted` is computed from, itself included, in order; those behind `known` are left out, not `known` itself."""
        stop, found, waiting = set(known), set(), list(wanted)
        while waiting:
            value = waiting.pop()
            if value in found:
                continue
            found.add(value)
            if value and value not in stop:
                waiting.extend(self.operation(value).sources)
        return sorted(found)

    def consumers(self, value: int) -> list[int]:
        """The values that an operation on this one gives."""
        return [index + 1 for index, operation in enumerate(self.operations) if value in operation.sources]

    def follows_from(self, wanted: int, known: Iterable[int]) -> bool:
        """Whether `wanted` can be computed from the known values, without the model's input."""
        given = set(known)
        return 0 not in self.ancestors([wanted], given) or 0 in given

    def run(self, known: Mapping[int, Tensor], tensors: Mapping[str, Tensor], wanted: Sequence[int]) -> list[Tensor]:
        """The wanted values from the known ones."""
        values = dict(known)
        for value in self.ancestors(wanted, known):
            if value not in values:
                values[value] = self.operation(value)(values, tensors)
        return [values[value] for value in wanted]

    def layer(self, weight: str) -> int | None:
        """The output of the one convolution or linear layer with this weight."""
        found = [
            index + 1
            for index, operation in enumerate(self.operations)
            if operation.function in CONVOLUTIONS and len(operation.arguments) > 1 and operation.arguments[1] == Named(weight)
        ]
        return found[0] if len(found) == 1 else None

    def before_reshaping(self, value: int) -> int:
        """The value of which this one is a mere reshape, or the value itself."""
        while value and self.operation(value).function in RESHAPES and len(self.operation(value).sources) == 1:
            value = self.operation(value).sources[0]
        return value

    def is_rectifier(self, value: int) -> bool:
        return value > 0 and self.operation(value).function in RECTIFIERS


def record(model: nn.Module, probes: Tensor) -> Tape:
    """The tape of a pass in the model's current mode; the model and its buffers stay as they are."""
    tensors = {name: tensor.detach().clone() for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    recorder = _Recorder(tensors)
    with torch.no_grad(), recorder:
        output = forward(model, tensors, probes)
    last = recorder.number(output)
    return Tape(operations=tuple(recorder.operations), inputs=tuple(probes.shape), output=last)


def tensors_of(model: nn.Module, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Copies of the parameters and buffers, the floating ones in `dtype`."""
    named = (*model.named_parameters(), *model.named_buffers())
    return {name: one.detach().to(dtype if one.is_floating_point() else None, copy=True) for name, one in named}


class _Recorder(TorchFunctionMode):
    """Writes down every operation that returns tensors. The first tensor it meets that is not the model's own is the input."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.names = {id(tensor): name for name, tensor in tensors.items()}
        self.numbers: dict[int, int] = {}
        self.alive: list[Any] = [tensors]  # an id stays unique as long as its tensor lives
        self.operations: list[Operation] = []

    def number(self, tensor: Tensor) -> int:
        return self.numbers[id(tensor)]

    def __torch_function__(self, function: Callable[..., Any], types: Any, arguments: Sequence[Any] = (), options: Any = None) -> Any:
        options = options or {}
        if not self.numbers:  # `forward` clones the input, and the model begins with the clone
            value = function(*arguments, **options)
            self.numbers[id(value)] = 0
            self.alive.append(value)
            return value
        written = tree_map(self._reference, (tuple(arguments), options))
        value = function(*arguments, **options)
        tensors = [one for one in tree_iter(value) if isinstance(one, Tensor)]
        function = OUT_OF_PLACE.get(function, function)
        if "inplace" in options:
            written[1]["inplace"] = False
        for part, tensor in enumerate(tensors):
            if id(tensor) in self.names:
                continue  # written into a buffer
            self.operations.append(
                Operation(function=function, arguments=written[0], options=written[1], part=part, shape=tuple(tensor.shape))
            )
            self.numbers[id(tensor)] = len(self.operations)
            self.alive.append(tensor)
        return value

    def _reference(self, one: Any) -> Any:
        if not isinstance(one, Tensor):
            return one
        if id(one) in self.names:
            return Named(self.names[id(one)])
        return Value(self.numbers[id(one)]) if id(one) in self.numbers else one
