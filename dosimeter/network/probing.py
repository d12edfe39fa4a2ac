"""What passes through a model's modules in a forward pass: the one place that registers hooks.

A pass leaves the caller's model as it was. Hooks are removed, modes restored, and the pass writes into copies of the buffers.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.hooks import RemovableHandle

from dosimeter.types import NamedInputs

MOST_AT_ONCE = 256  # inputs of a forward pass without gradients
HELD_AT_ONCE = 6  # activations of the largest size, a convolution's own copies included
PASS_BYTES = 2**29  # of activations in such a pass; a fixed number, so that every machine computes the same bits
FAILED_MODEL = "raised in a pass through the model"  # the note on an error
PARTS = "_dosimeter_parts"  # attribute of a model that takes several tensors: their names and shapes
OUTPUTS = "_dosimeter_outputs"  # attribute of a model whose loss takes all that it returns: an `OutputForm`
OUTPUT_NAMES = ("logits", "out", "output", "outputs", "prediction", "predictions", "preds", "scores")  # of the tensor that a loss takes
Selection = Callable[[str, nn.Module], bool]  # which modules are recorded, by name and by module


@dataclass(frozen=True)
class Call:
    """One call of a module whose output is a tensor."""

    name: str
    module: nn.Module
    received: Any  # the first argument, mostly a tensor
    given: Tensor  # the output


def copied_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Copies that a forward pass may write into, as batch norm in train mode does."""
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers()}


def is_leaf(_: str, module: nn.Module) -> bool:
    """Selects the modules that have no modules inside."""
    return next(module.children(), None) is None


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Every module is in eval mode inside, and in its own mode again afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def forward(model: nn.Module, tensors: Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]], inputs: Any, **options: Any) -> Any:
    """The model's output with `tensors` in place of its own. A model may write into its input, so it gets a copy."""
    output = _run(model, tensors, inputs, **options)
    form: OutputForm | None = getattr(model, OUTPUTS, None)
    return logits_of(output) if form is None else form.join(output)


def _run(model: nn.Module, tensors: Any, inputs: Any, **options: Any) -> Any:
    own = parts_of(model, inputs).clone()
    given: dict[str, Any] = {"args": (own,)}
    if isinstance(own, NamedInputs):
        given = {"args": tuple(own.tensors.values())} if own.by_place else {"args": (), "kwargs": own.tensors}
    with own_code():
        return functional_call(model, tensors, **given, **options)


@contextmanager
def own_code() -> Iterator[None]:
    """A model's own code may fail in any way, forward and backward. What no caller knows is a ValueError; so is an end of the program."""
    try:
        yield
    except (ValueError, TypeError, OverflowError, MemoryError):
        raise
    except (Exception, SystemExit, GeneratorExit) as error:
        if type(error).__module__.startswith("dosimeter."):  # a pass that is stopped on purpose
            raise
        if isinstance(error, RuntimeError) and not isinstance(error, RecursionError):  # mostly of PyTorch; callers tell them apart
            error.add_note(FAILED_MODEL)
            raise
        said = f"{type(error).__name__}: {error}".rstrip(": ")
        raise ValueError(f"model: its own code {'ended the program' if isinstance(error, SystemExit) else 'failed'} ({said})") from error


class OutputForm:
    """What a model returns where that is several tensors (B, ...): they are joined to one row a sample, and taken apart for the loss."""

    def __init__(self, output: Any) -> None:
        leaves, self.structure = tree_flatten(output)
        self.shapes = [tuple(leaf.shape[1:]) if isinstance(leaf, Tensor) else None for leaf in leaves]

    @classmethod
    def of(cls, output: Any, samples: int) -> OutputForm | None:
        """The form of an output that holds one number or more a sample in each of its tensors, and no other values; else None."""
        leaves = [leaf for leaf in tree_flatten(output)[0] if leaf is not None]
        fits = all(isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.ndim and len(leaf) == samples for leaf in leaves)
        return cls(output) if leaves and fits else None

    def join(self, output: Any) -> Tensor:
        tensors = [leaf for leaf in tree_flatten(output)[0] if isinstance(leaf, Tensor)]
        return tensors[0] if len(tensors) == 1 else torch.cat([tensor.flatten(1) for tensor in tensors], 1)

    def split(self, joined: Tensor) -> Any:
        """What the model returned, out of the joined tensor."""
        shapes = [shape for shape in self.shapes if shape is not None]
        parts = [joined] if len(shapes) == 1 else joined.split([math.prod(shape) for shape in shapes], 1)
        filled = iter([part.reshape(len(joined), *shape) for part, shape in zip(parts, shapes)])
        return tree_unflatten([None if shape is None else next(filled) for shape in self.shapes], self.structure)

    def __call__(self, joined: Tensor) -> Any:
        return self.split(joined)

    def __deepcopy__(self, _: Any) -> OutputForm:
        return self  # nothing in it changes

    def __repr__(self) -> str:
        return f"outputs of shapes {[shape for shape in self.shapes if shape is not None]}"


