"""Where the thresholds of `dosimeter inspect` come from: honest models of every kind, rigged ones of every attack.

    python benchmarks/inspect_thresholds.py [--honest 500] [--rigged 200] [--seed 0] [--workers 1] [--unseen] [--data ../shared/data]

Prints, for each check, the honest maximum, the 99th percentile, the least that the attacks it is made for reach, and the
threshold in force; then the false-positive rate, the detection rate by attack, with and without data, and what a GradFilt
that hides from one check after the other still shows. Images are the bundled ones, or those of `--data`. `--unseen` takes
architectures and initialisations that no threshold was set with.
"""

from __future__ import annotations

import argparse
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path

import torch
from honest_models import Member, Zoo, head_of
from torch import nn

import dosimeter as dm
from dosimeter.inspection.inspect import CHECKS, THRESHOLDS, Inspection, inspect
from dosimeter.types import Batch

HIDING = {
    "Ω = 11, under the bias check": {"bias": 11.0},
    "Ω = 11, α = 1e-3": {"bias": 11.0, "scale": 1e-3},
    "camouflage .3, under the row check": {"camouflage": 0.3},
    "Ω = 11, camouflage .1": {"bias": 11.0, "camouflage": 0.1},
    "Ω = 11, camouflage 1": {"bias": 11.0, "camouflage": 1.0},
    "Ω = 7.5, camouflage .1": {"bias": 7.5, "camouflage": 0.1},
    "Ω = 7.5, camouflage .3": {"bias": 7.5, "camouflage": 0.3},
    "Ω = 7.5, camouflage 1": {"bias": 7.5, "camouflage": 1.0},
    "Ω = 7.5, equal rows instead of zero ones": {"bias": 7.5},
}


def attacks(zoo: Zoo, classes: int, shape: tuple[int, ...]) -> dict[str, dm.attack]:  # pyright: ignore
    target = int(torch.randint(classes, (), generator=zoo.rng))
    return {
        "gradfilt": dm.attack("gradfilt", targets=(target,), input_shape=shape),
        "gradfilt with layer": dm.attack("gradfilt_imprint", targets=(target,), expected=20, input_shape=shape),
        "imprint": dm.attack("imprint", input_shape=shape),
        "imprint sparse": dm.attack("imprint", sparse=True, input_shape=shape),
        "trap_weights": dm.attack("trap_weights", input_shape=shape),
        "loki": dm.attack("loki", clients=3, input_shape=shape),
    }


def statistics(found: Inspection) -> dict[str, float]:
    return {finding.check: finding.statistic for finding in found.findings}


@dataclass
class Tally:
    """What one process saw, or all of them together."""

    honest: dict[str, list[float]] = field(default_factory=lambda: {check: [] for check in CHECKS})
    tried_honest: int = 0
    alarms: list[str] = field(default_factory=list)
    rigged: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    tried: Counter[tuple[str, str]] = field(default_factory=Counter)
    detected: Counter[tuple[str, str]] = field(default_factory=Counter)
    missed: list[str] = field(default_factory=list)
    hidden: list[tuple[str, float, float, float, tuple[str, ...]]] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        for check, values in other.honest.items():
            self.honest[check] += values
        for label, checks in other.rigged.items():
            for check, values in checks.items():
                self.rigged.setdefault(label, {}).setdefault(check, []).extend(values)
        self.tried_honest += other.tried_honest
        self.alarms += other.alarms
        self.tried += other.tried
        self.detected += other.detected
        self.missed += other.missed
        self.hidden += other.hidden


def campaign(seed: int, data: Path | None, unseen: bool, honest: int, rigged: int, hiding: int) -> Tally:
    torch.set_num_threads(1)
    zoo, tally = Zoo(seed, data, unseen), Tally()
    for index in range(honest):
        try_honest(zoo.draw(), ("data and round before", "data", "nothing")[index % 3], tally)
    for _ in range(rigged):
        try_rigged(zoo, zoo.draw(), tally)
    while hiding:
        member = zoo.draw()
        below = len(list(member.model.parameters())) - len(list(head_of(member.model).parameters()))
        if member.classes > 2 and below and bool(head_of(member.model).weight.any()):
            try_hiding(member, tally)
            zoo.waiting.clear()  # the next one is of another family
            hiding -= 1
    return tally


def try_honest(member: Member, mode: str, tally: Tally) -> None:
    batch, before = (None if mode == "nothing" else member.batch), (member.before if mode == "data and round before" else None)
    found = inspect(member.model, batch, before)
    tally.tried_honest += 1
    for check, statistic in statistics(found).items():
        tally.honest[check].append(statistic)
    fired = [f"{finding.check} {finding.statistic:.3g}" for finding in found.findings if finding.suspicious]
    if fired:
        tally.alarms.append(f"{member.architecture}, {member.state}, {member.classes} classes, {mode}: {', '.join(fired)}")


def try_rigged(zoo: Zoo, member: Member, tally: Tally) -> None:
    """Every attack on one honest model, with its data and without."""
    batch = member.batch
    for label, attack in attacks(zoo, member.classes, tuple(batch.inputs.shape[1:])).items():
        changed = attack.tamper(member.model)
        for mode, found in (("with data", inspect(changed, batch)), ("without", inspect(changed))):
            tally.tried[label, mode] += 1
            tally.detected[label, mode] += found.suspicious
            if not found.suspicious:
                tally.missed.append(f"{label} on {member.architecture}, {member.state}, {member.classes} classes, {mode}")
            for check, statistic in statistics(found).items():
                tally.rigged.setdefault(label, {}).setdefault(check, []).append(statistic)


