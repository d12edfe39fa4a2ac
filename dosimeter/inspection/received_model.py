"""The model that a client receives, run once on its own data or on probes, with everything that the checks look at."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate
from torch.nn.parameter import is_lazy

from dosimeter.client.checks import check_batch
from dosimeter.inspection.acting_head import find_acting_head, logits_of
from dosimeter.inspection.layer import LinearLayer, bare_layers, linear_layer
from dosimeter.network.copies import deep_copy
from dosimeter.network.head import locate_head
from dosimeter.network.input_shape import find_input_shape
from dosimeter.network.probing import as_taken, input_of, record_inputs
from dosimeter.randomness import generator
from dosimeter.types import Batch, NamedInputs, Refused

PROBES = 24
COARSE_SIDE = 4  # pixels of the random patterns that are enlarged to probes


@dataclass(frozen=True, kw_only=True)
class ReceivedModel:
    """The model, its layers, and what they receive on the inputs."""

    model: nn.Module  # a copy in eval mode
    inputs: Tensor  # (B, *shape): the client's own, or probes
    targets: Tensor | None  # (B,) or (B, C), the client's own
    logits: Tensor  # (B, C); the logarithms of the outputs where the model ends in a softmax
    linear: tuple[LinearLayer, ...]  # in the order in which they run, with the head; then parameters that no module applies
    later_inputs: tuple[Tensor, ...]  # what layers with weights receive after a linear layer has taken the whole input
    head: LinearLayer | None  # what acts as the last layer; None where nothing is found
    reference: nn.Module | None

    @property
    def hidden(self) -> list[LinearLayer]:
        """The linear layers before the last one."""
        return [layer for layer in self.linear if self.head is None or layer.parameter != self.head.parameter]

    @property
    def on_input(self) -> list[LinearLayer]:
        """The hidden linear layers that take the whole raw input."""
        flat = self.inputs.flatten(1)
        return [layer for layer in self.hidden if layer.received.shape == flat.shape and torch.equal(layer.received, flat)]

    @property
    def labels(self) -> Tensor:
        """The likeliest class of each of the client's samples: (B,)."""
        assert self.targets is not None
        return self.targets.argmax(1) if self.targets.ndim == 2 else self.targets


def receive_model(model: nn.Module, batch: Batch | None, reference: nn.Module | None) -> ReceivedModel:
    """Run a copy of the model once, in eval mode, and record its layers' inputs. Refuses a model that is no classifier or not finite."""
    check_weights(model, "model")
    if batch is not None and not isinstance(batch, Batch):
        raise TypeError(f"batch: expected a Batch, got {type(batch).__name__}")
    if batch is not None and isinstance(batch.inputs, NamedInputs):
        raise TypeError(
            f"batch.inputs: expected one tensor, which inspect holds against every layer's rows; got {', '.join(batch.inputs.tensors)}"
        )
    if reference is not None:
        check_weights(reference, "reference")
    model = deep_copy(model).eval()
    if next(model.parameters()).dtype in (torch.float16, torch.bfloat16):
        model = model.float()
        batch = None if batch is None else replace(batch, inputs=batch.inputs.float())
    if batch is not None:
        check_batch(model, batch, "batch")
    inputs = _probes(model) if batch is None else as_taken(model, batch.inputs)
    outputs, layer_inputs = record_inputs(model, inputs, lambda _, module: isinstance(getattr(module, "weight", None), Tensor))
    applied = [layer for layer in (linear_layer(name, module, x) for name, module, x in layer_inputs) if layer is not None]
    bare = bare_layers(model, inputs, applied)
    return ReceivedModel(
        model=model,
        inputs=inputs,
        targets=None if batch is None else _class_ids(batch.targets).to(inputs.device),
        logits=logits_of(outputs),
        linear=(*applied, *bare),
        later_inputs=_after_whole_input(layer_inputs, inputs, bare),
        head=_head(model, inputs, outputs.shape[1], applied),
        reference=reference,
    )


