"""Are weights, differences and gradients told apart, whatever a client trains and however? Counts over random clients.

    python benchmarks/kinds.py [--clients 200] [--seed 0] [--record FILE.json]

A client has a random model (perceptrons, convolutions, batch, group and layer norm, LSTM, transformer, no bias), fresh or trained,
in train or eval mode; a random optimiser of torch.optim, learning rate from 1e-5 to 10, steps, mini-batches, accumulation, weight decay,
clipping, FedProx and frozen layers. Its weights, their difference and its first gradient are each received under all three kinds. Clients
whose weights are no finite numbers after training are drawn anew.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))

from measured import write_measurement

import dosimeter as dm
from dosimeter.client.kinds import Kind
from dosimeter.models.loading import load_model

KINDS: tuple[Kind, ...] = ("weights", "difference", "gradient")
SHAPE, SAMPLES = (1, 16, 16), 12
PREFIXES = ("", "", "module.", "_orig_mod.", "_orig_mod.module.")
OPTIMISERS: dict[str, dict[str, Any]] = {
    "SGD": {},
    "momentum": {"momentum": 0.9},
    "Nesterov": {"momentum": 0.9, "nesterov": True},
    "weight decay": {"weight_decay": 5e-3, "momentum": 0.9},
    "Adam": {},
    "AdamW": {"weight_decay": 0.05},
    "RMSprop": {},
    "Adagrad": {},
}


class Recurrent(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(16, 24, batch_first=True), nn.Linear(24, classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.lstm(images.flatten(1).unflatten(1, (16, 16)))[0][:, -1])


class Attentive(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(16, 32), nn.Linear(32, classes)
        self.place = nn.Parameter(torch.randn(16, 32) / 10)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(images.flatten(1).unflatten(1, (16, 16))) + self.place).mean(1))


class Residual(nn.Module):
    def __init__(self, classes: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 16, 3, padding=1, bias=False), norm(16)
        inner = [nn.Conv2d(16, 16, 3, padding=1, bias=False), norm(16), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), norm(16)]
        self.inner = nn.Sequential(*inner)
        self.head = nn.Linear(16, classes)

    def forward(self, images: Tensor) -> Tensor:
        held = self.norm(self.first(images)).relu()
        return self.head((held + self.inner(held)).relu().mean((2, 3)))


def perceptron(classes: int, bias: bool = True, activation: type[nn.Module] = nn.ReLU) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(256, 40, bias=bias), activation(), nn.Linear(40, classes, bias=bias))


MODELS: dict[str, Callable[[int], nn.Module]] = {
    "perceptron": perceptron,
    "sigmoids": lambda classes: perceptron(classes, activation=nn.Sigmoid),
    "no bias": lambda classes: perceptron(classes, bias=False),
    "lenet5": lambda classes: load_model("lenet5", {"classes": classes, "channels": 1, "size": 16}, None, 0),
    "resnet20": lambda classes: load_model("resnet20", {"classes": classes, "channels": 1}, None, 0),
    "batch norm": lambda classes: Residual(classes, nn.BatchNorm2d),
    "group norm": lambda classes: Residual(classes, lambda width: nn.GroupNorm(4, width)),
    "LSTM": Recurrent,
    "transformer": Attentive,
}


@dataclass(frozen=True, kw_only=True)
class Client:
    """What a client sends under each kind, and what it would say of itself."""

    words: str
    optimiser: str
    rate: float
    server: nn.Module
    sent: dict[str, dict[str, Tensor]]
    training: dm.FedAvg


def draw_client(seed: int) -> Client | None:
    """The client of a seed; None where its weights are no finite numbers after training."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    name, classes = rng.choice(list(MODELS)), rng.choice([2, 3, 10, 10, 100])
    server = MODELS[name](classes).train(rng.random() < 0.7)
    trained = rng.random() < 0.5
    prototypes = torch.rand(classes, *SHAPE)
    draw = lambda count: _samples(prototypes, count)  # noqa: E731
    if trained:
        _train(server, *draw(400), torch.optim.Adam(server.parameters(), 3e-3), mini_batch=40, steps=40)
    images, labels = draw(SAMPLES)
    chosen, rate = rng.choice(list(OPTIMISERS)), 10 ** rng.uniform(-5, 1)
    arguments = OPTIMISERS[chosen]
    kind = chosen if hasattr(torch.optim, chosen) else "SGD"
    mini_batch, accumulate = rng.choice([None, None, 4, 5]), rng.choice([1, 1, 1, 2])
    epochs, max_norm = rng.choice([1, 1, 2, 5]), rng.choice([None, None, None, 1.0])
    proximal = rng.choice([0.0, 0.0, 0.0, 0.1])
    frozen = rng.choice([None, None, None, next(iter(dict(server.named_parameters()))).rpartition(".")[0]]) or None
    client = copy.deepcopy(server)
    own = dict(client.named_parameters())
    moving = {key: value for key, value in own.items() if not (frozen and key.startswith(f"{frozen}."))}
    optimiser = getattr(torch.optim, kind)(list(moving.values()), lr=rate, **arguments)
    first = _epochs(client, moving, images, labels, optimiser, epochs, mini_batch, accumulate, max_norm, proximal)
    before, after = server.state_dict(), client.state_dict()
    if not all(bool(torch.isfinite(value).all()) for value in [*after.values(), *first.values()]):
        return None
    difference = {key: after[key] - before[key] for key in after}
    prefix = rng.choice(PREFIXES)
    sent = {kind: {prefix + key: value for key, value in one.items()} for kind, one in zip(KINDS, (after, difference, first))}
    options = {key: value for key, value in arguments.items() if key not in ("momentum", "weight_decay")}
    training = dm.FedAvg(
        learning_rate=rate,
        epochs=epochs,
        mini_batch=mini_batch,
        shuffle=True,
        optimizer=kind.lower(),
        momentum=arguments.get("momentum", 0.0),
        weight_decay=arguments.get("weight_decay"),
        optimizer_options=options or None,
        accumulate=accumulate,
        max_norm=max_norm,
        proximal=proximal,
        frozen=(frozen,) if frozen else (),
    )
    mode = "train" if server.training else "eval"
    stage = "trained" if trained else "fresh"
    words = f"{name}, {classes} classes, {stage}, {mode}, {chosen}, rate {rate:.2g}, {epochs} epochs of {mini_batch}"
    extras = f"accumulate {accumulate}, clip {max_norm}, proximal {proximal}, frozen {frozen}, prefix {prefix!r}"
    return Client(words=f"{words}, {extras}", optimiser=chosen, rate=rate, server=server, sent=sent, training=training)


