"""The server's side of a real federation: an update that a client sent goes in, an exposure comes out."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from dosimeter.client.checks import (
    check_batch,
    check_exposure,
    check_loss,
    check_model,
    check_normalization,
    class_count,
    defense_list,
    output_shape,
)
from dosimeter.client.kinds import Kind
from dosimeter.client.losses import loss_of
from dosimeter.client.preflight import Declared, Preflight, look_at
from dosimeter.client.sent_tensors import sort_tensors
from dosimeter.client.training import FedAvg, FedSGD
from dosimeter.interfaces import Defense, Exposure, Loss, Public, Training
from dosimeter.memory import require_memory
from dosimeter.network.input_shape import find_input_shape
from dosimeter.network.model_state import copy_of
from dosimeter.network.token_inputs import blank_for
from dosimeter.options import PositiveInt, check_value
from dosimeter.registry import DEFENSES, TRAININGS
from dosimeter.types import Batch, Normalization, Refused

LABEL_BYTES = 64  # of one sample's label, with the copies that a recovery makes
STEP_BYTES = 256  # of one local step's slice, with what an attack keeps of it


def receive(
    model: nn.Module,
    update: Mapping[str, Any],
    *,
    kind: Kind = "gradient",
    input_shape: Sequence[int] | None = None,
    batch_size: int | None = None,
    training: Training | str | None = None,
    loss: Loss | nn.Module | Callable[..., Tensor] | str | None = None,
    normalization: Normalization | None = None,
    defenses: Sequence[Defense | str] = (),
    auxiliary: Batch | None = None,
    check_kind: bool = True,
) -> Exposure:
    """An exposure from what a client of a real federation sent: tensors or arrays by name, as a `state_dict` has them.

    `model` holds the weights that the server sent, in the client's mode. `kind` says what the numbers are: a gradient, the difference
    after − before, or the weights after training. Weights and differences are divided by −learning rate × steps of the declared
    `training`. Buffers are taken as what they are after training: running statistics tell the statistics of the batch. An update that
    `preflight` finds to contradict its kind, the model or the training is refused with what was measured.
    """
    declared = _declare(model, kind, input_shape, batch_size, training, loss, defenses, check_kind)
    scale = normalization or Normalization()
    model = copy_of(model)
    blank = blank_for(model, declared.input_shape)
    if blank is None:
        check_normalization(scale, declared.input_shape[0])
    if auxiliary is not None:
        check_batch(model, auxiliary, "auxiliary", declared.loss)
        if tuple(auxiliary.inputs.shape[1:]) != declared.input_shape:
            expected, got = declared.input_shape, tuple(auxiliary.inputs.shape[1:])
            raise ValueError(f"auxiliary.inputs: expected samples of shape {expected}, got {got}")
        auxiliary = Batch(auxiliary.inputs.detach().clone(), auxiliary.targets.detach().clone())
    found = look_at(model, sort_tensors(model, update), declared)
    if found.misfits or found.converted is None:
        raise ValueError("; ".join(found.misfits))
    public = Public(
        input_shape=declared.input_shape,
        classes=declared.classes,
        batch_size=batch_size,
        loss=declared.loss,
        training=declared.training,
        train_mode=model.training,
        normalization=scale,
        defenses=tuple(declared.defenses),
        blank=blank,
        output_shape=declared.output_shape,
    )
    sent = found.converted
    exposure = Exposure(model=model, update=sent.update, public=public, auxiliary=auxiliary, buffers=sent.buffers)
    check_exposure(exposure)
    return exposure


def preflight(
    model: nn.Module,
    update: Mapping[str, Any],
    *,
    kind: Kind = "gradient",
    input_shape: Sequence[int] | None = None,
    batch_size: int | None = None,
    training: Training | str | None = None,
    loss: Loss | nn.Module | Callable[..., Tensor] | str | None = None,
    defenses: Sequence[Defense | str] = (),
    check_kind: bool = True,
) -> Preflight:
    """What fits and what does not, of an update and what is declared about it. Printed, it is a table; `.fits` is the verdict."""
    declared = _declare(model, kind, input_shape, batch_size, training, loss, defenses, check_kind)
    return look_at(model, sort_tensors(model, update), declared)


def _declare(
    model: nn.Module,
    kind: Kind,
    input_shape: Sequence[int] | None,
    batch_size: int | None,
    training: Training | str | None,
    loss: Loss | nn.Module | Callable[..., Tensor] | str | None,
    defenses: Sequence[Defense | str],
    check_kind: bool,
) -> Declared:
    """What the receiver says, checked."""
    check_model(model)
    shape: tuple[int, ...] = check_value(
        tuple[PositiveInt, ...], find_input_shape(model) if input_shape is None else input_shape, "input_shape"
    )
    batch_size = check_value(PositiveInt | None, batch_size, "batch_size")
    if not shape:
        raise ValueError("input_shape: expected the sides of one input, got none")
    require_memory(8 * math.prod(shape), f"input_shape: one input of shape {shape}")
    require_memory(LABEL_BYTES * (batch_size or 0), f"batch_size: the labels of {batch_size} samples")
    blank = blank_for(model, shape)
    output = output_shape(model, (torch.zeros(1, *shape).to(next(model.parameters())) if blank is None else blank)[[0, 0]])
    classes = class_count(output, blank is not None)
    loss = loss_of(loss, len(output) == 3 and blank is not None, grid=len(output) > 2 and blank is None)
    check_loss(loss, classes)
    training, defenses = TRAININGS.resolve(training or FedSGD()), [DEFENSES.resolve(defense) for defense in defense_list(defenses)]
    if isinstance(training, FedAvg):
        training = training.of_samples(batch_size)
    for defense in defenses:
        training = defense.training_behind(training)
    with suppress(Refused):  # where the steps are unknown, the preflight says so
        steps = training.local_steps(batch_size)
        require_memory(STEP_BYTES * steps, f"training: a client with {steps} local steps")
    return Declared(
        kind=check_value(Kind, kind, "kind"),
        input_shape=shape,
        classes=classes,
        batch_size=batch_size,
        training=training,
        loss=loss,
        defenses=tuple(defenses),
        output_shape=None if output[1:] == (classes,) else output[1:],
        check_kind=check_value(bool, check_kind, "check_kind"),
    )