def try_hiding(member: Member, tally: Tally) -> None:
    """GradFilt with Ω, α and camouflage tuned to pass one check, or with rows that are alike instead of zero."""
    batch = member.batch
    honest = _counted(member.model, batch)
    for label, options in HIDING.items():
        attack = dm.attack("gradfilt", targets=(int(batch.targets[0]),), input_shape=tuple(batch.inputs.shape[1:]), **options)
        rigged = attack.tamper(member.model)
        if "equal rows" in label:
            _level_rows(rigged, member.model)
        exposure = dm.observe(rigged, batch)
        right = float(dm.score(dm.recover_labels(exposure, "gradfilt"), batch)["insacc"][0])
        fired = tuple(finding.check for finding in inspect(rigged, batch).findings if finding.suspicious)
        tally.hidden.append((label, right, honest, _leak(attack, exposure, batch), fired))


def _counted(model: nn.Module, batch: Batch) -> float:
    """InsAcc of iLRG, or of `subspace` on a head without bias: what an honest model's gradient tells of the labels."""
    method = "subspace" if head_of(model).bias is None else "ilrg"
    try:
        return float(dm.score(dm.recover_labels(dm.observe(model, batch), method), batch)["insacc"][0])
    except dm.Refused:
        return 0.0


def _level_rows(rigged: nn.Module, honest_model: nn.Module) -> None:
    """Add one honest row to all rows: softmax and filter stay as they are, and no row is zero."""
    with torch.no_grad():
        head_of(rigged).weight.add_(head_of(honest_model).weight[0])


def _leak(attack, exposure, batch: Batch) -> float:
    """The relative error of the calibrated gradients below the head against the target samples' own."""
    chosen = torch.isin(batch.targets, torch.tensor(attack.targets))
    own = dm.observe(exposure.model, Batch(batch.inputs[chosen], batch.targets[chosen])).update
    calibrated = attack.calibrate(exposure)[0].update
    names = list(own)[:-2]
    difference = sum(float((calibrated[name] - own[name]).square().sum()) for name in names)
    return (difference / max(sum(float(own[name].square().sum()) for name in names), 1e-30)) ** 0.5


def table(tally: Tally) -> None:
    print(f"{'check':18s} {'honest p99':>11s} {'honest max':>11s} {'threshold':>10s}   least of the rigged, by attack")
    for check in CHECKS:
        seen = torch.tensor(tally.honest[check] or [0.0], dtype=torch.float64)
        least = ", ".join(f"{attack} {min(found[check]):.3g}" for attack, found in tally.rigged.items() if found.get(check))
        print(f"{check:18s} {float(seen.quantile(0.99)):11.4g} {float(seen.max()):11.4g} {THRESHOLDS[check]:10.4g}   {least}")


def hidden(tally: Tally) -> None:
    print("\na GradFilt that hides (InsAcc of its labels, and of iLRG on the honest model; error of the separated gradients)")
    for label in HIDING:
        rows = [row for row in tally.hidden if row[0] == label]
        if not rows:
            continue
        right, honest = (sum(row[column] for row in rows) / len(rows) for column in (1, 2))
        error = sorted(row[3] for row in rows)[len(rows) // 2]
        unseen = sorted(row[3] for row in rows if not row[4])
        seen = Counter(check for row in rows for check in row[4] or ("nothing",))
        checks = ", ".join(f"{check} {times}/{len(rows)}" for check, times in seen.most_common())
        least = f", least where unseen {unseen[0]:.1e}" if unseen else ""
        print(f"  {label:40s} InsAcc {right:.2f} ({honest:.2f})  separation error {error:.1e} (median{least})  seen by: {checks}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--honest", type=int, default=500)
    parser.add_argument("--rigged", type=int, default=200)
    parser.add_argument("--hiding", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=None, help="start nothing new after")
    parser.add_argument("--unseen", action="store_true")
    parser.add_argument("--data", type=Path, default=None)
    arguments = parser.parse_args()
    parts = 8 * arguments.workers if arguments.workers > 1 else 1
    counts = [
        [len(part) for part in torch.arange(n).tensor_split(parts)] for n in (arguments.honest, arguments.rigged // 5, arguments.hiding)
    ]
    tally = Tally()
    with ProcessPoolExecutor(arguments.workers, mp_context=get_context("spawn")) as pool:
        seeds = range(1000 * arguments.seed, 1000 * arguments.seed + parts)
        running = [pool.submit(campaign, seed, arguments.data, arguments.unseen, *part) for seed, part in zip(seeds, zip(*counts))]
        try:
            for done in as_completed(running, timeout=arguments.seconds):
                if done.exception() is None:
                    tally.add(done.result())
                else:
                    print(f"a part failed: {done.exception()}", flush=True)
        except TimeoutError:
            print(f"stopped after {arguments.seconds:g} s: what follows is of the parts that were done")
            pool.shutdown(wait=False, cancel_futures=True)
    table(tally)
    print(f"\nhonest models flagged: {len(tally.alarms)} of {tally.tried_honest}")
    for alarm in tally.alarms:
        print(f"  {alarm}")
    print("rigged models detected:")
    for key in sorted(tally.tried):
        print(f"  {key[0]:20s} {key[1]:10s} {tally.detected[key]} of {tally.tried[key]}")
    for line in tally.missed[:20]:
        print(f"  missed: {line}")
    hidden(tally)


if __name__ == "__main__":
    main()
