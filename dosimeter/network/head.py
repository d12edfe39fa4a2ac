"""The last linear layer of a classifier: found by a proof on random inputs, and paired with its gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dosimeter.interfaces import Exposure
from dosimeter.network.model_state import facts_of
from dosimeter.network.probing import at_positions, evaluation_mode, forward, input_of, positions_of, record_calls
from dosimeter.network.random_texts import random_texts
from dosimeter.network.token_inputs import blank_for
from dosimeter.randomness import generator
from dosimeter.types import Refused

PROBES = 16  # random inputs of the proof; each has many features, so that a negative one would show
CLOSINGS = {  # what may follow the last layer under a loss of the client's own, whose slopes are then taken through it
    "sigmoid": torch.sigmoid,
    "softmax": partial(torch.softmax, dim=1),
    "log_softmax": partial(torch.log_softmax, dim=1),
    "tanh": torch.tanh,
    "softplus": nn.functional.softplus,
}
ROUNDINGS = 64  # units in the last place by which the same logits, computed twice, may differ


@dataclass(frozen=True, kw_only=True)
class Proof:
    """What the random inputs show of a model's head."""

    name: str
    non_negative: bool
    alone: bool
    precision: float  # rounding unit of the layer's own arithmetic
    closing: str = ""  # of `CLOSINGS`; "": the layer's output is the model's


@dataclass(frozen=True, kw_only=True)
class Head:
    """z = W f + b, with what the client sent of its gradients: weighted means of those of its steps, whatever the momentum."""

    name: str  # of the module, "" if the model is the layer itself
    weight: Tensor  # (C, H)
    bias: Tensor | None  # (C,)
    weight_gradient: Tensor | None  # (C, H), None where withheld
    bias_gradient: Tensor | None  # (C,), None where withheld or where there is no bias
    non_negative: bool  # no probe gave a negative feature, as after a ReLU
    alone: bool = True  # nothing else in the model uses the weight, so that its gradient is the layer's own
    precision: float = torch.finfo(torch.float32).eps  # rounding unit of what the layer computes in: autocast's, not the weight's
    closing: str = ""  # of `CLOSINGS`: what the model makes of the layer's output

    @property
    def classes(self) -> int:
        return self.weight.shape[0]

    @property
    def features(self) -> int:
        return self.weight.shape[1]

    def logits(self, features: Tensor) -> Tensor:
        """(..., H) -> (..., C), in the dtype of `features`."""
        z = features @ self.weight.to(features.dtype).T
        return z if self.bias is None else z + self.bias.to(features.dtype)


def find_head(exposure: Exposure, *, closings: bool = False) -> Head:
    """The linear layer whose output is the model's output on random inputs, with its gradients; else a refusal.

    With `closings` one of `CLOSINGS` may follow the layer, under losses that do not begin at logits. The caller takes it into account.
    """
    public = exposure.public
    proof = _proof_of(
        exposure.model, public.input_shape, public.loss.shift_invariant, closings and public.loss.takes_closings, public.blank
    )
    weight, bias = _parameters(exposure.model.get_submodule(proof.name))
    return Head(
        name=proof.name,
        weight=weight.detach(),
        bias=None if bias is None else bias.detach(),
        weight_gradient=_sent(exposure, proof.name, "weight"),
        bias_gradient=None if bias is None else _sent(exposure, proof.name, "bias"),
        non_negative=proof.non_negative,
        alone=proof.alone,
        precision=proof.precision,
        closing=proof.closing,
    )


def _sent(exposure: Exposure, layer: str, which: str) -> Tensor | None:
    change = exposure.update.get(f"{layer}.{which}" if layer else which)
    if change is None:
        change = exposure.update.get(parameter_name(exposure.model, layer, which))
    gain = exposure.public.training.gain(exposure.public.batch_size)
    return change if change is None or gain in (None, 1) else change / gain


