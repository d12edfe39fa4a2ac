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

    Noise ends it: what acts on the update after the first noise only works on what is already noisy, and helps no attacker. A step before
    the noise must be continuous. Changes of the model and of the training act before all noise, wherever they are listed.
    """
    check_model(model)
    model = deep_copy(model)
    loss = loss_for(model, batch, loss)
    check_batch(deep_copy(model), batch, "batch", loss)
    _refuse_randomness(model)
    client = Client(model=deep_copy(model), batch=batch, training=TRAININGS.resolve(training or FedSGD()), loss=loss)
    resolved = [DEFENSES.resolve(defense) for defense in defense_list(defenses)]
    multipliers, previous = {}, None
    origins: dict[int, Defense] = {}  # whose step it is, by the step's id
    for position, defense in enumerate(resolved):
        client = copy.deepcopy(defense)(client, generator(seed, f"defense {position} {defense.name}", batch.inputs.device))
        origins |= {id(step): defense for step in client.outgoing if id(step) not in origins}
        if ratio := defense.noise_multiplier_of(previous):
            multipliers[ratio[0]] = min(ratio[1], multipliers.get(ratio[0], ratio[1]))
        previous = defense if defense.side == "update" else previous
    transforms, noisy = _before_the_noise(client, resolved, origins)
    sent, again = (client.training(deep_copy(client.model), client.batch.inputs, client.batch.targets, client.loss) for _ in range(2))
    _refuse_random_updates(sent, again)
    for transform in transforms:
        sent = transform(sent)
    _refuse_broken(sent)
    noise = {name: noisy.noise_floor(change, len(batch.inputs)) if noisy else 0.0 for name, change in sent.items()}
    floors = {name: noise[name] or _rounding(change) for name, change in sent.items()}  # a layer without noise is rounded all the same
    return Mechanism(
        client=replace(client, outgoing=()),
        transforms=tuple(transforms),
        floors={name: floor for name, floor in floors.items() if floor > 0},
        declared=noisy is not None and all(floor > 0 for floor in noise.values()),
        fixed_noise=noisy is None or not _follows_the_update(noisy, sent, len(batch.inputs)),
        noise_multipliers=multipliers,
        normalization=normalization or Normalization(),
        auxiliary=auxiliary,
    )


def _rounding(change: Tensor) -> float:
    """The rounding of a layer's entries, as if it were noise."""
    return rounding_unit(change) * float(change.double().square().mean().sqrt())


def _before_the_noise(
    client: Client, defenses: Sequence[Defense], origins: dict[int, Defense]
) -> tuple[list[Callable[[Update], Update]], Defense | None]:
    """The steps that act before the first noise, and whose noise it is. Some noise comes first wherever its defense is listed.

    A step that only leaves layers out tells the same before the noise of each entry as directly after it.
    """
    samples = len(client.batch.inputs)
    order = [(origins[id(step)], step) for step in client.outgoing]
    noisy = [place for place, (defense, _) in enumerate(order) if _makes_noise(defense, client.batch.inputs, samples)]
    first = noisy[0] if noisy else len(order)
    before = {id(defense) for defense, _ in order[:first]}
    listed = next((place for place, defense in enumerate(defenses) if _makes_noise(defense, client.batch.inputs, samples)), len(defenses))
    for place, defense in enumerate(defenses):
        if defense.side == "data":
            raise Refused(f"no ceiling is known behind {defense.name}, which changes the data before training")
        early = id(defense) in before or place < listed
        if defense.side == "update" and early and not defense.continuous and not defense.adds_noise():
            raise Refused(f"no ceiling is known behind {defense.name}, whose output is no continuous function of the update")
    end = first
    while end < len(order) and (end in noisy or _only_leaves_out(order[end][0])):
        end += 1
    kept = [step for place, (_, step) in enumerate(order[:end]) if place not in noisy]
    return kept, order[first][0] if noisy else None


def _makes_noise(defense: Defense, like: Tensor, samples: int) -> bool:
    return defense.adds_noise() or defense.noise_floor(like, samples) > 0


def _only_leaves_out(defense: Defense) -> bool:
    return defense.side == "update" and defense.continuous and not defense.distorts() and defense.scaling() == "none"


def _follows_the_update(noisy: Defense, sent: Update, samples: int) -> bool:
    """Whether the noise of twice the update is larger than that of the update."""
    return any(noisy.noise_floor(2 * change, samples) != noisy.noise_floor(change, samples) for change in sent.values())


def _refuse_broken(sent: Update) -> None:
    for name, change in sent.items():
        if not bool(change.isfinite().all()):
            raise Refused(f"no ceiling is known: the update of this batch has NaN or infinite values ({name!r})")


def _refuse_randomness(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.training and module.p > 0:
            raise Refused(f"no ceiling is known for dropout in train mode ({name!r}), whose masks are random")


def _refuse_random_updates(sent: Update, again: Update) -> None:
    """Refuse a client whose update of the same batch is another one each time, beyond rounding."""
    for name, change in sent.items():
        if float((change - again[name]).double().norm()) > LARGEST_REPETITION_ERROR * float(change.double().norm()):
            raise Refused(f"no ceiling is known for an update that is drawn at random before the noise ({name!r} differs each time)")
