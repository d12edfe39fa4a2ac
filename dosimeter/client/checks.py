"""Checks of a model, a batch and an update before anything is computed from them. An error names what is wrong."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dosimeter.client.losses import OwnLoss, SquaredError, TokenCrossEntropy
from dosimeter.columns import Columns
from dosimeter.interfaces import Defense, Exposure, Loss
from dosimeter.network.probing import output_of
from dosimeter.network.token_inputs import are_tokens
from dosimeter.normalization import input_bounds
from dosimeter.options import check_value, first_line
from dosimeter.types import Batch, NamedInputs, Normalization, Update

CLASS_ID_TYPES = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8})
WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)
SENT_TYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})  # of an update's tensors


def defense_list(defenses: Sequence[Defense | str] | Defense | str) -> Sequence[Defense | str]:
    """The defenses as a list. A single defense is a list of one."""
    if isinstance(defenses, (str, Defense)):
        return (defenses,)
    if isinstance(defenses, Mapping) or not isinstance(defenses, Iterable):
        raise TypeError(f"defenses: expected a list of defenses or of their names, got {defenses!r}")
    return defenses


def check_exposure(exposure: Exposure) -> None:
    """Refuse an update that does not fit its model, or that is not finite."""
    require_exposure(exposure)
    check_update(exposure.update, dict(exposure.model.named_parameters()))


def require_exposure(exposure: Any, path: str = "exposure") -> None:
    """Refuse what is no exposure."""
    if not isinstance(exposure, Exposure):
        raise TypeError(f"{path}: expected an Exposure, as dm.observe and dm.receive give it, got {type(exposure).__name__}")


def check_update(update: Update, parameters: Mapping[str, Tensor]) -> None:
    """Refuse an update that does not fit the model's parameters, or that is not finite."""
    if not update:
        raise ValueError("update: the client sent no layer at all")
    for name, change in update.items():
        if name not in parameters:
            raise ValueError(f"update: the model has no parameter {name!r}")
        if change.layout is not torch.strided or change.dtype not in SENT_TYPES:
            kind = change.dtype if change.layout is torch.strided else f"{change.layout} of {change.dtype}"
            raise ValueError(f"update.{name}: expected a dense tensor of half, single or double precision, got {kind}")
        if change.shape != parameters[name].shape:
            raise ValueError(f"update.{name}: expected shape {tuple(parameters[name].shape)} as in the model, got {tuple(change.shape)}")
        if not math.isfinite(float(change.sum())) and not torch.isfinite(change).all():  # a finite sum is proof and cheaper
            raise ValueError(f"update.{name}: has NaN or infinite entries; the loss or the training diverged on this batch")


