"""Looks for false certificates: thousands of batches of every kind, each certified sample held against the truth.

    python benchmarks/head_campaign.py run --shard 0 --shards 16 --seconds 400 --seed 1000 --data ../shared/data > shard-0.jsonl
    python benchmarks/head_campaign.py table shard-*.jsonl

A certificate is false where the feature's true error is above its error bar or above 1e-2, or its label is wrong (a soft one: by
more than 1e-2 in L1). A line is printed for each batch, so that a killed run loses nothing; shards see other seeds. Kinds that need
photographs are left out where `--data` is not given.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from head_cases import Case, build, errors, observed, outcome, photographs, trained
from torch import Tensor, nn
from torch.nn.functional import one_hot

import dosimeter as dm
from dosimeter.interfaces import Client, Defense


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One sort of batch."""

    name: str
    draw: Callable[..., Case]  # by seed=
    labels: Literal["unknown", "given", "partly given", "wrong"] = "unknown"


def clean() -> list[Kind]:
    double = torch.float64
    shapes = ((1, 100, 512), (8, 100, 512), (32, 100, 512), (48, 100, 512), (64, 1000, 512), (4, 10, 64), (9, 10, 64), (6, 100, 12))
    kinds = [Kind(name=f"float32 train B={b} C={c} H={h}", draw=partial(build, b, c, h, train=b > 1)) for b, c, h in shapes]
    kinds += [
        Kind(name=f"float32 eval B={b} C={c}", draw=partial(build, b, c, 512, train=False)) for b, c in ((8, 100), (32, 100), (4, 10))
    ]
    kinds += [
        Kind(name=f"float64 eval B={b} C={c}", draw=partial(build, b, c, 512, train=False, dtype=double)) for b, c in ((16, 100), (3, 10))
    ]
    kinds += [Kind(name=f"confident x{gain} B=8 C=100", draw=partial(build, 8, 100, 512, gain=gain)) for gain in (4.0, 8.0, 12.0, 20.0)]
    kinds += [Kind(name=f"confident x{gain} B=3 C=10", draw=partial(build, 3, 10, 64, gain=gain)) for gain in (4.0, 12.0)]
    kinds += [Kind(name=f"one label {same} of 8 C=100", draw=partial(one_label, same)) for same in (2, 4, 6, 8)]
    return [
        *kinds,
        Kind(name="one label 6 of 8 C=100 eval", draw=partial(one_label, 6, train=False)),
        Kind(name="samples that occur twice", draw=twins),
        Kind(name="inputs that occur under two labels", draw=partial(twins, other_labels=True)),
        Kind(name="no size declared B=12 C=100", draw=partial(build, 12, 100, 512, declare_batch_size=False)),
        Kind(name="more than the rank B=12 C=10", draw=partial(build, 12, 10, 64)),
        Kind(name="temperature", draw=partial(build, 8, 100, 512, loss=dm.CrossEntropy(temperature=2.0))),
        Kind(name="two local steps", draw=partial(build, 4, 100, 128, training=dm.FedAvg(steps=2, learning_rate=0.01))),
    ]


def labelled() -> list[Kind]:
    shapes = ((6, 10, 64), (8, 10, 64), (9, 10, 64), (48, 100, 512))
    kinds = [Kind(name=f"coupled, given B={b} C={c}", draw=partial(build, b, c, h), labels="given") for b, c, h in shapes]
    return [
        *kinds,
        Kind(name="coupled, unknown B=6 C=10", draw=partial(build, 6, 10, 64)),
        Kind(name="coupled, partly given B=6 C=10", draw=partial(build, 6, 10, 64), labels="partly given"),
        Kind(name="partly given B=16 C=100", draw=partial(build, 16, 100, 512), labels="partly given"),
        Kind(name="wrong labels B=8 C=100", draw=partial(build, 8, 100, 512), labels="wrong"),
        Kind(name="wrong labels B=6 C=10", draw=partial(build, 6, 10, 64), labels="wrong"),
    ]