def parameter_name(model: nn.Module, layer: str, which: str) -> str:
    """The name of a layer's weight or bias in an update. A wrapper, such as PEFT's `modules_to_save`, holds the parameter further down."""
    own = f"{layer}.{which}" if layer else which
    parameters = dict(model.named_parameters(remove_duplicate=False))
    if own in parameters:
        return own
    tensor = getattr(model.get_submodule(layer), which, None)
    return next((name for name, parameter in parameters.items() if parameter is tensor), own)


def locate_head(model: nn.Module, input_shape: tuple[int, ...], allow_shift: bool = True) -> tuple[str, bool]:
    """The name of the last linear layer, and whether its inputs were non-negative on every probe.

    The proof: on random inputs the layer's output is its weight times its input plus its bias, and equals the model's output. With
    `allow_shift` the two may differ by a constant per sample, which a closing log-softmax subtracts. A proof is kept as
    long as the model's modules, tensors and settings stay the same.
    """
    proof = _proof_of(model, input_shape, allow_shift)
    return proof.name, proof.non_negative


def _proof_of(model: nn.Module, input_shape: tuple[int, ...], allow_shift: bool, allow_closing: bool = False, blank: Any = None) -> Proof:
    facts, training = facts_of(model)
    question = ("head", tuple(input_shape), allow_shift, allow_closing, training)
    if question not in facts:
        inputs = _probe_inputs(model, input_shape, blank)
        facts[question] = _prove(model, inputs, allow_shift, CLOSINGS if allow_closing else {})
    return facts[question]


def _prove(model: nn.Module, inputs: Any, allow_shift: bool, closings: Mapping[str, Callable[[Tensor], Tensor]]) -> Proof:
    output, calls = record_calls(model, inputs, _has_matrix, evaluate=True)
    output = _as_rows(output)
    if not isinstance(output, Tensor) or output.ndim != 2:
        raise Refused(f"the model's output must be one (batch, classes) tensor of logits, got {_describe(output)}")
    for name, layer, features, logits in ((call.name, call.module, call.received, call.given) for call in reversed(calls)):
        positions = positions_of(logits, output)  # a classifier of texts may read one position, such as the last
        if positions is not None and isinstance(features, Tensor) and features.ndim == 3:
            features, logits = at_positions(features, positions), at_positions(logits, positions)
        if logits.shape != output.shape or not _is_affine(layer, features, logits):
            continue
        closing = _closing_of(logits, output, allow_shift, closings)
        if closing is not None:
            precision = max(torch.finfo(kind).eps for kind in (_parameters(layer)[0].dtype, logits.dtype, output.dtype))
            return Proof(
                name=name,
                non_negative=bool((features >= 0).all()) and _non_negative_in_training(model, name, inputs),
                alone=_is_alone(model, name, features, inputs, precision, partial(_through, closings.get(closing), logits)),
                precision=precision,
                closing=closing,
            )
    if not calls:
        raise Refused("the model has no linear layer: there is no head whose gradient could be taken apart")
    raise Refused(
        f"the output of the last linear layer {calls[-1].name!r} is not the model's output: something follows it. "
        "Let the model return its logits, without softmax or scaling"
    )


def _non_negative_in_training(model: nn.Module, name: str, inputs: Tensor) -> bool:
    """Whether no feature is negative in the model's own mode either, where batch norm sees the batch; True where all is in eval mode."""
    if not any(module.training for module in model.modules()):
        return True
    with torch.random.fork_rng([inputs.device] if inputs.is_cuda else []):
        try:
            return bool((input_of(model, name, inputs) >= 0).all())
        except (RuntimeError, ValueError):  # cannot run on these inputs in this mode: nothing is known
            return False


def _closing_of(logits: Tensor, output: Tensor, allow_shift: bool, closings: Mapping[str, Callable[[Tensor], Tensor]]) -> str | None:
    """What makes the model's output of the logits: "" where they are the output, and None where nothing known does."""
    if _same(logits, output, allow_shift):
        return ""
    return next((name for name, close in closings.items() if _same(close(logits), output, allow_shift=False)), None)