def check_dense(tensor: Any, path: str) -> None:
    """Refuse what is no dense tensor with values."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{path}: expected a tensor, got {type(tensor).__name__}")
    if tensor.is_nested or tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
        kind = "a nested one" if tensor.is_nested else tensor.layout
        raise ValueError(f"{path}: expected a dense tensor with values, got {kind} of {tensor.dtype} on {tensor.device}")


def check_tensor(tensor: Any, path: str) -> None:
    """Refuse what is no dense tensor of numbers that a network computes with, or of ids."""
    check_dense(tensor, path)
    if tensor.is_complex():
        raise ValueError(f"{path}: expected real numbers, got {tensor.dtype}")
    if tensor.is_floating_point() and tensor.dtype not in SENT_TYPES:
        raise ValueError(f"{path}: expected half, single or double precision, got {tensor.dtype}")


def check_samples(batch: Any, path: str) -> None:
    """Refuse what is no batch of at least one sample with one target each."""
    if isinstance(batch, Batch):
        check_tensors(batch, path)
    if not isinstance(batch, Batch) or not batch.inputs.shape or not len(batch.inputs) or batch.targets.shape[:1] != batch.inputs.shape[:1]:
        raise ValueError(f"{path}: expected a Batch of at least one sample with one target each")


def check_tensors(batch: Batch, path: str) -> None:
    """Refuse what is no pair of tensors with values."""
    if not isinstance(batch, Batch):
        raise TypeError(f"{path}: expected a Batch, got {type(batch).__name__}")
    inputs, targets = batch.inputs, batch.targets
    named = inputs.tensors if isinstance(inputs, NamedInputs) else {"": inputs}
    if not named or not all(isinstance(tensor, Tensor) for tensor in (*named.values(), targets)):
        got = next((tensor for tensor in named.values() if not isinstance(tensor, Tensor)), inputs)
        raise TypeError(f"{path}: expected tensors, got {type(got).__name__} and {type(targets).__name__}")
    fields = [("inputs" + (f".{name}" if name else ""), tensor) for name, tensor in named.items()]
    for name, tensor in (*fields, ("targets", targets)):
        check_tensor(tensor, f"{path}.{name}")


def check_batch(model: nn.Module, batch: Batch, path: str, loss: Loss | None = None) -> int:
    """Refuse a batch that the model cannot take or whose labels do not fit the loss. Return the number of classes."""
    check_model(model)
    check_tensors(batch, path)
    inputs, targets = batch.inputs, batch.targets
    check_inputs(inputs, f"{path}.inputs")
    if targets.ndim == 0 or len(targets) != len(inputs):
        raise ValueError(f"{path}.targets: expected {len(inputs)}, one for each input, got shape {tuple(targets.shape)}")
    shape = output_shape(model, inputs[[0, 0]])
    classes = class_count(shape, are_tokens(inputs), targets)
    if loss is not None:
        check_loss(loss, classes)
    if isinstance(loss, SquaredError):
        _check_numbers(targets, shape, f"{path}.targets")
    elif not isinstance(loss, OwnLoss):
        _check_targets(targets, shape, f"{path}.targets", loss)
    elif loss.target_kind() == "classes" and len(shape) == 4:
        _check_class_maps(targets, shape, f"{path}.targets", getattr(loss.function, "ignore_index", -100))
    return classes


def class_count(output: tuple[int, ...], tokens: bool, targets: Tensor | None = None) -> int:
    """How many numbers an output (B, ...) has for each sample, or for each place where there are several."""
    return 1 if len(output) == 1 else output[class_axis(output, tokens, targets)]


def class_axis(output: tuple[int, ...], tokens: bool, targets: Tensor | None = None) -> int:
    """The side of an output (B, ...) along which its classes lie: the second, as PyTorch has it, or the last at positions (B, T, V)."""
    if tokens or len(output) == 2:
        return -1
    at_steps = targets is not None and len(output) == 3 and targets.shape[1:2] == output[1:2] and targets.shape[1:] != output[2:]
    return -1 if at_steps else 1


def _check_numbers(targets: Tensor, output: tuple[int, ...], path: str) -> None:
    """Refuse targets of a regression that are not one number for each output. PyTorch would repeat them to fit, and train on nonsense."""
    if not targets.is_floating_point() or not torch.isfinite(targets).all():
        raise ValueError(f"{path}: expected finite floating-point numbers for squared_error, got {targets.dtype}")
    if tuple(targets.shape[1:]) != output[1:]:
        expected = f"(B{''.join(f', {side}' for side in output[1:])})"
        raise ValueError(f"{path}: expected {expected}, one number for each output of the model, got shape {tuple(targets.shape)}")


def _check_class_maps(targets: Tensor, output: tuple[int, ...], path: str, ignored: int) -> None:
    """Refuse class ids that are not one for each place of a dense output (B, C, H, W)."""
    if targets.is_floating_point() and tuple(targets.shape[1:]) == output[1:]:
        return  # a distribution at each place
    if targets.dtype not in CLASS_ID_TYPES or tuple(targets.shape[1:]) != output[2:]:
        places = ", ".join(map(str, output[2:]))
        raise ValueError(f"{path}: expected (B, {places}) class ids, got {targets.dtype} of shape {tuple(targets.shape)}")
    counted = targets[targets != ignored]
    if len(counted) == 0 or int(counted.min()) < 0 or int(counted.max()) >= output[1]:
        raise ValueError(f"{path}: expected class ids in 0..{output[1] - 1}, or {ignored} where a place does not count")


def check_inputs(inputs: Tensor | NamedInputs, path: str) -> None:
    """Refuse what is no batch of samples: numbers, or rows of token ids."""
    if len(inputs.shape) < 2 or len(inputs) == 0:
        raise ValueError(f"{path}: expected a batch of at least one sample, got shape {tuple(inputs.shape)}")
    if isinstance(inputs, NamedInputs) and not are_tokens(inputs) and not inputs.are_numbers:
        whole = ", ".join(name for name, tensor in inputs.tensors.items() if not tensor.is_floating_point())
        raise ValueError(
            f"{path}: expected tensors of numbers, or token ids (B, T) with what goes with them, got integers in {whole} beside numbers; "
            "pass ids (B,) of a category as (B, 1), and a mask as numbers"
        )
    for name, tensor in inputs.tensors.items() if isinstance(inputs, NamedInputs) else [("", inputs)]:
        if name and (tensor.ndim == 0 or len(tensor) != len(inputs)):
            raise ValueError(f"{path}.{name}: expected {len(inputs)} samples as in the other tensors, got shape {tuple(tensor.shape)}")
        if not name and not tensor.is_floating_point() and not are_tokens(tensor):
            raise ValueError(f"{path}: expected floating point, or token ids (B, T), got {tensor.dtype}; divide pixel values by 255")
        if not torch.isfinite(tensor).all():
            raise ValueError(f"{path}{'.' + name if name else ''}: has NaN or infinite values")


def check_loss(loss: Loss, classes: int) -> None:
    """Refuse a softmax loss over one logit, whose probability is always 1."""
    if classes == 1 and loss.shift_invariant:
        raise ValueError(
            f"loss: {loss.name} over one logit has the gradient zero for every sample, so nothing is trained; "
            "use binary_cross_entropy (PyTorch's BCEWithLogitsLoss), or give the model two logits"
        )


def _check_targets(targets: Tensor, output: tuple[int, ...], path: str, loss: Loss | None) -> None:
    classes = output[-1] if len(output) > 1 else 1
    if len(output) == 3:
        ignored = loss.ignore_index if isinstance(loss, TokenCrossEntropy) else TokenCrossEntropy().ignore_index
        if targets.ndim != 2 or targets.shape[1] != output[1] or targets.dtype not in CLASS_ID_TYPES:
            raise ValueError(
                f"{path}: expected (B, {output[1]}) token ids, one for each position of the model's output, "
                f"got {targets.dtype} of shape {tuple(targets.shape)}"
            )
        counted = targets[targets != ignored]
        if len(counted) == 0 or int(counted.min()) < 0 or int(counted.max()) >= classes:
            raise ValueError(f"{path}: expected token ids in 0..{classes - 1}, or {ignored} where a position does not count")
    elif len(output) == 4:
        raise ValueError(f"{path}: {loss.name if loss else 'cross_entropy'} has one output a sample; pass nn.CrossEntropyLoss() for a grid")
    elif targets.ndim == 1 and len(output) == 1 and targets.is_floating_point():
        check_soft_labels(targets[:, None], path, loss)
    elif targets.ndim == 1:
        if targets.dtype not in CLASS_ID_TYPES:
            raise ValueError(f"{path}: class ids must be integers, got {targets.dtype}")
        highest = max(classes, 2) - 1  # one logit: two classes
        if int(targets.min()) < 0 or int(targets.max()) > highest:
            raise ValueError(f"{path}: class ids must lie in 0..{highest}, got {int(targets.min())}..{int(targets.max())}")
    elif targets.ndim == 2 and targets.shape[1] == classes:
        check_soft_labels(targets, path, loss)
    else:
        raise ValueError(f"{path}: expected (B,) class ids or (B, {classes}) soft labels, got shape {tuple(targets.shape)}")


def check_soft_labels(labels: Tensor, path: str, loss: Loss | None) -> None:
    """Refuse soft labels (B, C) that do not fit `loss`: rows of a softmax loss must sum to one, those of other losses need not."""
    if not labels.is_floating_point() or not torch.isfinite(labels).all() or bool((labels < 0).any()):
        raise ValueError(f"{path}: soft labels must be finite numbers of at least 0")
    sums = labels.sum(1, dtype=torch.float64)
    if loss is not None and loss.shift_invariant and bool(((sums - 1).abs() > 1e-2).any()):
        raise ValueError(f"{path}: each soft label must sum to 1, got sums from {sums.min():.3g} to {sums.max():.3g}")


def check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, WRAPPERS):
        raise TypeError(f"model: expected the model itself, got a {type(model).__name__} around it; pass `model.module`")
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError(f"model: expected a torch.nn.Module in Python, got a scripted or traced one, {type(model).__name__}")
    if next(model.parameters(), None) is None:
        raise ValueError("model: has no parameters, so there is no gradient to audit")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError("model: every parameter is frozen, so there is no gradient to audit")
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter) or parameter.is_meta:
            raise ValueError(f"model: parameter {name!r} has no values yet; load the weights, or run the model once")
        if not parameter.is_floating_point():
            raise ValueError(f"model: parameter {name!r}: expected floating point, got {parameter.dtype}")


def count_classes(model: nn.Module, inputs: Tensor | NamedInputs) -> int:
    """The number of the model's logits, found without side effects on its buffers or on random numbers."""
    return class_count(output_shape(model, inputs), are_tokens(inputs))


