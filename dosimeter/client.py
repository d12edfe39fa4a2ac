"""The client's side, and the wall: a private batch goes in, an exposure comes out, and nothing behind it reaches the batch."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from dosimeter.head import copy_of
from dosimeter.interfaces import Defense, Loss, Training
from dosimeter.losses import CrossEntropy
from dosimeter.normalization import input_bounds
from dosimeter.options import PositiveInt, checked
from dosimeter.randomness import generator, seeded
from dosimeter.registry import DEFENSES, LOSSES, TRAININGS
from dosimeter.training import FedSGD
from dosimeter.types import Batch, Client, Exposure, Normalization, Public, Refused, Update

SENT = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})  # what an update's tensors may consist of


def observe(
    model: nn.Module,
    batch: Batch,
    *,
    training: Training | str | None = None,
    defenses: Sequence[Defense | str] = (),
    loss: Loss | str | None = None,
    normalization: Normalization | None = None,
    auxiliary: Batch | None = None,
    declare_batch_size: bool = True,
    seed: int = 0,
) -> Exposure:
    """Let a client train on `batch` behind `defenses`, and return all that the server then has.

    The model's current mode (train or eval) is the client's mode. Neither the model nor the batch is changed, and the
    exposure holds copies, so that nothing done to either afterwards can change what the server knows.
    """
    scale: Normalization = checked(Normalization, normalization or Normalization(), "normalization")
    training, loss = TRAININGS.resolve(training or FedSGD()), LOSSES.resolve(loss or CrossEntropy())
    defenses = [DEFENSES.resolve(defense) for defense in listed(defenses)]
    seed, declare_batch_size = checked(int, seed, "seed"), checked(bool, declare_batch_size, "declare_batch_size")
    classes = check_batch(model, batch, "batch", loss)
    client = Client(model=copy_of(model), batch=batch, training=training, loss=loss)
    if auxiliary is not None:
        check_batch(client.model, auxiliary, "auxiliary", loss)
        auxiliary = Batch(auxiliary.inputs.detach().clone(), auxiliary.targets.detach().clone())
    _warn_outside_bounds(batch.inputs, scale)
    for position, defense in enumerate(defenses):
        client = defense(client, generator(seed, f"defense {position} {defense.name}", batch.inputs.device))
    with seeded(seed, "training"):
        update = _trained(client)
    for transform in client.outgoing:
        update = transform(update)
    if not update:
        names = ", ".join(defense.name for defense in defenses)
        raise Refused(f"{names}: every layer that this model trains is withheld, so nothing is sent")
    public = Public(
        input_shape=tuple(client.batch.inputs.shape[1:]),
        classes=classes,
        batch_size=len(batch.inputs) if declare_batch_size else None,
        loss=client.loss,
        training=client.training,
        train_mode=client.model.training,
        normalization=scale,
        defenses=tuple(defenses),
    )
    update = {name: change.detach().clone() for name, change in update.items()}
    exposure = Exposure(model=client.model, update=update, public=public, auxiliary=auxiliary)
    check_exposure(exposure)
    return exposure


def _trained(client: Client) -> Update:
    try:
        return client.training(client.model, client.batch.inputs, client.batch.targets, client.loss)
    except RuntimeError as error:
        raise ValueError(f"model: cannot be trained on this batch: {str(error).strip().splitlines()[0]}") from error


def receive(
    model: nn.Module,
    update: Update,
    *,
    input_shape: Sequence[int],
    batch_size: int | None = None,
    training: Training | str | None = None,
    loss: Loss | str | None = None,
    normalization: Normalization | None = None,
    defenses: Sequence[Defense | str] = (),
    auxiliary: Batch | None = None,
) -> Exposure:
    """An exposure from an update that some federation really sent, by parameter name and in a gradient's units."""
    shape: tuple[int, ...] = checked(tuple[PositiveInt, ...], input_shape, "input_shape")
    batch_size = checked(PositiveInt | None, batch_size, "batch_size")
    if not isinstance(update, Mapping) or not all(isinstance(change, Tensor) for change in update.values()):
        raise TypeError(f"update: expected tensors by parameter name, got {type(update).__name__}")
    _check_model(model)
    model = copy_of(model)
    public = Public(
        input_shape=shape,
        classes=_classes(model, torch.zeros(2, *shape).to(next(model.parameters()))),
        batch_size=batch_size,
        loss=LOSSES.resolve(loss or CrossEntropy()),
        training=TRAININGS.resolve(training or FedSGD()),
        train_mode=model.training,
        normalization=normalization or Normalization(),
        defenses=tuple(DEFENSES.resolve(defense) for defense in listed(defenses)),
    )
    exposure = Exposure(model=model, update={k: v.detach().clone() for k, v in update.items()}, public=public, auxiliary=auxiliary)
    check_exposure(exposure)
    return exposure


def listed(defenses: Sequence[Defense | str] | Defense | str) -> Sequence[Defense | str]:
    """One defense alone is a list of one."""
    if isinstance(defenses, (str, Defense)):
        return (defenses,)
    if isinstance(defenses, Mapping) or not isinstance(defenses, Iterable):
        raise TypeError(f"defenses: expected a list of defenses or of their names, got {defenses!r}")
    return defenses


