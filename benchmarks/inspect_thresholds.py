"""Where the thresholds of `dosimeter inspect` come from: honest models of every kind, rigged ones of every attack.

    python benchmarks/inspect_thresholds.py [--honest 500] [--rigged 200] [--seed 0]

Prints, for each check, the honest maximum, the 99th percentile, the least that the attacks it is made for reach, and the
threshold in force; then the false-positive rate, the detection rate by attack and architecture, with and without data,
and what a GradFilt that hides from one check after the other still shows.
"""

from __future__ import annotations

import argparse
import copy
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import interpolate

import dosimeter as dm
from dosimeter.data.load import load_images
from dosimeter.inspection.inspect import CHECKS, THRESHOLDS, Inspection, inspect
from dosimeter.models.loading import load_model
from dosimeter.types import Batch

ARCHITECTURES = {
    "fcn3": ({"hidden": (64, 48)}, {"hidden": (200, 100), "activation": "tanh"}),
    "mlp6": ({"hidden": (96, 64, 64, 48, 32, 24)},),
    "fcn4": ({"hidden": (128, 64, 32)},),
    "lenet5": ({}, {"activation": "sigmoid"}),
    "lenet_dlg": ({}, {"activation": "relu", "initialisation": "kaiming"}),
    "small_cnn": ({"width": 8}, {"width": 8, "activation": "tanh"}),
    "convnet": ({"width": 2},),
    "resnet20": ({},),
    "vgg11": ({"hidden": 32, "batch_norm": True},),
}
STATES = ("untrained", "trained", "fine-tuned", "pruned", "half precision", "weight decay", "unbalanced bias")
SETS = ("digits", "faces", "photographs")
LEAST = {"vgg11": 32, "lenet5": 20}  # pixels
LARGEST = 16  # pixels, where the architecture can do with it
TRAINED_ON = 128  # images


@dataclass(frozen=True)
class Member:
    """An honest model, what it was a round before, and a client's own data."""

    architecture: str
    state: str
    before: nn.Module
    model: nn.Module
    batch: Batch

    @property
    def classes(self) -> int:
        with torch.no_grad():
            return self.model(self.batch.inputs[:2]).shape[1]


class Zoo:
    """Small honest models in every state, made from a seed; each training serves all the states that follow from it."""

    def __init__(self, seed: int) -> None:
        self.rng = torch.Generator().manual_seed(seed)
        self.sets = {name: load_images(name) for name in SETS}
        self.waiting: list[Member] = []

    def draw(self) -> Member:
        if not self.waiting:
            self.waiting = self.family()
        return self.waiting.pop()

    def family(self) -> list[Member]:
        """One architecture on one data set, in every state."""
        name = self.pick(list(ARCHITECTURES))
        options = dict(self.pick(ARCHITECTURES[name]))
        images = self.sets[self.pick(list(SETS))]
        size = max(LEAST.get(name, 8), min(images.images.shape[-1], LARGEST))
        pixels = interpolate(images.images, (size, size), mode="bilinear", antialias=True)
        options |= {"classes": len(images.class_names), "channels": pixels.shape[1], "size": size}
        order = torch.randperm(len(pixels), generator=self.rng)
        chosen, own = order[:TRAINED_ON], order[-self.pick((8, 16, 32, 64)) :]
        data, batch = Batch(pixels[chosen], images.labels[chosen]), Batch(pixels[own], images.labels[own])
        untrained = load_model(name, options, None, int(torch.randint(10**6, (), generator=self.rng)))
        trained = self.train(untrained, data, epochs=self.pick((2, 5)), rate=2e-3)
        before = {state: self.bring(untrained, trained, data, state) for state in STATES}
        after = {state: self.finish(self.next_round(model, data, state), state) for state, model in before.items()}
        return [Member(name, state, self.finish(before[state], state).eval(), after[state].eval(), batch) for state in STATES]

    def bring(self, untrained: nn.Module, trained: nn.Module, data: Batch, state: str) -> nn.Module:
        """The model of the round before."""
        if state == "untrained":
            return copy.deepcopy(untrained)
        if state == "weight decay":
            return self.train(untrained, data, epochs=3, rate=2e-3, decay=self.pick((0.1, 1.0, 5.0)))
        model = copy.deepcopy(trained)
        if state == "fine-tuned":  # a new head on trained layers
            fresh = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
            with torch.no_grad():
                fresh.weight.copy_(torch.randn(fresh.weight.shape, generator=self.rng) / fresh.in_features**0.5)
        return model

    def next_round(self, model: nn.Module, data: Batch, state: str) -> nn.Module:
        if state == "untrained":
            return copy.deepcopy(model)
        return self.train(model, data, epochs=1, rate=self.pick((1e-4, 1e-3)), decay=0.1 if state == "weight decay" else 0.0)

    def finish(self, model: nn.Module, state: str) -> nn.Module:
        """What is done to a model after training."""
        model = copy.deepcopy(model)
        share, slope = self.pick((0.5, 0.8, 0.9, 0.95)), self.pick((-2.0, -4.6, -6.9))
        head = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
        with torch.no_grad():
            if state == "pruned":
                for parameter in (p for p in model.parameters() if p.ndim >= 2):
                    cut = parameter.abs().flatten().kthvalue(max(1, int(share * parameter.numel()))).values
                    parameter.masked_fill_(parameter.abs() <= cut, 0.0)
            if state == "half precision":
                for value in [*model.parameters(), *model.buffers()]:
                    if value.is_floating_point():
                        value.copy_(value.half().to(value))
            if state == "unbalanced bias" and head.bias is not None:  # the logarithm of class shares down to 1 in 1,000
                head.bias.add_(torch.linspace(0, slope, head.out_features))
        return model

    def train(self, model: nn.Module, data: Batch, *, epochs: int, rate: float, decay: float = 0.0) -> nn.Module:
        model = copy.deepcopy(model).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=decay)
        for _ in range(epochs):
            for chosen in torch.randperm(len(data.inputs), generator=self.rng).split(32):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(data.inputs[chosen]), data.targets[chosen]).backward()
                optimizer.step()
        return model

    def pick(self, choices):
        return choices[int(torch.randint(len(choices), (), generator=self.rng))]


