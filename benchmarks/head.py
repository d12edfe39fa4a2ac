"""What the head's gradient gives away, how exactly and how fast: subspace against rgla, large batches, limits, growth, GPU against CPU.

    python benchmarks/head.py speed                 both methods in one run, one machine: time and feature error
    python benchmarks/head.py exactness             feature errors of rgla, as in the paper and as released, against subspace
    python benchmarks/head.py large                 256 samples, 1,000 classes, 2,048 features; with --pairs every label twice
    python benchmarks/head.py growth                seconds over batch size, classes and features, with fitted exponents
    python benchmarks/head.py devices               the same exposure on CPU and GPU
    python benchmarks/head.py coupled               batches that single samples do not determine, up to the rank's bound
    python benchmarks/head.py confident             heads that are sure of themselves
    python benchmarks/head.py noise                 certified samples of a batch of eight against noise, rounding and pruning
    python benchmarks/head.py mixup                 blended labels, a share for each sample

Options: --device cuda, --seeds 3, --first-seed 0, --rgla-steps 20000, --data ../shared/data. Models are untrained (linear, batch norm,
ReLU, head) on random inputs unless said; only torch, numpy and scipy are needed. A line is printed as soon as it is measured.

What `growth` should give. With n starts alive, r ≤ B dimensions left and C classes: a step of Levenberg–Marquardt forms n matrices
of r × r from slopes of n × C × r, 2nCr² operations, and factors them, nr³/3. Since every round of the search solves for all samples
still missing at once, n = r = B in the first round, which does nearly all the work: 2CB³ a step, for B < C the largest term. A scan
over all classes projects C rows of length C on B dimensions, 4C²B. The spectrum is a random projection of width B + 16, 4CH(B + 16),
with QR factorisations of (C + H)(B + 16)². So the exponent of H is 1 where the projection rules and 0 where the solve does, that of
C between 1 and 2, and that of B up to 3. The joint fit, which only runs where single samples are not determined or are ill
conditioned, factors a B² × B² matrix, B⁶/3 operations a step.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from head_cases import Case, build, errors, outcome, photographs, timed, top_probability

import dosimeter as dm
from dosimeter.interfaces import Exposure
from dosimeter.types import FeatureEstimate

Rows = Iterator[dict[str, Any]]


def speed(arguments: argparse.Namespace) -> Rows:
    for size, classes, features in ((8, 1000, 2048), (32, 100, 512)):
        for seed in _seeds(arguments):
            case = build(size, classes, features, seed=seed, device=arguments.device)
            _subspace(case.exposure)  # warm up
            ours, our_seconds = timed(lambda: _subspace(case.exposure), arguments.device, repeats=5)  # noqa: B023
            row = {"batch": size, "classes": classes, "features": features, "seed": seed, "seconds": our_seconds, **outcome(ours, case)}
            if seed == arguments.first_seed:
                theirs, their_seconds = timed(lambda: _rgla(case, arguments), arguments.device)  # noqa: B023
                row |= {"rgla_steps": arguments.rgla_steps, "rgla_seconds": their_seconds, "times_faster": their_seconds / our_seconds}
                row |= _ratio(theirs, ours, case)
            yield row


def exactness(arguments: argparse.Namespace) -> Rows:
    """rgla as the paper states it, and as its code was released, on random inputs and on photographs."""
    for seed in _seeds(arguments):
        cases = {
            "B=8 C=1000 H=2048": build(8, 1000, 2048, seed=seed, device=arguments.device),
            "B=8 C=1000 H=2048, float64": build(8, 1000, 2048, seed=seed, device=arguments.device, dtype=torch.float64),
            "B=32 C=100 H=512": build(32, 100, 512, seed=seed, device=arguments.device),
        }
        if arguments.data is not None:
            labels = torch.randint(0, 1000, (8,), generator=torch.Generator().manual_seed(seed))
            cases["ResNet-18, photographs, B=8 C=1000"] = _moved(
                photographs(arguments.data, "resnet18", labels, 1000, seed=seed), arguments.device
            )
        for name, case in cases.items():
            if arguments.only not in name:
                continue
            ours = _subspace(case.exposure)
            for form, options in (("paper", {}), ("released", {"detached": True, "loss_term": 1.0})):
                theirs = _rgla(case, arguments, **options)
                yield {"case": name, "seed": seed, "form": form, "steps": arguments.rgla_steps, **_ratio(theirs, ours, case)}


def large(arguments: argparse.Namespace) -> Rows:
    for seed in _seeds(arguments):
        rng = torch.Generator().manual_seed(seed)
        labels = torch.randperm(1000, generator=rng)[:128].repeat(2) if arguments.pairs else None
        case = build(256, 1000, 2048, seed=seed, device=arguments.device, labels=labels)
        if arguments.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        found, seconds = timed(lambda: _subspace(case.exposure), arguments.device)  # noqa: B023
        memory = torch.cuda.max_memory_allocated() if arguments.device == "cuda" else _resident_peak()
        yield {"seed": seed, "pairs": arguments.pairs, "seconds": seconds, "gigabytes": memory / 1e9, **outcome(found, case)}


def growth(arguments: argparse.Namespace) -> Rows:
    """Seconds along each axis, and the exponent fitted to the larger half of them."""
    axes = {
        "batch": [(size, 1000, 1024) for size in (8, 16, 32, 64, 128)],
        "classes": [(16, classes, 1024) for classes in (100, 300, 1000, 3000)],
        "features": [(16, 1000, features) for features in (256, 512, 1024, 2048, 4096)],
    }
    for axis, shapes in axes.items():
        points = []
        for size, classes, features in shapes:
            case = build(size, classes, features, seed=arguments.first_seed, device=arguments.device)
            _subspace(case.exposure)
            _, seconds = timed(lambda: _subspace(case.exposure), arguments.device, repeats=3)  # noqa: B023
            points.append(({"batch": size, "classes": classes, "features": features}[axis], seconds))
        tail = points[len(points) // 2 :]
        exponent = math.log(tail[-1][1] / tail[0][1]) / math.log(tail[-1][0] / tail[0][0])
        yield {"axis": axis, "points": points, "exponent": exponent}


def devices(arguments: argparse.Namespace) -> Rows:
    for size, classes, features in ((8, 1000, 2048), (32, 100, 512), (64, 1000, 512)):
        case = build(size, classes, features, seed=1)
        moved = _moved(case, "cuda")
        here, there = _subspace(case.exposure), _subspace(moved.exposure)
        gap = errors(there, replace(moved, features=here.features.double().to("cuda"), labels=here.labels.to("cuda")))
        row = {"batch": size, "classes": classes, "features": features, "largest_gap": float(gap.max())}
        yield row | {"certified_on_gpu": int(there.certified.sum()), "certified_on_cpu": int(here.certified.sum())}


def coupled(arguments: argparse.Namespace) -> Rows:
    shapes = [(size, 10, 64) for size in (5, 6, 7, 8, 9)] + [(size, 100, 512) for size in (48, 56, 64, 80, 96)]
    for size, classes, features in shapes:
        for given in (True, False):
            if arguments.only not in f"B={size} C={classes}":
                continue
            for seed in _seeds(arguments):
                case = build(size, classes, features, seed=seed, device=arguments.device)
                labels = case.labels if given else None
                found, seconds = timed(lambda: dm.recover_features(case.exposure, "subspace", labels=labels), arguments.device)  # noqa: B023
                row = {"batch": size, "classes": classes, "labels": "given" if given else "unknown", "seed": seed}
                yield row | {"seconds": seconds, **outcome(found, case)}


def confident(arguments: argparse.Namespace) -> Rows:
    for size, classes, features in ((8, 100, 512), (16, 100, 512), (32, 100, 512), (4, 10, 64)):
        for gain in (1.0, 4.0, 8.0, 12.0, 16.0, 24.0):
            for seed in _seeds(arguments):
                case = build(size, classes, features, seed=seed, device=arguments.device, gain=gain)
                found, seconds = timed(lambda: _subspace(case.exposure), arguments.device)  # noqa: B023
                row = {"batch": size, "classes": classes, "gain": gain, "top_probability": top_probability(case), "seed": seed}
                yield row | {"seconds": seconds, **outcome(found, case)}


def noise(arguments: argparse.Namespace) -> Rows:
    settings = [("gaussian_noise", {"std": 10.0**power}) for power in (-8, -7, -6, -5, -4.5, -4, -3.5, -3, -2)]
    settings += [("laplace_noise", {"scale": 10.0**power}) for power in (-6, -5, -4, -3)]
    settings += [("quantisation", {"bits": bits}) for bits in (16, 14, 12, 10, 8, 6, 4)]
    settings += [("pruning", {"ratio": ratio}) for ratio in (0.1, 0.3, 0.5, 0.7, 0.9, 0.99, 0.999)]
    for name, options in settings:
        yield _summed(
            {"defense": name, **options},
            [build(8, 100, 512, seed=seed, device=arguments.device, defenses=(dm.defense(name, **options),)) for seed in _seeds(arguments)],
        )
    for dtype in (torch.float16, torch.bfloat16):
        for size, classes in ((1, 100), (2, 100), (8, 100), (8, 1000)):
            cases = [build(size, classes, 512, seed=seed, device=arguments.device, train=size > 1) for seed in _seeds(arguments)]
            yield _summed({"rounded": str(dtype), "batch": size, "classes": classes}, [_rounded(case, dtype) for case in cases])


def mixup(arguments: argparse.Namespace) -> Rows:
    from head_campaign import mixed

    for size, classes in ((2, 10), (4, 10), (4, 100), (8, 100), (16, 100), (32, 100), (16, 1000)):
        for seed in _seeds(arguments):
            case = mixed(size, classes, seed=seed)
            found, seconds = timed(lambda: _subspace(case.exposure), "cpu")  # noqa: B023
            yield {"batch": size, "classes": classes, "seed": seed, "seconds": seconds, **outcome(found, case)}


def _subspace(exposure: Exposure) -> FeatureEstimate:
    return dm.recover_features(exposure, "subspace")


def _rgla(case: Case, arguments: argparse.Namespace, **options: Any) -> FeatureEstimate:
    return dm.recover_features(case.exposure, "rgla", labels=case.labels, steps=arguments.rgla_steps, **options)


def _ratio(theirs: FeatureEstimate, ours: FeatureEstimate, case: Case) -> dict[str, Any]:
    their_error, our_error = outcome(theirs, case), outcome(ours, case)
    return {
        "rgla_median_error": their_error["median_error"],
        "rgla_largest_error": their_error["largest_error"],
        "subspace_median_error": our_error["median_error"],
        "subspace_largest_error": our_error["largest_error"],
        "times_more_exact": their_error["median_error"] / our_error["median_error"],
    }


def _summed(row: dict[str, Any], cases: list[Case]) -> dict[str, Any]:
    outcomes = [outcome(_subspace(case.exposure), case) for case in cases]
    totals = {key: sum(one[key] for one in outcomes) for key in ("samples", "certified", "false_certificates")}
    return row | totals | {"batches": len(cases), "batches_with_one": sum(one["certified"] > 0 for one in outcomes)}


def _rounded(case: Case, dtype: torch.dtype) -> Case:
    update = {name: change.to(dtype) for name, change in case.exposure.update.items()}
    return replace(case, exposure=replace(case.exposure, update=update))


def _moved(case: Case, device: str) -> Case:
    sent, public = case.exposure, case.exposure.public
    update = {name: change.to(device) for name, change in sent.update.items()}
    exposure = dm.receive(sent.model, update, input_shape=public.input_shape, batch_size=public.batch_size)
    exposure.model.to(device)
    return Case(exposure, case.features.to(device), case.labels.to(device))


def _seeds(arguments: argparse.Namespace) -> range:
    return range(arguments.first_seed, arguments.first_seed + arguments.seeds)


def _resident_peak() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


STUDIES = (speed, exactness, large, growth, devices, coupled, confident, noise, mixup)

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=[study.__name__ for study in STUDIES])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--rgla-steps", type=int, default=20_000)
    parser.add_argument("--pairs", action="store_true", help="large: every label occurs twice")
    parser.add_argument("--only", default="", help="exactness, coupled: cases whose name holds this")
    parser.add_argument("--data", type=Path)
    chosen = parser.parse_args()
    for line in next(study for study in STUDIES if study.__name__ == chosen.study)(chosen):
        print(json.dumps(line), flush=True)
