"""Derivatives of what a tape computes, along any change of its input, each for about the price of one pass.

PyTorch's second derivative of a norm over statistics takes several times as long as the norm. Its derivative itself is short: with x̂ what
the norm gives before its weight γ and bias, a change ẏ of what it receives leads to γ / σ (ẏ − mean(ẏ) − x̂ mean(x̂ ẏ)).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from dosimeter.engines.downward.norms import ARGUMENTS, given, keeps_statistics, multiply_and_add
from dosimeter.engines.downward.softening import passing_share, soft_rectifier
from dosimeter.network.tape import CONVOLUTIONS, RECTIFIERS, RESHAPES, Operation, Tape, Value

SUMS = frozenset({torch.add, Tensor.add, Tensor.__add__})
LINEAR = RESHAPES | frozenset({F.adaptive_avg_pool2d, F.avg_pool2d, torch.mean, Tensor.mean})  # in the one value that they receive
Rule = Callable[[Mapping[int, Tensor]], Tensor]  # from changes of what an operation receives to the change of what it gives


class Tangents:
    """The wanted values of a tape at some inputs, and how they change with the inputs."""

    def __init__(self, tape: Tape, tensors: Mapping[str, Tensor], inputs: Tensor, wanted: Sequence[int]) -> None:
        self._inputs, self._wanted = inputs.detach().requires_grad_(), wanted
        values = {0: self._inputs}
        self._rules: dict[int, Rule] = {}
        for number in tape.ancestors(wanted, [0]):
            if number in values:
                continue
            operation = tape.operation(number)
            with torch.enable_grad():
                values[number] = operation(values, tensors)
            changing = [one for one in operation.sources if one == 0 or one in self._rules]
            if changing:
                with torch.no_grad():
                    self._rules[number] = _rule(operation, changing, values, tensors)
        self._values = [values[one] for one in wanted]
        self.values = [one.detach() for one in self._values]

    def along(self, change: Tensor) -> list[Tensor]:
        """The change of each wanted value with a change of the inputs."""
        changes = {0: change}
        with torch.no_grad():
            for number, rule in self._rules.items():
                changes[number] = rule(changes)
        return [changes[one] if one in changes else torch.zeros_like(value) for one, value in zip(self._wanted, self.values)]

    def back(self, weights: Sequence[Tensor]) -> Tensor:
        """The slope of the weighted sum of the wanted values at the inputs."""
        return torch.autograd.grad(self._values, self._inputs, list(weights), retain_graph=True)[0]


def _rule(operation: Operation, changing: Sequence[int], values: Mapping[int, Tensor], tensors: Mapping[str, Tensor]) -> Rule:
    source = changing[0]
    if operation.function in RECTIFIERS:
        opened = values[source] > 0
        return lambda changes: changes[source] * opened
    if operation.function is soft_rectifier:
        passing = passing_share(values[source], tensors[operation.names[0]])
        return lambda changes: changes[source] * passing
    if operation.function is multiply_and_add:
        scale = tensors[operation.names[0]].reshape(1, -1, *([1] * (values[source].ndim - 2)))
        return lambda changes: changes[source] * scale
    if operation.function in CONVOLUTIONS and operation.arguments[0] == Value(source) and len(changing) == 1:
        data, weight, *rest = operation.arguments
        options = {name: one for name, one in operation.options.items() if name != "bias"}
        unbiased = replace(operation, arguments=(data, weight, *([None] * bool(rest)), *rest[1:]), options=options)
        return lambda changes: unbiased(changes, tensors)
    if operation.function in SUMS and len(changing) == 1 and len(operation.sources) == 1:
        return lambda changes: changes[source]
    if (operation.function in SUMS and len(changing) == len(operation.sources)) or operation.function in LINEAR:
        return lambda changes: operation(changes, tensors)
    if keeps_statistics(operation) and operation.function in ARGUMENTS:
        return _rule_of_norm(operation, source, values[source].detach(), tensors)
    return _general_rule(operation, changing, values, tensors)


def _rule_of_norm(norm: Operation, source: int, received: Tensor, tensors: Mapping[str, Tensor]) -> Rule:
    """Batch norm in train mode, or group norm."""
    named = given(norm)
    shared = [0, *range(2, received.ndim)] if norm.function is F.batch_norm else [2]
    shape = received.shape if norm.function is F.batch_norm else (len(received), named["num_groups"], -1)
    grouped = received.reshape(shape)
    variance, mean = torch.var_mean(grouped, shared, correction=0, keepdim=True)
    deviation = (variance + named["eps"]).sqrt()
    normal = (grouped - mean) / deviation
    weight = 1.0 if named.get("weight") is None else tensors[named["weight"].name].reshape(1, -1, *([1] * (received.ndim - 2)))

    def rule(changes: Mapping[int, Tensor]) -> Tensor:
        change = changes[source].reshape(shape)
        along = (normal * change).mean(shared, keepdim=True)
        return weight * ((change - change.mean(shared, keepdim=True) - normal * along) / deviation).reshape(received.shape)

    return rule


def _general_rule(operation: Operation, changing: Sequence[int], values: Mapping[int, Tensor], tensors: Mapping[str, Tensor]) -> Rule:
    at = {one: values[one].detach() for one in operation.sources}

    def value(*given: Tensor) -> Tensor:
        return operation(at | dict(zip(changing, given)), tensors)

    points = tuple(at[one] for one in changing)
    return lambda changes: torch.func.jvp(value, points, tuple(changes[one] for one in changing))[1]
