"""`dosimeter inspect` on models whose layers are no linear modules, and on honest training that looks least like it.

    python benchmarks/inspect_written_otherwise.py [--seeds 0 6] [--data ../shared/data]

Honest: six ways to write a last layer and three to write a first one, in five states; rounds of many steps with momentum;
perceptrons that few classes have trained; layers that were widened by copies. Rigged by hand: GradFilt in every last layer,
imprint's bins and trap weights in every first one. Each with nothing, with data, and with data and the round before.
Prints how many inspections were suspicious, by kind, and which checks were.
"""

from __future__ import annotations

import argparse
import copy
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate, linear

from dosimeter.data.load import load_images
from dosimeter.inspection.inspect import inspect
from dosimeter.types import Batch

SIZE, CLASSES, ROWS, OWN = 16, 10, 200, 32
SHARED = ("cifar10.npz", "svhn.npz")


class Last(nn.Module):
    """Convolutions, then logits that no `nn.Linear` of pooled features gives."""

    def __init__(self, kind: str, channels: int) -> None:
        super().__init__()
        self.kind = kind
        self.below = nn.Sequential(nn.Conv2d(channels, 12, 3, 2, 1), nn.ReLU(), nn.Conv2d(12, 24, 3, 2, 1), nn.ReLU())
        layer = nn.Conv2d(24, CLASSES, 1) if kind.startswith("pixel") else nn.Linear(24, CLASSES)
        self.weight = nn.Parameter(layer.weight.detach().T.clone() if kind == "columns" else layer.weight.detach().clone())
        self.bias = nn.Parameter(layer.bias.detach().clone())

    def forward(self, inputs: Tensor) -> Tensor:
        maps = self.below(inputs)
        tokens = maps.flatten(2).transpose(1, 2)
        match self.kind:
            case "pixel":
                return nn.functional.conv2d(maps, self.weight, self.bias).mean((2, 3))
            case "rows":
                return linear(maps.mean((2, 3)), self.weight, self.bias)
            case "columns":
                return maps.mean((2, 3)) @ self.weight + self.bias
            case "tokens":
                return linear(tokens, self.weight, self.bias).mean(1)
            case "tokens, temperature":
                return linear(tokens, self.weight, self.bias).mean(1) / 2
        return linear(tokens, self.weight, self.bias).amax(1)

    @property
    def rows(self) -> Tensor:
        """(C, *): a view of the weight with the classes first."""
        return self.weight.T if self.kind == "columns" else self.weight