def attacks(zoo: Zoo, classes: int, shape: tuple[int, ...]) -> dict[str, dm.attack]:  # pyright: ignore
    target = int(torch.randint(classes, (), generator=zoo.rng))
    return {
        "gradfilt": dm.attack("gradfilt", targets=(target,), input_shape=shape),
        "gradfilt with layer": dm.attack("gradfilt", targets=(target,), expected=20, input_shape=shape),
        "imprint": dm.attack("imprint", input_shape=shape),
        "imprint sparse": dm.attack("imprint", sparse=True, input_shape=shape),
        "trap_weights": dm.attack("trap_weights", input_shape=shape),
    }


def statistics(found: Inspection) -> dict[str, float]:
    return {finding.check: finding.statistic for finding in found.findings}


def honest(zoo: Zoo, count: int) -> Iterator[tuple[Member, str, Inspection]]:
    """Each honest model once: with data and its round before, with data alone, or with nothing, in turn."""
    for index in range(count):
        member, mode = zoo.draw(), ("data and round before", "data", "nothing")[index % 3]
        batch, before = (None if mode == "nothing" else member.batch), (member.before if mode == "data and round before" else None)
        yield member, mode, inspect(member.model, batch, before)


def stealthy(zoo: Zoo, count: int) -> None:
    """GradFilt with Ω, α and camouflage tuned to pass one check, or with rows that are alike instead of zero."""
    print("\na GradFilt that hides (labels right: InsAcc on the client's batch; seen by: checks that fire with data)")
    variants = {
        "Ω = 11, under the bias check": {"bias": 11.0},
        "Ω = 11, α = 1e-3": {"bias": 11.0, "scale": 1e-3},
        "camouflage .3, under the row check": {"camouflage": 0.3},
        "Ω = 11, camouflage .1": {"bias": 11.0, "camouflage": 0.1},
        "Ω = 11, camouflage 1": {"bias": 11.0, "camouflage": 1.0},
        "Ω = 6, camouflage 1": {"bias": 6.0, "camouflage": 1.0},
        "Ω = 11, equal rows instead of zero ones": {"bias": 11.0},
    }
    members = []
    while len(members) < count:
        member = zoo.draw()
        members += [member] if member.classes > 2 else []
    for label, options in variants.items():
        right: list[float] = []
        leak: list[float] = []
        seen: Counter[str] = Counter()
        for member in members:
            batch = member.batch
            attack = dm.attack("gradfilt", targets=(int(batch.targets[0]),), input_shape=tuple(batch.inputs.shape[1:]), **options)
            rigged = attack.tamper(member.model)
            if "equal rows" in label:
                _level_rows(rigged, member.model)
            exposure = dm.observe(rigged, batch)
            right.append(float(dm.score(dm.recover_labels(exposure, "gradfilt"), batch)["insacc"][0]))
            leak.append(_leak(attack, exposure, batch))
            seen.update([finding.check for finding in inspect(rigged, batch).findings if finding.suspicious] or ["nothing"])
        checks = ", ".join(f"{check} {times}/{count}" for check, times in seen.most_common())
        error = sorted(leak)[len(leak) // 2]
        print(f"  {label:40s} InsAcc {sum(right) / count:.2f}  separation error (median) {error:.1e}  seen by: {checks}")


def _level_rows(rigged: nn.Module, honest_model: nn.Module) -> None:
    """Add one honest row to all rows: softmax and filter stay as they are, and no row is zero."""
    heads = [[module for module in model.modules() if isinstance(module, nn.Linear)][-1] for model in (rigged, honest_model)]
    with torch.no_grad():
        heads[0].weight.add_(heads[1].weight[0])


def _leak(attack, exposure, batch: Batch) -> float:
    """The relative error of the calibrated gradients below the head against the target samples' own."""
    chosen = torch.isin(batch.targets, torch.tensor(attack.targets))
    own = dm.observe(exposure.model, Batch(batch.inputs[chosen], batch.targets[chosen])).update
    calibrated = attack.calibrate(exposure)[0].update
    names = list(own)[:-2]
    difference = sum(float((calibrated[name] - own[name]).square().sum()) for name in names)
    return (difference / max(sum(float(own[name].square().sum()) for name in names), 1e-30)) ** 0.5


def table(values: dict[str, list[float]], rigged: dict[str, dict[str, list[float]]]) -> None:
    print(f"{'check':18s} {'honest p99':>11s} {'honest max':>11s} {'threshold':>10s}   least of the rigged, by attack")
    for check in CHECKS:
        seen = torch.tensor(values[check] or [0.0], dtype=torch.float64)
        least = ", ".join(f"{attack} {min(found[check]):.3g}" for attack, found in rigged.items() if found[check])
        print(f"{check:18s} {float(seen.quantile(0.99)):11.4g} {float(seen.max()):11.4g} {THRESHOLDS[check]:10.4g}   {least}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--honest", type=int, default=500)
    parser.add_argument("--rigged", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    zoo = Zoo(arguments.seed)
    values: dict[str, list[float]] = defaultdict(list)
    alarms: list[str] = []
    for member, mode, found in honest(zoo, arguments.honest):
        for check, statistic in statistics(found).items():
            values[check].append(statistic)
        fired = [finding.check for finding in found.findings if finding.suspicious]
        if fired:
            alarms.append(f"{member.architecture}, {member.state}, {mode}: {', '.join(fired)}")
    rigged: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    detected: Counter[tuple[str, str]] = Counter()
    tried: Counter[tuple[str, str]] = Counter()
    missed: list[str] = []
    for _ in range(-(-arguments.rigged // 5)):
        member = zoo.draw()
        batch = member.batch
        for label, attack in attacks(zoo, member.classes, tuple(batch.inputs.shape[1:])).items():
            changed = attack.tamper(member.model)
            for mode, found in (("with data", inspect(changed, batch)), ("without", inspect(changed))):
                tried[label, mode] += 1
                detected[label, mode] += found.suspicious
                if not found.suspicious:
                    missed.append(f"{label} on {member.architecture}, {member.state}, {member.classes} classes, {mode}")
                for check, statistic in statistics(found).items():
                    rigged[label][check].append(statistic)
    table(values, rigged)
    print(f"\nhonest models flagged: {len(alarms)} of {arguments.honest}")
    for alarm in alarms:
        print(f"  {alarm}")
    print("rigged models detected:")
    for key in sorted(tried):
        print(f"  {key[0]:20s} {key[1]:10s} {detected[key]} of {tried[key]}")
    for line in missed[:20]:
        print(f"  missed: {line}")
    stealthy(zoo, 12)


if __name__ == "__main__":
    main()