def spoilt() -> list[Kind]:
    settings = [("gaussian_noise", {"std": 10.0**power}) for power in (-8, -7, -6, -5, -4, -2)]
    settings += [("laplace_noise", {"scale": 10.0**power}) for power in (-7, -6, -5, -4)]
    settings += [("pruning", {"ratio": ratio}) for ratio in (0.02, 0.1, 0.5, 0.9, 0.99)]
    settings += [("quantisation", {"bits": bits}) for bits in (24, 20, 16, 12, 8)]
    kinds = [
        Kind(name=f"{name} {options}", draw=partial(undeclared, dm.defense(name, **options), 8, 100, 512)) for name, options in settings
    ]
    kinds += [
        Kind(name=f"{name} {options} B=3 C=10", draw=partial(undeclared, dm.defense(name, **options), 3, 10, 64))
        for name, options in settings
        if 1e-7 <= options.get("std", 0) <= 1e-3 or options.get("bits", 0) > 12 or options.get("ratio", 1) < 0.2
    ]
    clipping = (("norm", 0.05), ("layer", 0.05), ("value", 1e-3), ("value", 1e-2))
    kinds += [
        Kind(
            name=f"clipped by {mode} to {norm}",
            draw=partial(build, 8, 100, 512, defenses=(dm.defense("clipping", max_norm=norm, mode=mode),)),
        )
        for mode, norm in clipping
    ]
    both = (dm.defense("clipping", max_norm=0.5), dm.defense("gaussian_noise", std=1e-6))
    kinds += [Kind(name="clipped, then noise", draw=partial(build, 8, 100, 512, defenses=both))]
    kinds += [
        Kind(name=f"rounded to {str(dtype).removeprefix('torch.')} B={b} C={c}", draw=partial(rounded, dtype, b, c))
        for dtype in (torch.bfloat16, torch.float16)
        for b, c in ((8, 100), (8, 1000), (2, 10))
    ]
    return kinds


def soft() -> list[Kind]:
    kinds = [Kind(name=f"mixup B={b} C={c}", draw=partial(mixed, b, c)) for b, c in ((2, 10), (4, 100), (8, 100), (16, 100), (8, 1000))]
    return [
        *kinds,
        Kind(name="mixup of one share B=8 C=100", draw=partial(mixed, 8, 100, one_share=True)),
        Kind(name="mixup eval float64 B=8 C=100", draw=partial(mixed, 8, 100, train=False, dtype=torch.float64)),
        Kind(name="mixup and noise 1e-6 B=4 C=100", draw=partial(mixed, 4, 100, defenses=(dm.defense("gaussian_noise", std=1e-6),))),
        Kind(name="mixup given B=8 C=100", draw=partial(mixed, 8, 100), labels="given"),
        Kind(name="smoothing declared", draw=partial(build, 8, 100, 512, loss=dm.CrossEntropy(smoothing=0.1))),
        Kind(name="smoothing undeclared", draw=partial(smoothed, 8, 100)),
        Kind(name="three blended B=4 C=100", draw=partial(blended, 4, 100)),
    ]


def real(data: Path) -> list[Kind]:
    train = [(8, 100, True), (16, 100, True), (32, 100, True), (4, 10, True)]
    kinds = [
        Kind(name=f"ResNet-20 float32 {'train' if mode else 'eval'} B={b} C={c}", draw=partial(residual, data, b, c, train=mode))
        for b, c, mode in (*train, (8, 100, False), (16, 100, False), (4, 10, False))
    ]
    kinds += [
        Kind(name=f"trained ResNet-20 {'train' if mode else 'eval'} B={b}", draw=partial(trained, data, b, train=mode))
        for b in (1, 2, 3, 4)
        for mode in (True, False)
    ]
    return [
        *kinds,
        Kind(name="ResNet-20 float64 eval B=16 C=100", draw=partial(residual, data, 16, 100, train=False, dtype=torch.float64)),
        Kind(name="trained ResNet-20 float64 eval B=4", draw=partial(trained, data, 4, train=False, dtype=torch.float64)),
        Kind(name="trained ResNet-20 eval B=6, given", draw=partial(trained, data, 6, train=False), labels="given"),
    ]