def output_shape(model: nn.Module, inputs: Tensor | NamedInputs) -> tuple[int, ...]:
    """The shape of the model's outputs: (B,), (B, classes), (B, C, H, W) on a grid, or (B, T, V) at each of T positions of a text."""
    try:
        with torch.random.fork_rng():
            output = output_of(model, inputs)
    except Exception as error:  # a user's model may fail in any way on inputs that do not fit
        kind = ", ".join(inputs.tensors) if isinstance(inputs, NamedInputs) else str(inputs.dtype)
        raise ValueError(f"model: cannot take {kind} inputs of shape {tuple(inputs.shape[1:])}: {first_line(error)}") from error
    plain = isinstance(output, Tensor) and output.layout == torch.strided and not output.is_nested
    if plain and output.device != inputs.device:
        raise ValueError(f"model: its outputs are on the device {output.device}, and its inputs on {inputs.device}")
    if not plain or not output.is_floating_point() or output.ndim == 0 or len(output) != len(inputs):
        kind = f"a {'nested' if output.is_nested else 'sparse'} tensor" if isinstance(output, Tensor) else type(output).__name__
        what = f"{output.dtype} of shape {tuple(output.shape)}" if plain else kind
        if isinstance(output, Mapping) and len(output) > 1:
            what = f"{', '.join(map(str, output))}; call one of them logits, or pass a loss that takes what the model returns"
        raise ValueError(f"model: expected one tensor of outputs for each sample, such as (batch, classes) logits, got {what}")
    return tuple(output.shape)