def join_outputs(model: nn.Module, form: OutputForm) -> nn.Module:
    """Let the model give all of its outputs in one row a sample (B, D). In place."""
    setattr(model, OUTPUTS, form)
    return model


def raw_output(model: nn.Module, inputs: Any) -> Any:
    """What the model's own code returns in its current mode, without gradients."""
    with torch.no_grad():
        return _run(model, copied_buffers(model), inputs)


def join_inputs(model: nn.Module, inputs: NamedInputs) -> nn.Module:
    """Let the model take all numbers of a sample in one row (B, D), of which it gets the parts by name. In place."""
    setattr(model, PARTS, {name: tuple(tensor.shape[1:]) for name, tensor in inputs.tensors.items()})
    return model


def parts_of(model: nn.Module, inputs: Any) -> Any:
    """The parts of joined inputs; other inputs as they are."""
    shapes = getattr(model, PARTS, None)
    if shapes is None or not isinstance(inputs, Tensor):
        return inputs
    columns = inputs.split([math.prod(shape) for shape in shapes.values()], 1)
    return NamedInputs({name: part.reshape(len(inputs), *shape) for (name, shape), part in zip(shapes.items(), columns)})


def logits_of(output: Any) -> Any:
    """The tensor of logits in what a model returns: a field of that name, as in the outputs of Transformers, or the first tensor.

    Of several tensors by name, none of which has a name for outputs, no one is taken: it might be the features.
    """
    if isinstance(output, Mapping):
        tensors = {name: one for name, one in output.items() if isinstance(one, Tensor)}
        named = [tensors[name] for name in OUTPUT_NAMES if name in tensors]
        return named[0] if named else next(iter(tensors.values())) if len(tensors) == 1 else output
    if isinstance(output, tuple) and isinstance(getattr(output, "logits", None), Tensor):
        return output.logits  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(output, tuple | list):
        return next((one for one in output if isinstance(one, Tensor)), output)
    return getattr(output, "logits", output)


def as_taken(model: nn.Module, inputs: Any) -> Any:
    """Inputs on the model's device: numbers in its own format, token ids as they are."""
    like = next(model.parameters())
    if isinstance(inputs, NamedInputs):
        return inputs.each(lambda tensor: as_taken(model, tensor))
    return inputs.to(like if inputs.is_floating_point() else like.device)


def output_of(model: nn.Module, inputs: Any) -> Any:
    """The model's output in its current mode, without gradients."""
    with torch.no_grad():
        return forward(model, copied_buffers(model), inputs)


def activation_bytes(model: nn.Module, sample: Tensor) -> int:
    """The bytes of all that a model's innermost modules give for one sample (1, *shape), in eval mode."""
    _, calls = record_calls(model, sample, is_leaf, evaluate=True)
    return sample.nbytes + sum(call.given.nbytes for call in calls)


