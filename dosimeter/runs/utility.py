"""What defenses cost: a short federated training behind them, the bytes of an update, the client's time, and the ε that they buy."""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from dosimeter.client.observe import observe
from dosimeter.engines.privacy import guarantees
from dosimeter.interfaces import Client, Defense, Exposure
from dosimeter.options import Constraint, PositiveFloat, PositiveInt, check_fields
from dosimeter.progress import advance
from dosimeter.randomness import generator
from dosimeter.runs.audited_client import measure_accuracy
from dosimeter.runs.measurement import AuditedClient, Protocol
from dosimeter.types import Batch, Encoding, Guarantee, Outcome, Refused, Update

Probability = Annotated[float, Constraint("a number in (0, 1)", lambda value: 0 < value < 1)]
JUDGED_ROUNDS = 5  # rounds whose models are judged, since one round alone moves the accuracy by several points
TIMED_UPDATES = 8  # updates whose time is taken, with and without the defenses in turn
INDEX_BITS = 32  # of the position of a sparse entry


@dataclass(frozen=True, kw_only=True)
class Federation:
    """The short training that a defense's cost is measured by: who takes part, for how long, and what the server does.

    Every round every client draws `batch_size` of its own samples and sends its update; the server averages the updates and
    applies the mean as a gradient, by Adam (Reddi et al., "Adaptive Federated Optimization", ICLR 2021: FedAdam, which needs no
    tuning to the size of an update) or by plain SGD.
    """

    clients: PositiveInt = 4
    rounds: PositiveInt = 40
    batch_size: PositiveInt = 16
    learning_rate: PositiveFloat = 0.02
    server: Literal["adam", "sgd"] = "adam"
    delta: Probability = 1e-5  # at which ε is told

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class Utility:
    """What one federated training behind defenses gave and took."""

    accuracy: float  # on held-out samples, the mean over the models of the last rounds
    guessing: float  # the accuracy of always saying the most frequent class
    update_bytes: int  # one client's update as it would be encoded
    dense_bytes: int  # all parameters as they are, which is what an undefended client sends
    update_seconds: float  # a client's time for one update, the least of several
    undefended_seconds: float  # the same without defenses, taken in turn with the above
    guarantees: tuple[Guarantee, ...]
    outcome: Outcome = Outcome.COMPLETED
    message: str = ""


def measure_utility(subject: AuditedClient, protocol: Protocol, federation: Federation) -> Utility:
    """Train the subject's model on its pool, every client behind the protocol's defenses, and measure what comes out.

    What a real federation does once is done once: changes of the model, and defenses that say so (`Defense.once`). A layer that
    the clients withhold stays as the server sent it. Batches have a fixed size, where the accountants assume Poisson samples of
    the same rate.
    """
    if subject.pool is None or subject.held_out is None:
        raise Refused("utility needs samples to train on and held-out ones to judge by: a data set, or pool= and held_out=")
    model, shards, defenses = _prepare_clients(subject, subject.pool, protocol, federation)
    drawing = generator(protocol.seed, "federated batches")
    first = _draw_batch(shards[0], federation.batch_size, drawing)
    seconds, undefended, exposure = _time_updates(subject, protocol, defenses, model, first)
    optimizer_type = torch.optim.Adam if federation.server == "adam" else torch.optim.SGD
    optimizer = optimizer_type([p for p in model.parameters() if p.requires_grad], lr=federation.learning_rate)
    outcome, message, accuracies = Outcome.COMPLETED, "", []
    for turn in range(federation.rounds):
        batches = [_draw_batch(shard, federation.batch_size, drawing) for shard in shards]
        seeds = range(turn * len(shards), (turn + 1) * len(shards))
        try:
            updates = [_expose(subject, protocol, defenses, model, batch, seed).update for batch, seed in zip(batches, seeds)]
        except Refused:
            raise
        except ValueError as error:  # NaN or infinite entries: the training diverged behind these defenses
            outcome, message = Outcome.DIVERGED, f"after {turn} rounds: {error}"
            break
        _apply(optimizer, model, updates)
        if turn >= federation.rounds - JUDGED_ROUNDS:
            accuracies.append(_judge_model(model, subject.pool, subject.held_out))
        advance(turn + 1, federation.rounds, "federated training")
    rate = min(1.0, federation.batch_size / min(len(shard.inputs) for shard in shards))
    return Utility(
        accuracy=statistics.mean(accuracies or [_judge_model(model, subject.pool, subject.held_out)]),
        guessing=_most_frequent(subject.held_out.targets),
        update_bytes=update_bytes(exposure.update, protocol.defenses),
        dense_bytes=sum(p.numel() * p.element_size() for p in subject.model.parameters() if p.requires_grad),
        update_seconds=seconds,
        undefended_seconds=undefended,
        guarantees=tuple(guarantees(protocol.defenses, sample_rate=rate, steps=federation.rounds, delta=federation.delta)),
        outcome=outcome,
        message=message,
    )