def one_label(same: int, *, seed: int, **options: Any) -> Case:
    """`same` samples of eight share a class, the others have one of their own."""
    labels = torch.randperm(100, generator=torch.Generator().manual_seed(seed))[:8]
    labels[:same] = labels[0].clone()
    return build(8, 100, 512, seed=seed, labels=labels, **options)


def twins(*, other_labels: bool = False, seed: int) -> Case:
    """Three samples occur twice, exactly or nearly so, if wished under other labels; there is no batch norm to tell them apart."""
    rng = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 100))
    inputs, labels = torch.rand(8, 256, generator=rng), torch.randint(0, 100, (8,), generator=rng)
    apart = 10.0 ** -(1 + 6 * float(torch.rand((), generator=rng))) * (seed % 3 > 0)
    inputs[5:] = inputs[:3] + apart * torch.randn(3, 256, generator=rng)
    labels[5:] = (labels[:3] + 7 * other_labels) % 100
    return observed(model, inputs.clamp(0, 1), labels, declare_batch_size=seed % 2 == 0)


def undeclared(defense: Defense, size: int, classes: int, features: int, *, seed: int) -> Case:
    """Behind a defense of which the server knows for every second seed only."""
    case = build(size, classes, features, seed=seed, defenses=(defense,))
    public = replace(case.exposure.public, defenses=()) if seed % 2 else case.exposure.public
    return replace(case, exposure=replace(case.exposure, public=public))


def rounded(dtype: torch.dtype, size: int, classes: int, *, seed: int) -> Case:
    """The update rounded to `dtype`; sent in it, or for every second seed as float32."""
    case = build(size, classes, 512, seed=seed)
    update = {name: change.to(dtype) for name, change in case.exposure.update.items()}
    if seed % 2:
        update = {name: change.float() for name, change in update.items()}
    return replace(case, exposure=replace(case.exposure, update=update))


def mixed(size: int, classes: int, *, seed: int, one_share: bool = False, defenses: tuple[Defense, ...] = (), **options: Any) -> Case:
    """A batch that mixup blended, inputs and labels alike, each by its own λ, or with `one_share` all by one."""
    plain = build(size, classes, 512, seed=seed, **options)
    rng = torch.Generator().manual_seed(seed)
    model, inputs = plain.exposure.model, torch.rand(size, 256, generator=rng).to(next(plain.exposure.model.parameters()))
    if one_share:
        share, partner = 0.5 + 0.5 * float(torch.rand((), generator=rng)), torch.randperm(size, generator=rng)
        hard = one_hot(plain.labels, classes).to(inputs.dtype)
        batch = dm.Batch(share * inputs + (1 - share) * inputs[partner], share * hard + (1 - share) * hard[partner])
    else:
        client = Client(model=model, batch=dm.Batch(inputs, plain.labels), training=dm.FedSGD(), loss=dm.CrossEntropy())
        batch = dm.defense("mixup")(client, rng).batch
    return observed(model, batch.inputs, batch.targets, defenses=defenses)


def smoothed(size: int, classes: int, *, seed: int) -> Case:
    """Label smoothing that nobody declares."""
    rng = torch.Generator().manual_seed(seed)
    strength, labels = 0.3 * torch.rand((), generator=rng), torch.randint(0, classes, (size,), generator=rng)
    return build(size, classes, 512, seed=seed, labels=(1 - strength) * one_hot(labels, classes) + strength / classes)


def blended(size: int, classes: int, *, seed: int) -> Case:
    """Labels of three classes each, which no method here looks for."""
    rng = torch.Generator().manual_seed(seed)
    labels, shares = torch.randint(0, classes, (size, 3), generator=rng), torch.rand(size, 3, generator=rng)
    soft = (one_hot(labels, classes) * (shares / shares.sum(1, keepdim=True))[:, :, None]).sum(1)
    return build(size, classes, 512, seed=seed, labels=soft)