def check_exposure(exposure: Exposure) -> None:
    """Refuse an update that does not fit its model, or that is not finite."""
    parameters = dict(exposure.model.named_parameters())
    if not exposure.update:
        raise ValueError("update: the client sent no layer at all")
    for name, change in exposure.update.items():
        if name not in parameters:
            raise ValueError(f"update: the model has no parameter {name!r}")
        if change.layout is not torch.strided or change.dtype not in SENT:
            kind = change.dtype if change.layout is torch.strided else f"{change.layout} of {change.dtype}"
            raise ValueError(f"update.{name}: expected a dense tensor of half, single or double precision, got {kind}")
        if change.shape != parameters[name].shape:
            raise ValueError(f"update.{name}: expected shape {tuple(parameters[name].shape)} as in the model, got {tuple(change.shape)}")
        if not math.isfinite(float(change.sum())) and not torch.isfinite(change).all():  # a finite sum is proof, and cheaper
            raise ValueError(f"update.{name}: has NaN or infinite entries; the loss or the training diverged on this batch")


def check_batch(model: nn.Module, batch: Batch, path: str, loss: Loss | None = None) -> int:
    """Refuse a batch that the model cannot take or whose labels its loss cannot aim at; return the number of classes."""
    _check_model(model)
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
    if targets.ndim == 0 or len(targets) != len(inputs):
        raise ValueError(f"{path}.targets: expected {len(inputs)}, one for each input, got shape {tuple(targets.shape)}")
    classes = _classes(model, inputs[:1].repeat_interleave(2, 0))
    _check_targets(targets, classes, f"{path}.targets", loss)
    return classes


def _check_targets(targets: Tensor, classes: int, path: str, loss: Loss | None) -> None:
    if targets.ndim == 1:
        if targets.is_floating_point():
            raise ValueError(f"{path}: class ids must be integers, got {targets.dtype}")
        highest = max(classes, 2) - 1  # one logit: a yes-or-no question
        if int(targets.min()) < 0 or int(targets.max()) > highest:
            raise ValueError(f"{path}: class ids must lie in 0..{highest}, got {int(targets.min())}..{int(targets.max())}")
    elif targets.ndim == 2 and targets.shape[1] == classes:
        check_soft_labels(targets, path, loss)
    else:
        raise ValueError(f"{path}: expected (B,) class ids or (B, {classes}) soft labels, got shape {tuple(targets.shape)}")


def check_soft_labels(labels: Tensor, path: str, loss: Loss | None) -> None:
    """Refuse rows (B, C) that `loss` cannot aim at: softmax losses share out a whole, others ask each class for itself."""
    if not labels.is_floating_point() or not torch.isfinite(labels).all() or bool((labels < 0).any()):
        raise ValueError(f"{path}: soft labels must be finite numbers of at least 0")
    sums = labels.sum(1, dtype=torch.float64)
    if loss is not None and loss.shift_invariant and bool(((sums - 1).abs() > 1e-2).any()):
        raise ValueError(f"{path}: each soft label must sum to 1, got sums from {sums.min():.3g} to {sums.max():.3g}")


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    if next(model.parameters(), None) is None:
        raise ValueError("model: has no parameters, so there is no gradient to audit")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError("model: every parameter is frozen, so there is no gradient to audit")


def _classes(model: nn.Module, inputs: Tensor) -> int:
    """How many logits the model gives; found without touching its mode's side effects."""
    state = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    try:
        with torch.no_grad(), torch.random.fork_rng():
            output = torch.func.functional_call(model, state, (inputs,))
    except Exception as error:  # whatever a stranger's model does with inputs that it cannot take
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"model: cannot take {inputs.dtype} inputs of shape {tuple(inputs.shape[1:])}: {reason}") from error
    if not isinstance(output, Tensor) or output.ndim != 2:
        what = f"shape {tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
        raise ValueError(f"model: expected one (batch, classes) tensor of logits, got {what}")
    return output.shape[1]


def _warn_outside_bounds(inputs: Tensor, normalization: Normalization) -> None:
    channels = len(normalization.mean)
    if (
        len(normalization.std) != channels
        or channels not in (1, inputs.shape[1])
        or not all(s > 0 and math.isfinite(s) for s in normalization.std)
    ):
        raise ValueError(f"normalization: expected one mean and one positive std, or {inputs.shape[1]} of each, got {normalization}")
    low, high = input_bounds(normalization, inputs)
    slack = 1e-3 * (high - low)
    if bool((inputs < low - slack).any()) or bool((inputs > high + slack).any()):
        warnings.warn(
            f"inputs reach from {inputs.min():.3g} to {inputs.max():.3g}, outside what the normalisation maps pixels in [0, 1] to; "
            "attacks and PSNR assume that range: pass normalization=dm.Normalization(mean=..., std=...)",
            stacklevel=3,
        )
