"""The client's side, and the wall: a private batch goes in, an exposure comes out, and nothing behind it reaches the batch."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dosimeter.interfaces import Defense, Loss, Training
from dosimeter.losses import CrossEntropy
from dosimeter.normalization import input_bounds
from dosimeter.randomness import generator, seeded
from dosimeter.training import FedSGD
from dosimeter.types import Batch, Client, Exposure, Normalization, Public, Update


def observe(
    model: nn.Module,
    batch: Batch,
    *,
    training: Training | None = None,
    defenses: Sequence[Defense] = (),
    loss: Loss | None = None,
    normalization: Normalization | None = None,
    auxiliary: Batch | None = None,
    declare_batch_size: bool = True,
    seed: int = 0,
) -> Exposure:
    """Let a client train on `batch` behind `defenses`, and return all that the server then has.

    The model's current mode (train or eval) is the client's mode. Neither the model nor the batch is changed, and the
    exposure holds copies, so that nothing done to either afterwards can change what the server knows.
    """
    normalization = normalization or Normalization()
    client = Client(model=copy.deepcopy(model), batch=batch, training=training or FedSGD(), loss=loss or CrossEntropy())
    classes = check_batch(client.model, batch, "batch")
    if auxiliary is not None:
        check_batch(client.model, auxiliary, "auxiliary")
        auxiliary = Batch(auxiliary.inputs.detach().clone(), auxiliary.targets.detach().clone())
    _warn_outside_bounds(batch.inputs, normalization)
    for position, defense in enumerate(defenses):
        client = defense(client, generator(seed, f"defense {position} {defense.name}", batch.inputs.device))
    with seeded(seed, "training"):
        update = client.training(client.model, client.batch.inputs, client.batch.targets, client.loss)
    for transform in client.outgoing:
        update = transform(update)
    public = Public(
        input_shape=tuple(client.batch.inputs.shape[1:]),
        classes=classes,
        batch_size=len(batch.inputs) if declare_batch_size else None,
        loss=client.loss,
        training=client.training,
        train_mode=client.model.training,
        normalization=normalization,
        defenses=tuple(defenses),
    )
    update = {name: change.detach().clone() for name, change in update.items()}
    exposure = Exposure(model=client.model, update=update, public=public, auxiliary=auxiliary)
    check_exposure(exposure)
    return exposure


def receive(
    model: nn.Module,
    update: Update,
    *,
    input_shape: Sequence[int],
    batch_size: int | None = None,
    training: Training | None = None,
    loss: Loss | None = None,
    normalization: Normalization | None = None,
    defenses: Sequence[Defense] = (),
    auxiliary: Batch | None = None,
) -> Exposure:
    """An exposure from an update that some federation really sent, by parameter name and in a gradient's units."""
    model = copy.deepcopy(model)
    public = Public(
        input_shape=tuple(input_shape),
        classes=_classes(model, torch.zeros(2, *input_shape)),
        batch_size=batch_size,
        loss=loss or CrossEntropy(),
        training=training or FedSGD(),
        train_mode=model.training,
        normalization=normalization or Normalization(),
        defenses=tuple(defenses),
    )
    exposure = Exposure(model=model, update={k: v.detach().clone() for k, v in update.items()}, public=public, auxiliary=auxiliary)
    check_exposure(exposure)
    return exposure


def check_exposure(exposure: Exposure) -> None:
    """Refuse an update that does not fit its model, or that is not finite."""
    shapes = {name: tuple(parameter.shape) for name, parameter in exposure.model.named_parameters()}
    if not exposure.update:
        raise ValueError("update: the client sent no layer at all")
    for name, change in exposure.update.items():
        if name not in shapes:
            raise ValueError(f"update: the model has no parameter {name!r}")
        if tuple(change.shape) != shapes[name]:
            raise ValueError(f"update.{name}: expected shape {shapes[name]} as in the model, got {tuple(change.shape)}")
        if not torch.isfinite(change).all():
            raise ValueError(f"update.{name}: has NaN or infinite entries; the loss or the training diverged on this batch")