def residual(data: Path, size: int, classes: int, *, seed: int, train: bool, dtype: torch.dtype = torch.float32) -> Case:
    labels = torch.randint(0, classes, (size,), generator=torch.Generator().manual_seed(seed))
    return photographs(data, "resnet20", labels, classes, seed=seed, train=train, dtype=dtype)


def known_labels(kind: Kind, case: Case) -> Tensor | None:
    match kind.labels:
        case "given":
            return case.labels
        case "partly given":
            return torch.where(torch.arange(len(case.labels)) % 2 == 0, case.labels, -1)
        case "wrong":
            return (case.labels + 1) % case.exposure.public.classes
    return None


def measured(kind: Kind, seed: int) -> dict[str, Any]:
    case = kind.draw(seed=seed)
    start = time.perf_counter()
    found = dm.recover_features(case.exposure, "subspace", labels=known_labels(kind, case), seed=seed)
    seconds = time.perf_counter() - start
    error, bar = errors(found, case)[found.certified], found.error_bar[found.certified] if found.error_bar is not None else torch.empty(0)
    closest = float((error / bar).max()) if len(error) else 0.0
    return {
        "kind": kind.name,
        "seed": seed,
        "seconds": round(seconds, 3),
        "returned": len(found.labels),
        "closest": closest,
        **outcome(found, case),
    }


def run(arguments: argparse.Namespace) -> None:
    kinds = [*clean(), *labelled(), *spoilt(), *soft(), *(real(arguments.data) if arguments.data else ())]
    kinds = [kind for kind in kinds if arguments.only in kind.name]
    end = time.perf_counter() + arguments.seconds
    for turn in range(10_000):
        for kind in kinds:
            if time.perf_counter() > end:
                return
            seed = arguments.seed + turn * arguments.shards + arguments.shard
            try:
                row = measured(kind, seed)
            except Exception as error:  # a finding like any other, which must not end the campaign
                row = {"crash": f"{type(error).__name__}: {error}", "kind": kind.name, "seed": seed}
            print(json.dumps(row), flush=True)


def table(arguments: argparse.Namespace) -> None:
    """One line a kind: batches, samples, certified, false, the largest error over its bar, and the median seconds."""
    rows = [json.loads(line) for file in arguments.files for line in file.read_text().splitlines()]
    crashes, rows = [row for row in rows if "crash" in row], [row for row in rows if "crash" not in row]
    print("| kind | batches | samples | certified | false | error / bar, at most | median s |\n|---|---|---|---|---|---|---|")
    for name in [*dict.fromkeys(row["kind"] for row in rows), "all"]:
        mine = [row for row in rows if name in (row["kind"], "all")]
        totals = [sum(row[key] for row in mine) for key in ("samples", "certified", "false_certificates")]
        closest = max((row["closest"] for row in mine if math.isfinite(row["closest"])), default=0.0)
        seconds = sorted(row["seconds"] for row in mine)[len(mine) // 2]
        print(f"| {name} | {len(mine)} | {totals[0]} | {totals[1]} | {totals[2]} | {closest:.2f} | {seconds:.2f} |")
    for row in [*crashes, *(row for row in rows if row["false_certificates"])]:
        print(json.dumps(row))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    runner = commands.add_parser("run")
    runner.add_argument("--shard", type=int, default=0)
    runner.add_argument("--shards", type=int, default=1)
    runner.add_argument("--seconds", type=float, default=300)
    runner.add_argument("--seed", type=int, default=1000)
    runner.add_argument("--only", default="", help="kinds whose name holds this")
    runner.add_argument("--data", type=Path)
    runner.set_defaults(command=run)
    reader = commands.add_parser("table")
    reader.add_argument("files", type=Path, nargs="+")
    reader.set_defaults(command=table)
    chosen = parser.parse_args()
    chosen.command(chosen)
