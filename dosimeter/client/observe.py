"""The client's side: a private batch goes in, an exposure comes out. The server sees the exposure alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from dosimeter.client.checks import (
    check_batch,
    check_exposure,
    check_inputs,
    check_model,
    check_tensors,
    defense_list,
    output_shape,
    warn_outside_bounds,
)
from dosimeter.client.losses import CrossEntropy, OwnLoss, loss_of
from dosimeter.client.server_copy import server_copy
from dosimeter.client.training import FedSGD
from dosimeter.interfaces import Client, Defense, Exposure, Loss, Public, Training
from dosimeter.network.copies import deep_copy
from dosimeter.network.leftovers import nothing_kept
from dosimeter.network.model_state import copy_of
from dosimeter.network.probing import OutputForm, join_inputs, join_outputs, output_of, raw_output
from dosimeter.network.token_inputs import are_tokens, blank_of, tensors_of
from dosimeter.options import check_value, first_line
from dosimeter.precision import tf32
from dosimeter.randomness import generator, global_seed, secret_of
from dosimeter.registry import DEFENSES, TRAININGS
from dosimeter.types import Batch, Impossible, NamedInputs, Normalization, Refused, Update

LOG_SLACK = 1e-3  # by which the logarithm of a sum of probabilities may miss 0


def observe(
    model: nn.Module,
    batch: Batch | Sequence[Batch],
    *,
    training: Training | str | None = None,
    defenses: Sequence[Defense | str] = (),
    loss: Loss | nn.Module | Callable[..., Tensor] | str | None = None,
    normalization: Normalization | None = None,
    auxiliary: Batch | None = None,
    declare_batch_size: bool = True,
    seed: int = 0,
) -> Exposure:
    """Let a client train on `batch` behind `defenses`, and return all that the server then has.

    Several batches are those of several clients under secure aggregation: the server then has the mean of their updates.

    The model's current mode (train or eval) is the client's mode. Neither the model nor the batch is changed. The exposure's model is
    a copy made before the client trains. The client trains on another copy, which is thrown away. What the code of the model, the loss
    and the defenses kept of the batch elsewhere is undone. The client's random numbers depend on the seed and on its batch, so that
    nobody without the batch can draw them again.
    """
    scale: Normalization = check_value(Normalization, normalization or Normalization(), "normalization")
    training = TRAININGS.resolve(training or FedSGD())
    defenses = [DEFENSES.resolve(defense) for defense in defense_list(defenses)]
    if not isinstance(batch, Batch):
        batch, sizes = join(batch, "batch")
        defenses = [DEFENSES.resolve("secure_aggregation", clients=len(sizes), sizes=sizes), *defenses]
    seed, declare_batch_size = check_value(int, seed, "seed"), check_value(bool, declare_batch_size, "declare_batch_size")
    check_model(model)
    with nothing_kept(model, loss):
        trial = copy_of(model)
        loss = loss_for(trial, batch, loss)
        classes = check_batch(trial, batch, "batch", loss)
    sent = taking_all_outputs(server_copy(model, batch), loss)
    if isinstance(batch.inputs, NamedInputs) and batch.inputs.are_numbers:  # the attacks guess one row of numbers a sample
        sent, batch = join_inputs(sent, batch.inputs), Batch(batch.inputs.joined(), batch.targets)
        if isinstance(auxiliary, Batch) and isinstance(auxiliary.inputs, NamedInputs):
            auxiliary = Batch(auxiliary.inputs.joined(), auxiliary.targets)
    client = Client(model=sent, batch=batch, training=training, loss=loss)
    if auxiliary is not None:
        check_batch(client.model, auxiliary, "auxiliary", loss)
        auxiliary = Batch(auxiliary.inputs.detach().clone(), auxiliary.targets.detach().clone())
    tokens = are_tokens(batch.inputs)
    if not tokens and not isinstance(batch.inputs, NamedInputs):
        warn_outside_bounds(batch.inputs, scale)
    with nothing_kept(client.model, training, loss, *defenses):
        client, update = _send(client, defenses, seed)
        output = output_shape(client.model, client.batch.inputs[[0, 0]])[1:]
    if not update:
        names = ", ".join(defense.name for defense in defenses)
        raise Impossible(
            f"{names}: every layer that this model trains is withheld", theorem="nothing is sent, so there is nothing to attack"
        )
    public = Public(
        input_shape=tuple(client.batch.inputs.shape[1:]),
        classes=classes,
        batch_size=len(batch.inputs) if declare_batch_size else None,
        loss=client.loss,
        training=client.training,
        train_mode=client.model.training,
        normalization=scale,
        defenses=tuple(defenses),
        blank=blank_of(client.batch.inputs) if tokens else None,
        output_shape=None if output == (classes,) else output,
    )
    update = {name: change.detach().clone() for name, change in update.items()}
    exposure = Exposure(model=client.model, update=update, public=public, auxiliary=auxiliary)
    check_exposure(exposure)
    return exposure


def join(batches: Sequence[Batch], path: str) -> tuple[Batch, tuple[int, ...]]:
    """The samples of several clients as one batch, and how many each client has."""
    if not isinstance(batches, Sequence) or not batches or not all(isinstance(one, Batch) for one in batches):
        raise TypeError(f"{path}: expected a Batch, or a list of them, got {type(batches).__name__}")
    for one in batches:
        check_tensors(one, path)
        if isinstance(one.inputs, NamedInputs):
            raise TypeError(f"{path}: expected tensors from every client, got inputs by name, which are not joined")
        if one.inputs.shape[1:] != batches[0].inputs.shape[1:] or one.targets.shape[1:] != batches[0].targets.shape[1:]:
            raise ValueError(f"{path}: expected samples of one shape from every client, got {[tuple(b.inputs.shape[1:]) for b in batches]}")
    sizes = tuple(len(one.inputs) for one in batches)
    return Batch(torch.cat([one.inputs for one in batches]), torch.cat([one.targets for one in batches])), sizes


def _send(client: Client, defenses: Sequence[Defense], seed: int) -> tuple[Client, Update]:
    """The client behind its defenses, and what it sends."""
    secret = secret_of(*tensors_of(client.batch.inputs), client.batch.targets)
    for position, defense in enumerate(defenses):
        client = _defend(client, defense, seed, f"defense {position} {defense.name}", secret)
    with global_seed(seed, "training", secret), tf32(allowed=False):
        update = _train(client)
    for transform in client.outgoing:
        update = transform(update)
    return client, update


def loss_for(model: nn.Module, batch: Batch, loss: Any) -> Loss:
    """The loss that the client trains with: what the caller gives, or cross-entropy at the model's outputs."""
    if isinstance(loss, Loss) and not isinstance(loss, CrossEntropy):
        return loss
    check_tensors(batch, "batch")
    check_inputs(batch.inputs, "batch.inputs")
    form = _outputs_of(model, batch, loss)
    if form is not None:
        join_outputs(model, form)
    shape = output_shape(model, batch.inputs[[0, 0]])
    if isinstance(loss, nn.NLLLoss) and loss.weight is None and loss.reduction == "mean" and _gives_log_probabilities(model, batch):
        loss = nn.CrossEntropyLoss(ignore_index=loss.ignore_index)  # the same number: log-probabilities are logits of their own
    tokens = are_tokens(batch.inputs)
    found = loss_of(loss, len(shape) == 3 and tokens, grid=len(shape) > 2 and not tokens, targets=batch.targets)
    return replace(found, whole=form) if isinstance(found, OwnLoss) else found