def _samples(prototypes: Tensor, count: int) -> tuple[Tensor, Tensor]:
    labels = torch.randint(len(prototypes), (count,))
    return (prototypes[labels] + torch.randn(count, *prototypes.shape[1:]) / 4).clamp(0, 1), labels


def _train(model: nn.Module, images: Tensor, labels: Tensor, optimiser: torch.optim.Optimizer, mini_batch: int, steps: int) -> None:
    for places in itertools.islice(itertools.cycle(torch.arange(len(labels)).split(mini_batch)), steps):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(images[places]), labels[places]).backward()
        optimiser.step()


def _epochs(
    client: nn.Module,
    moving: dict[str, nn.Parameter],
    images: Tensor,
    labels: Tensor,
    optimiser: torch.optim.Optimizer,
    epochs: int,
    mini_batch: int | None,
    accumulate: int,
    max_norm: float | None,
    proximal: float,
) -> dict[str, Tensor]:
    """Local training as a user writes it; gives the gradient of the whole batch before the first step."""
    loss, start = nn.functional.cross_entropy, {key: value.detach().clone() for key, value in moving.items()}
    twin = copy.deepcopy(client)
    slopes = torch.autograd.grad(loss(twin(images), labels), [dict(twin.named_parameters())[key] for key in moving], allow_unused=True)
    for _ in range(epochs):
        pieces = list(torch.randperm(len(labels)).split(mini_batch or len(labels)))
        for group in (pieces[first : first + accumulate] for first in range(0, len(pieces), accumulate)):
            optimiser.zero_grad()
            for piece in group:
                (loss(client(images[piece]), labels[piece]) / len(group)).backward()
            for key, value in moving.items():
                if proximal and value.grad is not None:
                    value.grad += proximal * (value.detach() - start[key])
            if max_norm is not None:
                nn.utils.clip_grad_norm_(list(moving.values()), max_norm)
            optimiser.step()
    return {key: slope for key, slope in zip(moving, slopes) if slope is not None}


def receive(client: Client, content: str, kind: Kind) -> str:
    """Why the content is refused under the kind; empty where it is accepted."""
    step = dm.FedAvg(learning_rate=client.training.learning_rate, steps=1, frozen=client.training.frozen)
    declared = None if kind == "gradient" else step if content == "gradient" else client.training
    try:
        dm.receive(client.server, client.sent[content], kind=kind, input_shape=SHAPE, batch_size=SAMPLES, training=declared)
    except ValueError as error:
        return str(error)
    return ""


def clients(seed: int, count: int) -> Iterator[tuple[int, Client]]:
    drawn = ((place, draw_client(place)) for place in itertools.count(seed))
    yield from itertools.islice(((place, client) for place, client in drawn if client is not None), count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    tried, refused, began, last = Counter(), Counter(), time.process_time(), chosen.seed
    for last, client in clients(chosen.seed, chosen.clients):
        for content, kind in itertools.product(KINDS, KINDS):
            reason = receive(client, content, kind)
            tried[content, kind] += 1
            refused[content, kind] += bool(reason)
            if (content == kind) == bool(reason):
                print(f"{last}: {content} under {kind}: {reason[:300] or 'accepted'}\n    {client.words}", flush=True)
    rows = [[content, *(f"{refused[content, kind]} of {tried[content, kind]}" for kind in KINDS)] for content in KINDS]
    for row in rows:
        print(*row, sep="  ")
    print(f"{time.process_time() - began:.0f} CPU s")
    if chosen.record:
        columns = ["sent", *(f'refused as "{kind}"' for kind in KINDS)]
        write_measurement(chosen.record, f"{chosen.seed} to {last}", columns, rows, [])


if __name__ == "__main__":
    main()
