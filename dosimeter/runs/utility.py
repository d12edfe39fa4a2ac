"""What defenses cost: accuracy after a short federated training, bytes of an update, the client's time; and the ε they give."""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from dosimeter.client.observe import observe
from dosimeter.defenses.outgoing import Memory, OutgoingDefense, RememberingDefense
from dosimeter.engines.privacy import guarantees
from dosimeter.interfaces import Client, Defense, Exposure
from dosimeter.options import Constraint, PositiveFloat, PositiveInt, check_fields
from dosimeter.progress import advance
from dosimeter.randomness import generator
from dosimeter.runs.audited_client import measure_accuracy
from dosimeter.runs.measurement import AuditedClient, Protocol
from dosimeter.types import Batch, Encoding, Guarantee, Outcome, Refused, Update

Probability = Annotated[float, Constraint("a number in (0, 1)", lambda value: 0 < value < 1)]
JUDGED_ROUNDS = 5  # the accuracy is the mean over the models of the last rounds, since single rounds fluctuate
TIMED_UPDATES = 8  # of each kind, with and without the defenses in turn
INDEX_BITS = 32  # of the position of a sparse entry


@dataclass(frozen=True, kw_only=True)
class Federation:
    """The short federated training by which a defense's cost is measured.

    In every round every client draws `batch_size` of its own samples and sends its update. The server applies the mean of the
    updates as a gradient, by plain SGD or by Adam (Reddi et al., "Adaptive Federated Optimization", ICLR 2021: FedAdam). Adam
    needs no tuning to the size of an update.
    """

    clients: PositiveInt = 4
    rounds: PositiveInt = 40
    batch_size: PositiveInt = 16
    learning_rate: PositiveFloat = 0.02
    server: Literal["adam", "sgd"] = "adam"
    delta: Probability = 1e-5  # at which ε is stated

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class Utility:
    """What one federated training behind defenses reached, and what it cost."""

    accuracy: float  # on held-out samples, the mean over the models of the last rounds
    guessing: float  # the accuracy of always answering the most frequent class
    update_bytes: int  # one client's update as it would be encoded
    dense_bytes: int  # all parameters as they are, which is what an undefended client sends
    update_seconds: float  # a client's time for one update, the least of several
    undefended_seconds: float  # the same without defenses, taken in turn with the above
    guarantees: tuple[Guarantee, ...]
    outcome: Outcome = Outcome.COMPLETED
    message: str = ""


def measure_utility(client: AuditedClient, protocol: Protocol, federation: Federation) -> Utility:
    """Train the client's model on its pool, shared out to clients behind the protocol's defenses, and measure the result.

    Changes of the model, and defenses that act once (`Defense.once`), act before the first round. Defenses with a memory
    (`RememberingDefense`) keep one for each client. A layer that the clients withhold stays as the server sent it. Batches have a fixed
    size; the privacy accountants assume Poisson samples of the same rate.
    """
    if client.pool is None or client.held_out is None:
        raise Refused("utility needs samples to train on and held-out ones to judge by: a data set, or pool= and held_out=")
    model, shards, defenses = _prepare_clients(client, client.pool, protocol, federation)
    drawing = generator(protocol.seed, "federated batches")
    first = _draw_batch(shards[0], federation.batch_size, drawing)
    seconds, undefended, exposure = _time_updates(client, protocol, defenses, model, first)
    optimizer_type = torch.optim.Adam if federation.server == "adam" else torch.optim.SGD
    optimizer = optimizer_type([p for p in model.parameters() if p.requires_grad], lr=federation.learning_rate)
    outcome, message, accuracies = Outcome.COMPLETED, "", []
    memories: list[dict[int, Memory]] = [{} for _ in shards]
    for turn in range(federation.rounds):
        batches = [_draw_batch(shard, federation.batch_size, drawing) for shard in shards]
        now = tuple(defense.in_round(turn) for defense in defenses)
        seeds = range(turn * len(shards), (turn + 1) * len(shards))
        try:
            updates = [_send(client, protocol, now, model, batch, seed, memory) for batch, seed, memory in zip(batches, seeds, memories)]
        except Refused:
            raise
        except ValueError as error:  # NaN or infinite entries: the training diverged behind these defenses
            outcome, message = Outcome.DIVERGED, f"after {turn} rounds: {error}"
            break
        _apply(optimizer, model, updates)
        if turn >= federation.rounds - JUDGED_ROUNDS:
            accuracies.append(_judge_model(model, client.pool, client.held_out))
        advance(turn + 1, federation.rounds, "federated training")
    rate = min(1.0, federation.batch_size / min(len(shard.inputs) for shard in shards))
    return Utility(
        accuracy=statistics.mean(accuracies or [_judge_model(model, client.pool, client.held_out)]),
        guessing=_most_frequent(client.held_out.targets),
        update_bytes=update_bytes(exposure.update, protocol.defenses),
        dense_bytes=sum(p.numel() * p.element_size() for p in client.model.parameters() if p.requires_grad),
        update_seconds=seconds,
        undefended_seconds=undefended,
        guarantees=tuple(guarantees(protocol.defenses, sample_rate=rate, steps=federation.rounds, delta=federation.delta)),
        outcome=outcome,
        message=message,
    )


