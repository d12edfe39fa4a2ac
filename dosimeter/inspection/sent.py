"""The model that a client was sent, run once on its own data or on probes, with all that the checks look at."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from dosimeter.client import check_batch
from dosimeter.head import input_of, locate_head
from dosimeter.randomness import generator
from dosimeter.tampering.input_shape import find_input_shape
from dosimeter.types import Batch, Refused

PROBES = 24
COARSE = 4  # pixels a side of the patterns that probes are made of


@dataclass(frozen=True, kw_only=True)
class LinearLayer:
    """A linear layer as the forward pass met it."""

    name: str
    weight: Tensor  # (out, in) float64 or the model's own, on its device
    bias: Tensor | None
    received: Tensor  # (B, in)


@dataclass(frozen=True, kw_only=True)
class Sent:
    """What a check may look at."""

    model: nn.Module  # a copy in eval mode
    inputs: Tensor  # (B, *shape): the client's own, or probes
    targets: Tensor | None  # (B,) or (B, C), the client's own
    logits: Tensor  # (B, C)
    linear: tuple[LinearLayer, ...]  # in the order of execution, the head among them
    later_inputs: tuple[Tensor, ...]  # what layers with weights received after the first linear layer had seen the whole input
    head: LinearLayer | None  # the last linear layer, where it has an output for each class
    reference: nn.Module | None

    @property
    def hidden(self) -> list[LinearLayer]:
        """The linear layers before the last one."""
        return [layer for layer in self.linear if self.head is None or layer.name != self.head.name]

    @property
    def labels(self) -> Tensor:
        """The likeliest class of each of the client's samples: (B,)."""
        assert self.targets is not None
        return self.targets.argmax(1) if self.targets.ndim == 2 else self.targets


def receive_model(model: nn.Module, batch: Batch | None, reference: nn.Module | None) -> Sent:
    """Run the model once, in eval mode, and note what its layers met; refuses what is no classifier or not finite."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    broken = [name for name, value in model.state_dict().items() if value.is_floating_point() and not torch.isfinite(value).all()]
    if broken:
        raise ValueError(f"model: has NaN or infinite entries in {broken[0]!r}")
    model = copy.deepcopy(model).eval()
    if next(model.parameters()).dtype in (torch.float16, torch.bfloat16):
        model = model.float()
    if batch is not None:
        check_batch(model, batch, "batch")
    inputs = _probes(model) if batch is None else batch.inputs.to(next(model.parameters()))
    head = _head_name(model, tuple(inputs.shape[1:]))
    met: list[tuple[str, nn.Module, Tensor]] = []
    hooks = [
        module.register_forward_pre_hook(lambda m, x, name=name: met.append((name, m, x[0].detach())))
        for name, module in model.named_modules()
        if isinstance(getattr(module, "weight", None), Tensor)
    ]
    try:
        with torch.no_grad():
            logits = model(inputs)
    finally:
        for hook in hooks:
            hook.remove()
    linear = tuple(_linear(name, module, x) for name, module, x in met if isinstance(module, nn.Linear) and x.ndim == 2)
    if head is None:  # no layer's output is the model's: it may end in a softmax or a temperature
        last = next((layer for layer in linear[:-2:-1] if len(layer.weight) == logits.shape[1]), None)
    else:
        last = next((layer for layer in linear if layer.name == head), None)
        last = last or _linear(head, model.get_submodule(head), input_of(model, head, inputs))
    return Sent(
        model=model,
        inputs=inputs,
        targets=None if batch is None else batch.targets.to(inputs.device),
        logits=logits,
        linear=linear,
        later_inputs=_after_whole_input(met, inputs),
        head=last,
        reference=reference,
    )


def _linear(name: str, module: nn.Module, received: Tensor) -> LinearLayer:
    assert isinstance(module.weight, Tensor)
    bias = getattr(module, "bias", None)
    return LinearLayer(name=name, weight=module.weight.detach(), bias=None if bias is None else bias.detach(), received=received)


def _after_whole_input(met: list[tuple[str, nn.Module, Tensor]], inputs: Tensor) -> tuple[Tensor, ...]:
    """What layers received that ran after a linear layer had taken the raw input: each (B, as many as the input has)."""
    flat = inputs.flatten(1)
    first = next((i for i, (_, m, x) in enumerate(met) if isinstance(m, nn.Linear) and torch.equal(x.flatten(1), flat)), None)
    if first is None:
        return ()
    return tuple(x.flatten(1) for _, _, x in met[first + 1 :] if x.flatten(1).shape == flat.shape)


def _head_name(model: nn.Module, shape: tuple[int, ...]) -> str | None:
    try:
        return locate_head(model, shape)[0]
    except Refused:
        return None


def _probes(model: nn.Module) -> Tensor:
    """Smooth patterns in [0, 1] of many brightnesses and contrasts: nearer to data than noise, which all looks alike."""
    try:
        shape = find_input_shape(model)
    except Refused:
        raise Refused("inspect finds no input that passes through this model; give it a batch of your own data (--data)") from None
    rng = generator(0, "inspection probes")
    brightness, contrast = torch.rand(2, PROBES, *[1] * len(shape), generator=rng)
    if len(shape) == 3:
        coarse = torch.randn(PROBES, shape[0], COARSE, COARSE, generator=rng)
        pattern = interpolate(coarse, shape[1:], mode="bilinear", align_corners=False)
    else:
        pattern = torch.randn(PROBES, *shape, generator=rng)
    return (brightness + contrast * pattern).clamp(0, 1).to(next(model.parameters()))
