"""Checks of a model, a batch and an update before anything is computed from them. An error names what is wrong."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from dosimeter.interfaces import Defense, Exposure, Loss
from dosimeter.network.probing import output_of
from dosimeter.normalization import input_bounds
from dosimeter.options import check_value
from dosimeter.types import Batch, Normalization, Update

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
    check_update(exposure.update, dict(exposure.model.named_parameters()))


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


def check_tensors(batch: Batch, path: str) -> None:
    """Refuse what is no pair of tensors with values."""
    if not isinstance(batch, Batch):
        raise TypeError(f"{path}: expected a Batch, got {type(batch).__name__}")
    inputs, targets = batch.inputs, batch.targets
    if not isinstance(inputs, Tensor) or not isinstance(targets, Tensor):
        raise TypeError(f"{path}: expected tensors, got {type(inputs).__name__} and {type(targets).__name__}")
    for name, tensor in (("inputs", inputs), ("targets", targets)):
        if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
            raise ValueError(f"{path}.{name}: expected a dense tensor with values, got {tensor.layout} on {tensor.device}")


def check_batch(model: nn.Module, batch: Batch, path: str, loss: Loss | None = None) -> int:
    """Refuse a batch that the model cannot take or whose labels do not fit the loss. Return the number of classes."""
    check_model(model)
    check_tensors(batch, path)
    inputs, targets = batch.inputs, batch.targets
    if inputs.ndim < 2 or len(inputs) == 0:
        raise ValueError(f"{path}.inputs: expected a batch of at least one sample, got shape {tuple(inputs.shape)}")
    if not inputs.is_floating_point():
        raise ValueError(f"{path}.inputs: expected floating point, got {inputs.dtype}; divide pixel values by 255")
    if not torch.isfinite(inputs).all():
        raise ValueError(f"{path}.inputs: has NaN or infinite values")
    if targets.ndim == 0 or len(targets) != len(inputs):
        raise ValueError(f"{path}.targets: expected {len(inputs)}, one for each input, got shape {tuple(targets.shape)}")
    classes = count_classes(model, inputs[:1].repeat_interleave(2, 0))
    if loss is not None:
        check_loss(loss, classes)
    _check_targets(targets, classes, f"{path}.targets", loss)
    return classes


def check_loss(loss: Loss, classes: int) -> None:
    """Refuse a softmax loss over one logit, whose probability is always 1."""
    if classes == 1 and loss.shift_invariant:
        raise ValueError(
            f"loss: {loss.name} over one logit has the gradient zero for every sample, so nothing is trained; "
            "use binary_cross_entropy (PyTorch's BCEWithLogitsLoss), or give the model two logits"
        )


def _check_targets(targets: Tensor, classes: int, path: str, loss: Loss | None) -> None:
    if targets.ndim == 1:
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


def count_classes(model: nn.Module, inputs: Tensor) -> int:
    """The number of the model's logits, found without side effects on its buffers or on random numbers."""
    try:
        with torch.random.fork_rng():
            output = output_of(model, inputs)
    except Exception as error:  # a user's model may fail in any way on inputs that do not fit
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"model: cannot take {inputs.dtype} inputs of shape {tuple(inputs.shape[1:])}: {reason}") from error
    if not isinstance(output, Tensor) or output.ndim != 2:
        what = f"shape {tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
        raise ValueError(f"model: expected one (batch, classes) tensor of logits, got {what}")
    return output.shape[1]


def check_normalization(normalization: Normalization, channels: int) -> None:
    """Refuse a normalisation that does not fit inputs of so many channels."""
    check_value(Normalization, normalization, "normalization")
    mean, std = (check_value(tuple[float, ...], getattr(normalization, name), f"normalization.{name}") for name in ("mean", "std"))
    fits = len(mean) == len(std) and len(mean) in (1, channels)
    if not fits or not all(map(math.isfinite, mean)) or not all(0 < value < math.inf for value in std):
        raise ValueError(f"normalization: expected one mean and one positive std, or {channels} of each, got {normalization}")


def warn_outside_bounds(inputs: Tensor, normalization: Normalization) -> None:
    check_normalization(normalization, inputs.shape[1])
    low, high = input_bounds(normalization, inputs)
    slack = 1e-3 * (high - low)
    if bool((inputs < low - slack).any()) or bool((inputs > high + slack).any()):
        warnings.warn(
            f"inputs reach from {inputs.min():.3g} to {inputs.max():.3g}, outside what the normalisation maps pixels in [0, 1] to; "
            "attacks and PSNR assume that range: pass normalization=dm.Normalization(mean=..., std=...)",
            stacklevel=3,
        )