def check_normalization(normalization: Normalization, channels: int) -> None:
    """Refuse a normalisation that does not fit inputs of so many channels."""
    check_value(Normalization, normalization, "normalization")
    mean, std = (check_value(tuple[float, ...], getattr(normalization, name), f"normalization.{name}") for name in ("mean", "std"))
    if isinstance(normalization, Columns) and len(mean) != channels:
        raise ValueError(f"normalization: Columns declares {len(mean)} inputs of the model, and a sample has {channels}")
    fits = len(mean) == len(std) and len(mean) in (1, channels)
    if not fits or not all(map(math.isfinite, mean)) or not all(0 < value < math.inf for value in std):
        raise ValueError(f"normalization: expected one mean and one positive std, or {channels} of each, got {normalization}")


def warn_outside_bounds(inputs: Tensor, normalization: Normalization) -> None:
    check_normalization(normalization, inputs.shape[1])
    low, high = input_bounds(normalization, inputs)
    slack = 1e-3 * (high - low)
    outside = (inputs < low - slack) | (inputs > high + slack)
    if isinstance(normalization, Columns):
        beyond = [name for name, part in zip(normalization.columns, outside.any(0).split(normalization.sizes)) if bool(part.any())]
        if beyond:
            names = ", ".join(beyond)
            warnings.warn(f"values of {names} lie outside of the range that dm.Columns declares; attacks search inside it", stacklevel=3)
    elif bool(outside.any()):
        warnings.warn(
            f"inputs reach from {inputs.min():.3g} to {inputs.max():.3g}, outside what the normalisation maps pixels in [0, 1] to; "
            "attacks and PSNR assume that range: pass normalization=dm.Normalization(mean=..., std=...)",
            stacklevel=3,
        )