def _class_ids(targets: Tensor) -> Tensor:
    """Class ids of any integer type as indices; soft labels as they are."""
    return targets if targets.is_floating_point() else targets.long()


def check_weights(model: nn.Module, path: str) -> None:
    """Refuse anything but a network of finite floating-point weights."""
    if not isinstance(model, nn.Module):
        hint = "; load the weights into a copy of the model" if path == "reference" and isinstance(model, dict) else ""
        raise TypeError(f"{path}: expected a torch.nn.Module, got {type(model).__name__}{hint}")
    state = model.state_dict()
    packed = [name for name, value in state.items() if not isinstance(value, Tensor) or value.is_quantized]
    if packed:
        raise ValueError(f"{path}: {packed[0]!r} is quantised to integers; inspect reads floating-point weights, before they are quantised")
    if sparse := [name for name, value in state.items() if value.layout != torch.strided]:
        raise ValueError(f"{path}: {sparse[0]!r} is a sparse tensor; inspect reads dense weights, as `to_dense` gives them")
    if empty := [name for name, value in state.items() if value.is_meta or is_lazy(value)]:
        raise ValueError(f"{path}: {empty[0]!r} has no values yet; load the weights first")
    broken = [name for name, value in state.items() if value.is_floating_point() and not torch.isfinite(value).all()]
    if broken:
        raise ValueError(f"{path}: has NaN or infinite entries in {broken[0]!r}")
    if next(model.parameters(), None) is None:
        raise ValueError(f"{path}: has no parameters, so there is nothing to inspect")


def _head(model: nn.Module, inputs: Tensor, classes: int, applied: list[LinearLayer]) -> LinearLayer | None:
    """The layer whose output is the model's, else a parameter that acts as one, else the last linear layer if its rows are the classes."""
    try:
        name = locate_head(model, tuple(inputs.shape[1:]))[0]
    except Refused:
        acting = find_acting_head(model, inputs, classes)
        return acting or next((layer for layer in applied[:-2:-1] if len(layer.weight) == classes), None)
    return linear_layer(name, model.get_submodule(name), input_of(model, name, inputs), proved=True)


def _after_whole_input(layer_inputs: list[tuple[str, nn.Module, Tensor]], inputs: Tensor, bare: list[LinearLayer]) -> tuple[Tensor, ...]:
    """What layers receive after a linear layer has taken the raw input, where it has the input's size: (B, input entries) each.

    Nobody sees when bare parameters are applied. Where there are any, every layer counts as a later one, except their own module.
    """
    flat = inputs.flatten(1)
    layers = (linear_layer(name, module, x) for name, module, x in layer_inputs)
    whole = (i for i, layer in enumerate(layers) if layer and layer.received.shape == flat.shape and torch.equal(layer.received, flat))
    owners = {layer.parameter.rpartition(".")[0].partition(".parametrizations.")[0] for layer in bare}
    first = -1 if bare else next(whole, None)
    if first is None:
        return ()
    return tuple(x.flatten(1) for name, _, x in layer_inputs[first + 1 :] if x.flatten(1).shape == flat.shape and name not in owners)


def _probes(model: nn.Module) -> Tensor:
    """Smooth patterns in [0, 1] of many brightnesses and contrasts: they differ as images do, unlike noise."""
    try:
        shape = find_input_shape(model)
    except Refused:
        raise Refused("inspect finds no input that passes through this model; give it a batch of your own data (--data)") from None
    rng = generator(0, "inspection probes")
    brightness, contrast = torch.rand(2, PROBES, *[1] * len(shape), generator=rng)
    if len(shape) == 3:
        coarse = torch.randn(PROBES, shape[0], COARSE_SIDE, COARSE_SIDE, generator=rng)
        pattern = interpolate(coarse, shape[1:], mode="bilinear", align_corners=False)
    else:
        pattern = torch.randn(PROBES, *shape, generator=rng)
    return (brightness + contrast * pattern).clamp(0, 1).to(next(model.parameters()))