def _through(closing: Callable[[Tensor], Tensor] | None, logits: Tensor, slopes: Tensor) -> Tensor:
    """Slopes at the model's output as slopes at the logits, of which `closing` makes the output."""
    if closing is None:
        return slopes
    at = logits.detach().requires_grad_()
    with torch.enable_grad():
        return torch.autograd.grad(closing(at), at, slopes)[0]


def _is_alone(model: nn.Module, name: str, features: Tensor, inputs: Tensor, precision: float, through: Callable[[Tensor], Tensor]) -> bool:
    """Whether the gradient at the layer's weight is the layer's own: output slopes, which sum to 0 per sample, times features.

    True where it cannot be told: the weight is no parameter, or has no gradient at all.
    """
    key = parameter_name(model, name, "weight")
    parameters = {other: parameter.detach() for other, parameter in model.named_parameters(remove_duplicate=False)}
    if key not in parameters:
        return True
    weight = parameters[key].clone().requires_grad_()
    tied = {other: weight for other, parameter in parameters.items() if parameter.data_ptr() == parameters[key].data_ptr()}
    try:
        with torch.enable_grad(), evaluation_mode(model):
            output = _as_rows(forward(model, parameters | tied, inputs, tie_weights=False))
            slopes = torch.randn(output.shape, generator=generator(0, "output slopes")).to(output)
            slopes = slopes - slopes.mean(1, keepdim=True) if slopes.shape[1] > 1 else slopes
            (gradient,) = torch.autograd.grad(output, weight, slopes)
    except RuntimeError:
        return True
    slopes = through(slopes)
    own, size = slopes.double().T @ features.double(), slopes.double().abs().T @ features.double().abs()
    return bool(((gradient.double() - own).abs() <= ROUNDINGS * precision * (size + size.mean())).all())


def _as_rows(output: Any) -> Any:
    """Outputs (B,) as (B, 1); anything else as it is."""
    return output[:, None] if isinstance(output, Tensor) and output.ndim == 1 else output


def _probe_inputs(model: nn.Module, input_shape: tuple[int, ...], blank: Any = None) -> Any:
    parameter = next(model.parameters(), torch.zeros(()))
    blank = blank_for(model, input_shape) if blank is None else blank
    if blank is not None:
        return random_texts(model, blank, PROBES, generator(0, "head probes"))
    noise = torch.randn(PROBES, *input_shape, generator=generator(0, "head probes"))
    noise[PROBES // 2 :] *= 8  # a cap on the logits bends only large ones
    return noise.to(device=parameter.device, dtype=parameter.dtype)


def _has_matrix(_: str, module: nn.Module) -> bool:
    """Selects the layers whose weight is a matrix that multiplies their input."""
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.ndim == 2 and not isinstance(module, nn.Embedding)


def _is_affine(layer: nn.Module, features: object, logits: Tensor) -> bool:
    weight, bias = _parameters(layer)
    if not isinstance(features, Tensor) or features.ndim != 2 or features.shape[1] != weight.shape[1]:
        return False
    kind = logits.dtype  # what autocast casts to
    product = nn.functional.linear(features.to(kind), weight.to(kind), None if bias is None else bias.to(kind))
    return _same(product, logits, allow_shift=False)


def _parameters(layer: nn.Module) -> tuple[Tensor, Tensor | None]:
    """The matrix and the bias, if there is one, of a layer that `_has_matrix` selected."""
    weight, bias = layer.weight, getattr(layer, "bias", None)
    assert isinstance(weight, Tensor)
    return weight, bias if isinstance(bias, Tensor) else None


def _same(logits: Tensor, output: Tensor, allow_shift: bool) -> bool:
    """Whether the two differ by no more than rounding, sample by sample."""
    difference = (logits - output).double()
    if allow_shift:
        difference = difference - difference.mean(1, keepdim=True)
    rounding = ROUNDINGS * torch.finfo(output.dtype).eps * (1 + output.double().abs().amax(1))
    return bool((difference.abs().amax(1) <= rounding).all())


def _describe(output: object) -> str:
    return f"a tensor of shape {tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
