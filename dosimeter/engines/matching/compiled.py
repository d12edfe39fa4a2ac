"""The fast paths: the functional form is recorded as a CUDA graph, with or without compiling it first."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from dosimeter.engines.matching.objective import Objective, Terms
from dosimeter.engines.matching.paths import Evaluation, Functional

Function = Callable[..., tuple[Tensor | None, ...]]


class Captured(Functional):
    """The functional form in channels-last order, recorded once and replayed as one CUDA graph. On a CPU nothing is recorded.

    Weights switch on the layers that enter over time, so that one recording serves all steps. Layers that never enter are not
    differentiated.
    """

    one_layer_set = True
    fuses_sums = False  # whether sums over single layers are fused into what makes them, so that layers need not lie end to end

    def __init__(self, objective: Objective) -> None:
        super().__init__(objective)
        self._on_gpu = next(iter(objective.target.values())).is_cuda
        self._ready: dict[tuple[object, ...], Function] = {}

    def __call__(self, inputs: Tensor, logits: Tensor | None, names: Sequence[str], terms: Terms) -> Evaluation:
        arguments = (inputs, logits, terms.matching, terms.priors, terms.layers, terms.masks)
        key = (tuple(names), len(inputs), logits is None, terms.layers is None, terms.masks is None)
        if key not in self._ready:
            self._ready[key] = self._prepare(tuple(names), len(inputs), arguments)
        objective, distance, slope, label_slope = self._ready[key](*arguments)
        assert objective is not None
        assert distance is not None
        assert slope is not None
        return Evaluation(objective, distance, slope, label_slope)

    def _prepare(self, names: tuple[str, ...], restarts: int, arguments: tuple[object, ...]) -> Function:
        if not self._ready:
            self.objective = self.objective.rearrange(end_to_end=self._on_gpu and not self.fuses_sums, channels_last=self._on_gpu)
        buffers = self._buffers(restarts)  # never written to: every replay copies them, inside the graph, where it costs nothing

        def step(
            inputs: Tensor,
            logits: Tensor | None,
            matching: Tensor,
            priors: Tensor,
            layers: Tensor | None,
            masks: tuple[Tensor, ...] | None,
        ) -> tuple[Tensor | None, ...]:
            evaluation = self.evaluate(inputs, logits, buffers, names, Terms(matching, priors, layers, masks))
            return evaluation.objective, evaluation.distance, evaluation.inputs, evaluation.logits

        function = self._translate(step, arguments)
        return Recorded(function, arguments) if self._on_gpu else function

    def _translate(self, step: Function, arguments: tuple[object, ...]) -> Function:
        return step


class Compiled(Captured):
    """The same after `torch.compile`, which is given the functional form's operations one by one.

    `torch.compile` traces the functional form itself too, but silently takes wrong derivatives of `second_order`'s functions.
    """

    fuses_sums = True

    def _translate(self, step: Function, arguments: tuple[object, ...]) -> Function:
        operations = make_fx(step)(*arguments)
        # hundreds of the step's kernels are sums over one layer, too small for a GPU; combined they take half the time
        return torch.compile(operations, dynamic=False, options={"combo_kernels": True} if self._on_gpu else None)


class Recorded:
    """A function recorded as a CUDA graph: its arguments are copied into fixed places, then the graph is replayed."""

    def __init__(self, function: Function, arguments: tuple[object, ...]) -> None:
        self.function, self.places = function, _copy_of(arguments)  # the graph reads what the function holds, so that must live as long
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                function(*self.places)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with _no_garbage_collected(), torch.cuda.graph(self.graph):
            self.outputs = function(*self.places)

    def __call__(self, *arguments: object) -> tuple[Tensor | None, ...]:
        (images, *places), (given, *others) = _tensors(self.places), _tensors(arguments)
        images.copy_(given)  # on its own: a difference in layout would cost all of them the fast way
        if places:
            torch._foreach_copy_(places, others)  # pyright: ignore[reportPrivateImportUsage]
        self.graph.replay()
        objective, distance, *slopes = self.outputs
        assert objective is not None
        assert distance is not None
        return objective.clone(), distance.clone(), *slopes


@contextmanager
def _no_garbage_collected() -> Iterator[None]:
    """Collect garbage before a recording and not during it: freeing device memory breaks a recording."""
    gc.collect()
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _copy_of(value: Any) -> Any:
    if isinstance(value, Tensor):
        place = value.detach().clone(memory_format=torch.contiguous_format)
        return _channels_last(place) if place.ndim == 5 else place
    if isinstance(value, tuple):
        return tuple(_copy_of(item) for item in value)
    if isinstance(value, dict):
        return {name: _copy_of(item) for name, item in value.items()}
    return value


def _channels_last(images: Tensor) -> Tensor:
    """(R, B, channels, height, width) with each restart's batch in channels-last order; values stay."""
    return images.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)


def _tensors(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, tuple):
        return [tensor for item in value for tensor in _tensors(item)]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in _tensors(item)]
    return []