def check_batch(model: nn.Module, batch: Batch, path: str) -> int:
    """Refuse a batch that the model cannot take or whose labels are out of range; return the number of classes."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(batch, Batch):
        raise TypeError(f"{path}: expected a Batch, got {type(batch).__name__}")
    inputs, targets = batch.inputs, batch.targets
    if not isinstance(inputs, Tensor) or not isinstance(targets, Tensor):
        raise TypeError(f"{path}: expected tensors, got {type(inputs).__name__} and {type(targets).__name__}")
    if inputs.ndim < 2 or len(inputs) == 0:
        raise ValueError(f"{path}.inputs: expected a batch of at least one sample, got shape {tuple(inputs.shape)}")
    if not inputs.is_floating_point():
        raise ValueError(f"{path}.inputs: expected floating point, got {inputs.dtype}; divide pixel values by 255")
    if not torch.isfinite(inputs).all():
        raise ValueError(f"{path}.inputs: has NaN or infinite values")
    if len(targets) != len(inputs):
        raise ValueError(f"{path}.targets: expected {len(inputs)}, one for each input, got {len(targets)}")
    classes = _classes(model, inputs[:1].repeat_interleave(2, 0))
    _check_targets(targets, classes, f"{path}.targets")
    return classes


def _check_targets(targets: Tensor, classes: int, path: str) -> None:
    if targets.ndim == 1:
        if targets.is_floating_point():
            raise ValueError(f"{path}: class ids must be integers, got {targets.dtype}")
        highest = max(classes, 2) - 1  # one logit: a yes-or-no question
        if int(targets.min()) < 0 or int(targets.max()) > highest:
            raise ValueError(f"{path}: class ids must lie in 0..{highest}, got {int(targets.min())}..{int(targets.max())}")
    elif targets.ndim == 2 and targets.shape[1] == classes:
        if not targets.is_floating_point() or not torch.isfinite(targets).all() or bool((targets < 0).any()):
            raise ValueError(f"{path}: soft labels must be finite numbers of at least 0")
    else:
        raise ValueError(f"{path}: expected (B,) class ids or (B, {classes}) soft labels, got shape {tuple(targets.shape)}")


def _classes(model: nn.Module, inputs: Tensor) -> int:
    """How many logits the model gives; found without touching its mode's side effects."""
    parameter = next(model.parameters(), None)
    if parameter is None:
        raise ValueError("model: has no parameters, so there is no gradient to audit")
    state = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    try:
        with torch.no_grad(), torch.random.fork_rng():
            output = torch.func.functional_call(model, state, (inputs.to(parameter.device, parameter.dtype),))
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"model: cannot take inputs of shape {tuple(inputs.shape[1:])}: {reason}") from error
    if not isinstance(output, Tensor) or output.ndim != 2:
        what = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise ValueError(f"model: expected one (batch, classes) tensor of logits, got {what}")
    return output.shape[1]


def _warn_outside_bounds(inputs: Tensor, normalization: Normalization) -> None:
    channels = len(normalization.mean)
    if (
        len(normalization.std) != channels
        or channels not in (1, inputs.shape[1])
        or not all(s > 0 and math.isfinite(s) for s in normalization.std)
    ):
        raise ValueError(f"normalization: expected 1 or {inputs.shape[1]} means and positive stds, got {normalization}")
    low, high = input_bounds(normalization, inputs)
    slack = 1e-3 * (high - low)
    if bool((inputs < low - slack).any()) or bool((inputs > high + slack).any()):
        warnings.warn(
            f"inputs reach from {inputs.min():.3g} to {inputs.max():.3g}, outside what the normalisation maps pixels in [0, 1] to; "
            "attacks and PSNR assume that range: pass normalization=dm.Normalization(mean=..., std=...)",
            stacklevel=3,
        )