def update_bytes(update: Update, defenses: Sequence[Defense] = ()) -> int:
    """The size of an update on the wire, by the shortest plain lossless encoding of each layer.

    Each defense says which encodings are possible after it (`Defense.encoding`). The candidates of a layer are: all its values;
    where a defense put zeros in, the non-zero values with a 32-bit position each, or with a bit mask of one bit an entry; and
    its two factors where it has low rank. A value costs its own width, or the bits it was rounded to. A rounded layer adds one
    number for its scale. There is no further compression.
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
    client: AuditedClient, pool: Batch, protocol: Protocol, federation: Federation
) -> tuple[nn.Module, list[Batch], tuple[Defense, ...]]:
    """A copy of the model as the defenses change it, each client's samples, and the defenses that act in every round."""
    samples = len(pool.inputs)
    if samples < federation.clients:
        raise Refused(f"utility: {federation.clients} clients need a sample each; the pool has {samples}")
    order = torch.randperm(samples, generator=generator(protocol.seed, "federated shards")).to(pool.inputs.device)
    model, shards = client.model, []
    once = [defense for defense in protocol.defenses if defense.side == "model" or defense.once]
    for number, part in enumerate(order.tensor_split(federation.clients)):
        shard = Batch(pool.inputs[part], pool.targets[part])
        defended = Client(model=client.model, batch=shard, training=protocol.training, loss=protocol.loss)
        for defense in once:
            role = defense.name if defense.side == "model" else f"{defense.name} of client {number}"
            defended = defense(defended, generator(protocol.seed, f"federated {role}", shard.inputs.device))
        model = defended.model
        shards.append(defended.batch)
    return copy.deepcopy(model), shards, tuple(defense for defense in protocol.defenses if defense not in once)


def _expose(
    client: AuditedClient, protocol: Protocol, defenses: tuple[Defense, ...], model: nn.Module, batch: Batch, turn: int
) -> Exposure:
    """What one client exposes in one round, computed as in an audit."""
    return observe(
        model,
        batch,
        training=protocol.training,
        defenses=defenses,
        loss=protocol.loss,
        normalization=client.normalization,
        seed=generator(protocol.seed, f"federated turn {turn}").initial_seed(),
    )


def _send(
    client: AuditedClient,
    protocol: Protocol,
    defenses: tuple[Defense, ...],
    model: nn.Module,
    batch: Batch,
    turn: int,
    memories: dict[int, Memory],
) -> Update:
    """What one client sends in one round. `memories` of its defenses, by their places in the list, are carried on.

    `observe` knows one round alone. So it runs the client up to the first defense with a memory.
    """
    first = next((place for place, defense in enumerate(defenses) if isinstance(defense, RememberingDefense)), len(defenses))
    last = [(place, defense) for place, defense in enumerate(defenses) if place >= first and isinstance(defense, OutgoingDefense)]
    before = tuple(defense for place, defense in enumerate(defenses) if (place, defense) not in last)
    update = _expose(client, protocol, before, model, batch, turn).update
    for place, defense in last:
        rng = generator(protocol.seed, f"federated turn {turn}, defense {place}", batch.inputs.device)
        if isinstance(defense, RememberingDefense):
            update, memories[place] = defense.send(update, memories.get(place, {}), rng)
        else:
            update = defense.protect(update, rng)
    return update


def _apply(optimizer: torch.optim.Optimizer, model: nn.Module, updates: Sequence[Update]) -> None:
    """One step of the server along the mean of the updates. Layers that no client sends stay as they are."""
    for name, parameter in model.named_parameters():
        sent = [update[name] for update in updates if name in update]
        parameter.grad = torch.stack(sent).mean(0) if sent else None
    optimizer.step()


def _draw_batch(shard: Batch, size: int, rng: torch.Generator) -> Batch:
    chosen = torch.randperm(len(shard.inputs), generator=rng)[:size].to(shard.inputs.device)
    return Batch(shard.inputs[chosen], shard.targets[chosen])


def _time_updates(
    client: AuditedClient, protocol: Protocol, defenses: tuple[Defense, ...], model: nn.Module, batch: Batch
) -> tuple[float, float, Exposure]:
    """The least time of an update with and without the defenses, measured in turn, so that a busy machine slows both equally."""
    defended, plain = [], []
    defenses = tuple(replace(d, rounds=1, averaged=False) if isinstance(d, RememberingDefense) else d for d in defenses)
    exposure = _expose(client, protocol, defenses, model, batch, 0)  # the first call is the slowest, and not timed
    for turn in range(TIMED_UPDATES):
        began = time.perf_counter()
        _expose(client, protocol, defenses, model, batch, turn)
        between = time.perf_counter()
        _expose(client, protocol, (), client.model, batch, turn)
        defended.append(between - began)
        plain.append(time.perf_counter() - between)
    return min(defended), min(plain), exposure


def _most_frequent(targets: Tensor) -> float:
    """The share of the most frequent class, for hard or soft labels."""
    classes = targets if targets.ndim == 1 else targets.argmax(1)
    return float(classes.bincount().max()) / len(classes)


def _judge_model(model: nn.Module, pool: Batch, held_out: Batch) -> float:
    _estimate_batch_norm(model, pool)
    accuracy = measure_accuracy(model, held_out)
    assert accuracy is not None  # images have classes
    return accuracy


def _estimate_batch_norm(model: nn.Module, pool: Batch) -> None:
    """Set the running statistics of batch norms from the pool. In a real federation clients send theirs along."""
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
                model(piece.clone())
    for norm, momentum in kept.items():
        norm.momentum = momentum
