"""How a client's update comes about, read from its defenses: what is computed, and how much noise is on what is sent."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor, nn

from dosimeter.client.checks import check_batch, check_model, defense_list
from dosimeter.client.observe import loss_for
from dosimeter.client.training import FedSGD
from dosimeter.engines.subspace.spectrum import rounding_unit
from dosimeter.interfaces import Client, Defense, Loss, Mechanism, Training
from dosimeter.network.copies import deep_copy
from dosimeter.randomness import generator
from dosimeter.registry import DEFENSES, TRAININGS
from dosimeter.types import Batch, Normalization, Refused, Update

LARGEST_REPETITION_ERROR = 1e-2  # relative, of the same update computed twice; rounding stays far below


def mechanism_of(
    model: nn.Module,
    batch: Batch,
    *,
    training: Training | str | None = None,
    defenses: Sequence[Defense | str] = (),
    loss: Loss | nn.Module | Callable[..., Tensor] | str | None = None,
    normalization: Normalization | None = None,
    auxiliary: Batch | None = None,
    seed: int = 0,
) -> Mechanism:
    """The mechanism of a client that `observe` would expose with the same arguments.

    Noise ends it: what comes after the first noise only works on what is already noisy, and helps no attacker. A step before the noise must
    be continuous.
    """
    check_model(model)
    model = deep_copy(model)
    loss = loss_for(model, batch, loss)
    check_batch(deep_copy(model), batch, "batch", loss)
    _refuse_randomness(model)
    client = Client(model=deep_copy(model), batch=batch, training=TRAININGS.resolve(training or FedSGD()), loss=loss)
    resolved = [DEFENSES.resolve(defense) for defense in defense_list(defenses)]
    transforms, noisy, multipliers, previous = [], None, {}, None
    for position, defense in enumerate(resolved):
        _refuse_uncovered(defense)
        before = len(client.outgoing)
        client = copy.deepcopy(defense)(client, generator(seed, f"defense {position} {defense.name}", batch.inputs.device))
        if ratio := defense.noise_multiplier_of(previous):
            multipliers[ratio[0]] = min(ratio[1], multipliers.get(ratio[0], ratio[1]))
        if defense.adds_noise() or defense.noise_floor(batch.inputs, len(batch.inputs)) > 0:
            noisy = defense
            break
        transforms += client.outgoing[before:]
        previous = defense if defense.side == "update" else previous
    sent, again = (client.training(deep_copy(client.model), client.batch.inputs, client.batch.targets, client.loss) for _ in range(2))
    _refuse_random_updates(sent, again)
    for transform in transforms:
        sent = transform(sent)
    noise = {name: noisy.noise_floor(change, len(batch.inputs)) if noisy else 0.0 for name, change in sent.items()}
    floors = {name: noise[name] or _rounding(change) for name, change in sent.items()}  # a layer without noise is rounded all the same
    return Mechanism(
        client=replace(client, outgoing=()),
        transforms=tuple(transforms),
        floors={name: floor for name, floor in floors.items() if floor > 0},
        declared=noisy is not None and all(floor > 0 for floor in noise.values()),
        noise_multipliers=multipliers,
        normalization=normalization or Normalization(),
        auxiliary=auxiliary,
    )


def _rounding(change: Tensor) -> float:
    """The rounding of a layer's entries, as if it were noise."""
    return rounding_unit(change) * float(change.double().square().mean().sqrt())


def _refuse_uncovered(defense: Defense) -> None:
    if defense.side == "data":
        raise Refused(f"no ceiling is known behind {defense.name}, which changes the data before training")
    if defense.side == "update" and not defense.continuous and not defense.adds_noise():
        raise Refused(f"no ceiling is known behind {defense.name}, whose output is no continuous function of the update")


def _refuse_randomness(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.training and module.p > 0:
            raise Refused(f"no ceiling is known for dropout in train mode ({name!r}), whose masks are random")


def _refuse_random_updates(sent: Update, again: Update) -> None:
    """Refuse a client whose update of the same batch is another one each time, beyond rounding."""
    for name, change in sent.items():
        if float((change - again[name]).double().norm()) > LARGEST_REPETITION_ERROR * float(change.double().norm()):
            raise Refused(f"no ceiling is known for an update that is drawn at random before the noise ({name!r} differs each time)")