def taking_all_outputs(model: nn.Module, loss: Loss) -> nn.Module:
    """The model, which gives all of its outputs where the loss takes them. In place."""
    return join_outputs(model, loss.whole) if isinstance(loss, OwnLoss) and loss.whole is not None else model


def _outputs_of(model: nn.Module, batch: Batch, loss: Any) -> OutputForm | None:
    """The form of the model's outputs where the client's own loss takes all of them, not the logits alone. It is tried on two samples."""
    if not callable(loss) or isinstance(loss, Loss | nn.modules.loss._Loss):
        return None
    pair, targets = batch.inputs[[0, 0]], batch.targets[[0, 0]]
    try:
        with torch.random.fork_rng(), torch.no_grad():
            output = raw_output(model, pair)
            form = None if isinstance(output, Tensor) else OutputForm.of(output, len(pair))
            value = None if form is None else loss(form.split(form.join(output)), targets)
    except Exception:  # it takes the logits, or fails on these too, which the training says
        return None
    return form if isinstance(value, Tensor) and value.numel() == 1 else None


def _gives_log_probabilities(model: nn.Module, batch: Batch) -> bool:
    """Whether the model's outputs are logarithms of numbers that sum to one."""
    with torch.random.fork_rng():
        output = output_of(model, batch.inputs)
    return isinstance(output, Tensor) and output.ndim == 2 and bool((output.logsumexp(1).abs() < LOG_SLACK).all())


def _defend(client: Client, defense: Defense, seed: int, role: str, secret: str) -> Client:
    """The client behind one more defense. A defense of the model draws in public, since the server has the model.

    Any other defense gets a copy of the model to run the batch through, so that nothing of the batch stays in the server's.
    """
    device = client.batch.inputs.device
    if defense.changes_pixels and (are_tokens(client.batch.inputs) or isinstance(client.batch.inputs, NamedInputs)):
        raise Refused(f"{defense.name} changes pixels, and this batch holds token ids")
    if defense.side == "model":
        return copy.deepcopy(defense)(client, generator(seed, role, device))
    seen = copy_of(client.model)
    defended = copy.deepcopy(defense)(replace(client, model=seen), generator(seed, role, device, secret))
    return replace(defended, model=client.model) if defended.model is seen else defended


def _train(client: Client) -> Update:
    """The update, computed by copies of model, training and loss, which are then thrown away."""
    model, training, loss = deep_copy(client.model), copy.deepcopy(client.training), copy.deepcopy(client.loss)
    try:
        return training(model, client.batch.inputs, client.batch.targets, loss)
    except RuntimeError as error:
        raise ValueError(f"model: cannot be trained on this batch: {first_line(error)}") from error