def samples_at_once(model: nn.Module, inputs: Tensor) -> int:
    """How many of `inputs` go through the model together without gradients, such that what is held at once stays within `PASS_BYTES`.

    A pass without gradients holds a few activations at a time: the largest counts, times `HELD_AT_ONCE`.
    """
    _, calls = record_calls(model, inputs[:1], is_leaf, evaluate=True)
    largest = max((call.given.nbytes for call in calls), default=inputs[:1].nbytes)
    return max(1, min(MOST_AT_ONCE, PASS_BYTES // (HELD_AT_ONCE * largest)))


def input_of(model: nn.Module, name: str, inputs: Any, *, differentiable: bool = False) -> Tensor:
    """What the module `name` receives when the model, in its current mode, sees `inputs`: (B, H) for a linear layer.

    Of a layer at every position of a text, one of which each sample's output is, the vectors at these positions count.
    """
    passed: list[tuple[Tensor, Any]] = []
    hook = model.get_submodule(name).register_forward_hook(lambda _, arguments, output: passed.append((arguments[0], output)))
    with _remove_after([hook]), torch.set_grad_enabled(differentiable):
        output = forward(model, copied_buffers(model), inputs)
    received, given = passed[-1]
    received = at_positions(received, positions_of(given, output))
    return received if differentiable else received.detach()


def positions_of(given: Any, output: Any) -> Tensor | None:
    """The position of each sample whose logits (B, T, C) are the sample's output (B, C): (B,); None where they are not."""
    if not isinstance(given, Tensor) or not isinstance(output, Tensor) or given.ndim != 3 or output.ndim != 2:
        return None
    if (given.shape[0], given.shape[2]) != tuple(output.shape):
        return None
    same = (given == output[:, None]).all(2)  # (B, T)
    return same.int().argmax(1) if bool(same.any(1).all()) else None


def at_positions(vectors: Tensor, positions: Tensor | None) -> Tensor:
    """Vectors (B, T, d) at one position a sample, (B, d); all of them where there are no positions."""
    return vectors if positions is None else vectors[torch.arange(len(vectors), device=vectors.device), positions]


def outputs_with(model: nn.Module, name: str, inputs: Any) -> tuple[Any, Any]:
    """The model's output, and the module's that the model's is made from, so that one can be differentiated by the other."""
    given: list[Any] = []
    hook = model.get_submodule(name).register_forward_hook(lambda _, __, output: given.append(output))
    with _remove_after([hook]), torch.enable_grad():
        output = forward(model, copied_buffers(model), inputs)
    return output, given[0]


def record_calls(model: nn.Module, inputs: Any, selected: Selection, *, evaluate: bool = False) -> tuple[Any, list[Call]]:
    """The model's output, and the selected modules' calls in the order in which they end; without gradients.

    The model runs in its current mode, or in eval mode with `evaluate`.
    """
    calls: list[Call] = []

    def recorder(name: str) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        def record(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
            if isinstance(output, Tensor):
                received = arguments[0] if arguments else None
                calls.append(Call(name, module, received.detach() if isinstance(received, Tensor) else received, output.detach()))

        return record

    hooks = [module.register_forward_hook(recorder(name)) for name, module in model.named_modules() if selected(name, module)]
    with _remove_after(hooks), evaluation_mode(model) if evaluate else nullcontext():
        return output_of(model, inputs), calls


def record_inputs(model: nn.Module, inputs: Any, selected: Selection) -> tuple[Any, list[tuple[str, nn.Module, Tensor]]]:
    """The model's output, and what each selected module receives, in the order in which they begin; without gradients."""
    received: list[tuple[str, nn.Module, Tensor]] = []
    hooks = [
        module.register_forward_pre_hook(lambda module, arguments, name=name: received.append((name, module, arguments[0].detach())))
        for name, module in model.named_modules()
        if selected(name, module)
    ]
    with _remove_after(hooks):
        return output_of(model, inputs), received


@dataclass(frozen=True)
class Arrival:
    """What a module is called with, and whether the pass drew random numbers before."""

    name: str
    received: Any  # the first argument, mostly a tensor
    drawn: bool


def record_arrivals(model: nn.Module, inputs: Any, selected: Selection, *, last: Callable[[Arrival], bool] | None = None) -> list[Arrival]:
    """What each selected module is called with, in the order in which the calls begin, in the model's current mode; without gradients.

    The pass ends at the `last` arrival, if there is one. All random states are the same afterwards: PyTorch's, NumPy's and Python's.
    """
    arrivals: list[Arrival] = []

    def record(name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        first = next(iter((*arguments, *options.values())), None)
        arrivals.append(Arrival(name, first.detach().clone() if isinstance(first, Tensor) else first, random_states() != before))
        if last is not None and last(arrivals[-1]):
            raise _Stopped

    hooks = [
        module.register_forward_pre_hook(lambda _, *given, name=name: record(name, *given), with_kwargs=True)
        for name, module in model.named_modules()
        if selected(name, module)
    ]
    with _remove_after(hooks), random_states_restored() as before, suppress(_Stopped):
        output_of(model, inputs)
    return arrivals


@contextmanager
def random_states_restored() -> Iterator[tuple[Any, Any, list[bytes]]]:
    """The global streams of Python, NumPy and PyTorch are afterwards where they were; gives their states at the beginning."""
    before = random_states()
    try:
        with torch.random.fork_rng():
            yield before
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])


def random_states() -> tuple[Any, Any, list[bytes]]:
    """The states of the global streams of Python, NumPy and PyTorch, such that two of them can be compared."""
    kind, words, *rest = np.random.get_state()
    streams = [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_available() else ())]
    return random.getstate(), (kind, tuple(np.asarray(words).tolist()), *rest), [state.numpy().tobytes() for state in streams]


@dataclass(frozen=True)
class Received:
    """What a layer with a matrix received in one pass."""

    name: str
    weight: Tensor
    bias: Tensor | None
    vectors: Tensor
    given: Tensor | None  # None: attention of PyTorch, whose output is no product with its matrix


def record_received(model: nn.Module, inputs: Any) -> list[Received]:
    """What every layer with a matrix, or attention of PyTorch with one for all projections, receives; without gradients, in run order."""
    calls: list[Received] = []

    def recorder(name: str) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        def record(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
            attention = isinstance(module, nn.MultiheadAttention)
            weight = module.in_proj_weight if attention else getattr(module, "weight", None)
            bias = None if attention else getattr(module, "bias", None)
            if isinstance(weight, Tensor) and weight.ndim == 2 and arguments and isinstance(arguments[0], Tensor):
                given = output.detach() if isinstance(output, Tensor) and not attention else None
                if attention or given is not None:
                    calls.append(Received(name, weight, bias, arguments[0].detach(), given))

        return record

    def chosen(module: nn.Module) -> bool:
        return not isinstance(module, nn.Embedding)

    hooks = [module.register_forward_hook(recorder(name)) for name, module in model.named_modules() if chosen(module)]
    with _remove_after(hooks), _slow_attention():
        output_of(model, inputs)
    return calls


def received_at(model: nn.Module, name: str, inputs: Any) -> Tensor:
    """What the module `name` receives first; the pass ends there. Without gradients."""
    received: list[Tensor] = []

    def stop(_: nn.Module, arguments: tuple[Any, ...]) -> None:
        received.append(arguments[0].detach())
        raise _Stopped

    hook = model.get_submodule(name).register_forward_pre_hook(stop)
    with _remove_after([hook]), _slow_attention(), suppress(_Stopped):
        output_of(model, inputs)
    return received[0]


class _Stopped(Exception):
    """Ends a forward pass whose rest nobody asks for."""


@contextmanager
def _slow_attention() -> Iterator[None]:
    """PyTorch's fast path of its encoder layers calls no module inside of them, so that no hook would see anything."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


class InputWatch:
    """What chosen modules of a model receive in every forward pass, differentiable.

    The model belongs to the watch. Its hooks stay, since a compiled or transformed pass cannot register any.
    """

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        self.model, self.received = model.requires_grad_(False), {}
        for name in names:
            self.model.get_submodule(name).register_forward_pre_hook(self._recorder(name))

    def _recorder(self, name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def record(_: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            self.received[name] = arguments[0]

        return record

    def __call__(self, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], inputs: Tensor) -> dict[str, Tensor]:
        """The inputs of the chosen modules by name; the pass writes into copies of the buffers and of the inputs."""
        written = {name: buffer.clone() for name, buffer in buffers.items()}
        forward(self.model, (dict(parameters), written), inputs)
        received = dict(self.received)
        self.received.clear()  # a tensor left behind would outlive the transform that made it, which compilation cannot allow
        return received


def change_input(module: nn.Module, change: Callable[[nn.Module, tuple[Tensor, ...]], tuple[Any, ...]]) -> None:
    """Let `change` replace what the module receives, for good; an object, not a closure, lets the model be copied and pickled."""
    module.register_forward_pre_hook(change)


def change_output(module: nn.Module, change: Callable[[nn.Module, tuple[Any, ...], Tensor], Tensor]) -> None:
    """Let `change` replace what the module gives, for good; an object, not a closure, lets the model be copied and pickled."""
    module.register_forward_hook(change)


@contextmanager
def _remove_after(hooks: Sequence[RemovableHandle]) -> Iterator[None]:
    """The hooks are removed afterwards, whatever happens."""
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