def update_bytes(update: Update, defenses: Sequence[Defense] = ()) -> int:
    """The size of an update on the wire, by the shortest plain encoding that loses nothing of what the defenses left.

    Each defense says what it leaves of the encodings before it. A layer costs all its values; or, where zeros were put in on
    purpose and that is less, its non-zero values with a 32-bit position each or with one bit an entry that says which they are; or its
    two factors. A value costs its own width or the bits it was rounded to, whose layers add one number for the scale. Nothing
    is compressed any further.
    """
    encoding = reduce(lambda before, defense: defense.encoding(before), defenses, Encoding())
    return math.ceil(sum(_layer_bits(change, encoding) for change in update.values()) / 8)


def _layer_bits(change: Tensor, encoding: Encoding) -> int:
    width, entries, present = 8 * change.element_size(), change.numel(), int(change.count_nonzero())
    value, scale = (width, 0) if encoding.bits is None else (encoding.bits, width)
    costs = [entries * value]
    if encoding.sparse:
        costs += [present * (value + INDEX_BITS), present * value + entries]
    if encoding.rank is not None and change.ndim > 1 and entries:
        costs.append(encoding.rank * (len(change) + entries // len(change)) * width)
    return min(costs) + scale


def _prepare_clients(
    subject: AuditedClient, pool: Batch, protocol: Protocol, federation: Federation
) -> tuple[nn.Module, list[Batch], tuple[Defense, ...]]:
    """A copy of the model as the defenses change it, each client's samples, and the defenses that act anew in every round."""
    samples = len(pool.inputs)
    if samples < federation.clients:
        raise Refused(f"utility: {federation.clients} clients need a sample each; the pool has {samples}")
    order = torch.randperm(samples, generator=generator(protocol.seed, "federated shards")).to(pool.inputs.device)
    model, shards = subject.model, []
    once = [defense for defense in protocol.defenses if defense.side == "model" or defense.once]
    for number, part in enumerate(order.tensor_split(federation.clients)):
        shard = Batch(pool.inputs[part], pool.targets[part])
        client = Client(model=subject.model, batch=shard, training=protocol.training, loss=protocol.loss)
        for defense in once:
            role = defense.name if defense.side == "model" else f"{defense.name} of client {number}"
            client = defense(client, generator(protocol.seed, f"federated {role}", shard.inputs.device))
        model = client.model
        shards.append(client.batch)
    return copy.deepcopy(model), shards, tuple(defense for defense in protocol.defenses if defense not in once)


def _expose(
    subject: AuditedClient, protocol: Protocol, defenses: tuple[Defense, ...], model: nn.Module, batch: Batch, turn: int
) -> Exposure:
    """A client's update, by the same way as in an audit."""
    return observe(
        model,
        batch,
        training=protocol.training,
        defenses=defenses,
        loss=protocol.loss,
        normalization=subject.normalization,
        seed=generator(protocol.seed, f"federated turn {turn}").initial_seed(),
    )


def _apply(optimizer: torch.optim.Optimizer, model: nn.Module, updates: Sequence[Update]) -> None:
    """One step of the server along the mean of the updates; layers that nobody sends stay."""
    for name, parameter in model.named_parameters():
        sent = [update[name] for update in updates if name in update]
        parameter.grad = torch.stack(sent).mean(0) if sent else None
    optimizer.step()


def _draw_batch(shard: Batch, size: int, rng: torch.Generator) -> Batch:
    chosen = torch.randperm(len(shard.inputs), generator=rng)[:size].to(shard.inputs.device)
    return Batch(shard.inputs[chosen], shard.targets[chosen])


def _time_updates(
    subject: AuditedClient, protocol: Protocol, defenses: tuple[Defense, ...], model: nn.Module, batch: Batch
) -> tuple[float, float, Exposure]:
    """The least time of an update with the defenses and without, taken in turn, so that a busy machine slows both alike."""
    defended, plain = [], []
    exposure = _expose(subject, protocol, defenses, model, batch, 0)  # the first call is the slowest, and not timed
    for turn in range(TIMED_UPDATES):
        began = time.perf_counter()
        _expose(subject, protocol, defenses, model, batch, turn)
        between = time.perf_counter()
        _expose(subject, protocol, (), subject.model, batch, turn)
        defended.append(between - began)
        plain.append(time.perf_counter() - between)
    return min(defended), min(plain), exposure


def _most_frequent(targets: Tensor) -> float:
    """The share of the class that occurs most often, of hard or soft labels."""
    classes = targets if targets.ndim == 1 else targets.argmax(1)
    return float(classes.bincount().max()) / len(classes)


def _judge_model(model: nn.Module, pool: Batch, held_out: Batch) -> float:
    _estimate_batch_norm(model, pool)
    return measure_accuracy(model, held_out)


def _estimate_batch_norm(model: nn.Module, pool: Batch) -> None:
    """Running statistics of the trained model, which clients send along in a real federation: those of the pool."""
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training and m.track_running_stats]
    if not norms:
        return
    kept = {norm: norm.momentum for norm in norms}
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # a plain mean over the pieces
    with torch.no_grad():
        for piece in pool.inputs.split(64):
            if len(piece) > 1:
                model(piece)
    for norm, momentum in kept.items():
        norm.momentum = momentum