class First(nn.Module):
    """Rows on the raw input, as a module, a kernel or bare parameters; then the rest of a perceptron, or behind it a network."""

    def __init__(self, kind: str, channels: int, *, inserted: bool) -> None:
        super().__init__()
        self.kind, self.inserted, size = kind, inserted, channels * SIZE**2
        layer = nn.Conv2d(channels, ROWS, SIZE) if kind == "kernel" else nn.Linear(size, ROWS)
        self.layer = None if kind == "bare" else layer
        self.weight, self.bias = nn.Parameter(layer.weight.detach().clone()), nn.Parameter(layer.bias.detach().clone())
        if self.layer is not None:
            self.layer.weight, self.layer.bias = self.weight, self.bias
        self.rest = Last("rows", channels) if inserted else nn.Linear(ROWS, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        taken = inputs if self.kind == "kernel" else inputs.flatten(1)
        fired = (linear(taken, self.weight, self.bias) if self.layer is None else self.layer(taken)).flatten(1).relu()
        return self.rest(inputs + 1e-3 * fired.mean(1)[:, None, None, None]) if self.inserted else self.rest(fired)


LASTS = ("pixel", "rows", "columns", "tokens", "tokens, temperature", "largest token")
FIRSTS = ("module", "kernel", "bare")
STATES = ("untrained", "trained", "momentum", "few classes", "pruned")


def trained(model: nn.Module, data: Batch, optimizer: str, steps: int, rate: float, rng: torch.Generator) -> nn.Module:
    model = copy.deepcopy(model)
    kinds = {"adam": torch.optim.AdamW(model.parameters(), rate), "sgd": torch.optim.SGD(model.parameters(), rate, momentum=0.9)}
    for _ in range(steps):
        chosen = torch.randint(len(data.inputs), (32,), generator=rng)
        kinds[optimizer].zero_grad()
        cross_entropy(model(data.inputs[chosen]), data.targets[chosen]).backward()
        kinds[optimizer].step()
    return model


def few(data: Batch, classes: int) -> Batch:
    return Batch(data.inputs[data.targets < classes], data.targets[data.targets < classes])


def brought(model: nn.Module, data: Batch, state: str, rng: torch.Generator) -> nn.Module:
    if state == "untrained":
        return model
    if state == "few classes":
        return trained(model, few(data, 3), "adam", 40, 2e-3, rng)
    found = trained(model, data, *(("sgd", 40, 0.02) if state == "momentum" else ("adam", 40, 2e-3)), rng)
    if state == "pruned":
        with torch.no_grad():
            for parameter in (p for p in found.parameters() if p.ndim >= 2):
                parameter.masked_fill_(parameter.abs() <= parameter.abs().flatten().quantile(0.8), 0.0)
    return found


def honest(data: Batch, rng: torch.Generator) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """Kind, model, and the model of the round before."""
    channels = data.inputs.shape[1]
    lasts = [(f"last layer: {kind}", Last(kind, channels)) for kind in LASTS]
    firsts = [(f"first layer: {kind}", First(kind, channels, inserted=False)) for kind in FIRSTS]
    for (kind, start), state in product(lasts + firsts, STATES):
        before = brought(start, data, state, rng)
        yield kind, before if state in ("untrained", "pruned") else trained(before, data, "adam", 4, 1e-3, rng), before
    for steps, rate in ((40, 0.05), (100, 0.05), (40, 0.1)):
        start = nn.Sequential(nn.Flatten(), nn.Linear(channels * SIZE**2, CLASSES))
        yield "logistic regression after a long round", trained(start, data, "sgd", steps, rate, rng), start
    for activation in (nn.Tanh, nn.ReLU, nn.Sigmoid):
        for classes in (1, 2, 5):
            start = nn.Sequential(nn.Flatten(), nn.Linear(channels * SIZE**2, 64), activation(), nn.Linear(64, CLASSES))
            yield "perceptron trained on 1, 2 or 5 classes", trained(start, few(data, classes), "adam", 60, 5e-3, rng), start
    for sign in (1.0, -1.0):
        start = nn.Sequential(nn.Flatten(), nn.Linear(channels * SIZE**2, 64), nn.ReLU(), nn.Linear(64, CLASSES))
        with torch.no_grad():
            start[1].weight[32:] = sign * start[1].weight[:32]
            start[1].bias[32:] = sign * start[1].bias[:32]
        yield "widened by copies, or looks linear", start, start
        yield "the same after a round", trained(start, data, "adam", 20, 1e-3, rng), start


def rigged(data: Batch, rng: torch.Generator) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    channels = data.inputs.shape[1]
    target = int(torch.randint(CLASSES, (), generator=rng))
    for kind in LASTS:
        before = trained(Last(kind, channels), data, "adam", 20, 2e-3, rng)
        model = copy.deepcopy(before)
        others = torch.arange(CLASSES) != target
        with torch.no_grad():
            model.rows[others] = 0.0  # pyright: ignore
            model.bias[others] = 1000.0  # pyright: ignore
        yield f"gradfilt in {kind}", model, before
    for kind in FIRSTS:
        for attack, plant in (("imprint", _bins), ("trap_weights", _traps)):
            for inserted in (True, False):
                before = First(kind, channels, inserted=inserted)
                model = copy.deepcopy(before)
                with torch.no_grad():
                    plant(model, rng)
                yield f"{attack} in {kind}", model, before


def _bins(model: First, rng: torch.Generator) -> None:
    model.weight.fill_(1 / model.weight[0].numel())
    model.bias.copy_(-torch.linspace(0.1, 0.9, ROWS))


def _traps(model: First, rng: torch.Generator) -> None:
    """Half of each row is minus the other half, scaled up, in another order (Boenisch et al.)."""
    for row in model.weight.view(ROWS, -1):
        order = torch.randperm(row.numel(), generator=rng)
        half = torch.randn(row.numel() // 2, generator=rng).abs()
        row[order[: len(half)]] = -half
        row[order[len(half) : 2 * len(half)]] = 0.97 * half[torch.randperm(len(half), generator=rng)]
    model.bias.zero_()


def inspected(cases: Callable[[Batch, torch.Generator], Iterator[tuple[str, nn.Module, nn.Module]]], data: Batch, seed: int) -> Counter:
    rng, tally = torch.Generator().manual_seed(seed), Counter()
    own = torch.randperm(len(data.inputs), generator=rng)[:OWN]
    batch = Batch(data.inputs[own], data.targets[own])
    torch.manual_seed(seed)
    for kind, model, before in cases(data, rng):
        for found in (inspect(model), inspect(model, batch), inspect(model, batch, before)):
            tally[kind, "inspected"] += 1
            tally[kind, "suspicious"] += found.suspicious
            tally.update((kind, finding.check) for finding in found.findings if finding.suspicious)
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs=2, default=(0, 6))
    parser.add_argument("--data", type=Path, default=None)
    arguments = parser.parse_args()
    sets = [load_images(str(arguments.data / name)) for name in SHARED] if arguments.data else [load_images("digits")]
    for label, cases in (("honest", honest), ("rigged", rigged)):
        tally: Counter = Counter()
        for seed in range(*arguments.seeds):
            images = sets[seed % len(sets)]
            pixels = interpolate(images.images[:1500], (SIZE, SIZE), mode="bilinear", antialias=True)
            tally += inspected(cases, Batch(pixels, images.labels[:1500]), seed)
        kinds = list(dict.fromkeys(kind for kind, _ in tally))
        whole = [sum(tally[kind, column] for kind in kinds) for column in ("suspicious", "inspected")]
        print(f"{label}: suspicious {whole[0]} of {whole[1]} inspections", flush=True)
        for kind in kinds:
            checks = ", ".join(
                f"{check} {times}" for (k, check), times in tally.items() if k == kind and check not in ("inspected", "suspicious")
            )
            print(f"  {kind:42s} {tally[kind, 'suspicious']:4d} of {tally[kind, 'inspected']:4d}  {checks}", flush=True)


if __name__ == "__main__":
    main()
