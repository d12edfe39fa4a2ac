"""What the head's gradient gives away, and how fast: subspace against rgla, large batches, growth, and GPU against CPU.

    python benchmarks/head.py speed                 both methods in one run, one machine: time and feature error
    python benchmarks/head.py large                 256 samples, 1,000 classes, 2,048 features
    python benchmarks/head.py growth                seconds over batch size, classes and features, with fitted exponents
    python benchmarks/head.py devices               the same exposure on CPU and GPU
    python benchmarks/head.py coupled               batches that single samples do not determine, labels given
    python benchmarks/head.py noise                 certified samples of a batch of eight against noise and quantisation

Options: --device cuda, --seeds 3, --rgla-steps 20000. Models are untrained (linear, batch norm, ReLU, head) on random inputs;
only torch, numpy and scipy are needed.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

import dosimeter as dm
from dosimeter.head import find_head, input_of
from dosimeter.types import Exposure, FeatureEstimate


@dataclass(frozen=True)
class Case:
    exposure: Exposure
    features: Tensor  # (B, H)
    labels: Tensor  # (B,)


def build(size: int, classes: int, features: int, *, seed: int, device: str, **options: Any) -> Case:
    """A batch of random inputs with random labels in an untrained network in train mode."""
    rng = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(256, features), nn.BatchNorm1d(features), nn.ReLU(), nn.Linear(features, classes)).to(device)
    labels = torch.randint(0, classes, (size,), generator=rng).to(device)
    inputs = torch.rand(size, 256, generator=rng).to(device)
    exposure = dm.observe(model.train(), dm.Batch(inputs, labels), **options)
    return Case(exposure, input_of(model, find_head(exposure).name, inputs).double(), labels)


def errors(found: FeatureEstimate, case: Case) -> Tensor:
    """Relative feature errors under the best one-to-one assignment within each label; infinite where there is none."""
    distance = torch.cdist(found.features.double(), case.features, compute_mode="donot_use_mm_for_euclid_dist")
    relative = (distance / torch.linalg.vector_norm(case.features, dim=1)).cpu()
    relative = torch.where((found.labels[:, None] == case.labels).cpu(), relative, torch.inf)
    rows, columns = linear_sum_assignment(relative.clamp_max(1e9).numpy())
    result = torch.full((len(found.features),), torch.inf, dtype=torch.float64)
    result[torch.from_numpy(rows)] = relative[rows, columns]
    return result


def timed(action: Callable[[], FeatureEstimate], device: str, repeats: int = 1) -> tuple[FeatureEstimate, float]:
    """The result and the median of the seconds, on a device that has finished its work."""
    seconds = []
    for _ in range(repeats):
        _wait(device)
        start = time.perf_counter()
        result = action()
        _wait(device)
        seconds.append(time.perf_counter() - start)
    return result, sorted(seconds)[len(seconds) // 2]


def outcome(found: FeatureEstimate, case: Case) -> dict[str, Any]:
    error = errors(found, case)
    certified, bar = found.certified.cpu(), found.error_bar.cpu() if found.error_bar is not None else torch.zeros(len(error))
    return {
        "samples": len(case.labels),
        "certified": int(certified.sum()),
        "false_certificates": int((certified & ((error > bar) | (error > 1e-2))).sum()),
        "median_error": float(error.median()) if len(error) else math.inf,
        "largest_error": float(error.max()) if len(error) else math.inf,
        "complete": found.complete,
    }


def speed(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for size, classes, features in ((8, 1000, 2048), (32, 100, 512)):
        for seed in range(arguments.seeds):
            case = build(size, classes, features, seed=seed, device=arguments.device)
            dm.recover_features(case.exposure, "subspace")  # warm up
            ours, our_seconds = timed(lambda: dm.recover_features(case.exposure, "subspace"), arguments.device, repeats=5)  # noqa: B023
            row = {"batch": size, "classes": classes, "features": features, "seed": seed, "seconds": our_seconds, **outcome(ours, case)}
            if seed == 0:
                theirs, their_seconds = timed(
                    lambda: dm.recover_features(case.exposure, "rgla", labels=case.labels, steps=arguments.rgla_steps),  # noqa: B023
                    arguments.device,
                )
                row |= {"rgla_steps": arguments.rgla_steps, "rgla_seconds": their_seconds}
                row |= {"rgla_median_error": outcome(theirs, case)["median_error"]}
                row |= {"times_faster": their_seconds / our_seconds}
                row |= {"times_more_exact": row["rgla_median_error"] / row["median_error"]}
            rows.append(row)
    return rows


def large(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for seed in range(arguments.seeds):
        case = build(256, 1000, 2048, seed=seed, device=arguments.device)
        if arguments.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        found, seconds = timed(lambda: dm.recover_features(case.exposure, "subspace"), arguments.device)  # noqa: B023
        memory = torch.cuda.max_memory_allocated() if arguments.device == "cuda" else _resident_peak()
        rows.append({"seed": seed, "seconds": seconds, "gigabytes": memory / 1e9, **outcome(found, case)})
    return rows


def growth(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Seconds along each axis, and the exponent fitted to the larger half of them."""
    axes = {
        "batch": [(size, 1000, 1024) for size in (8, 16, 32, 64, 128)],
        "classes": [(16, classes, 1024) for classes in (100, 300, 1000, 3000)],
        "features": [(16, 1000, features) for features in (256, 512, 1024, 2048, 4096)],
    }
    rows = []
    for axis, shapes in axes.items():
        points = []
        for size, classes, features in shapes:
            case = build(size, classes, features, seed=0, device=arguments.device)
            dm.recover_features(case.exposure, "subspace")
            _, seconds = timed(lambda: dm.recover_features(case.exposure, "subspace"), arguments.device, repeats=3)  # noqa: B023
            points.append(({"batch": size, "classes": classes, "features": features}[axis], seconds))
        tail = points[len(points) // 2 :]
        exponent = math.log(tail[-1][1] / tail[0][1]) / math.log(tail[-1][0] / tail[0][0])
        rows.append({"axis": axis, "points": points, "exponent": exponent})
    return rows


def devices(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for size, classes, features in ((8, 1000, 2048), (32, 100, 512), (64, 1000, 512)):
        case = build(size, classes, features, seed=1, device="cpu")
        moved = dm.receive(
            case.exposure.model.to("cuda"),
            {name: change.to("cuda") for name, change in case.exposure.update.items()},
            input_shape=case.exposure.public.input_shape,
            batch_size=size,
        )
        here = dm.recover_features(
            dm.receive(case.exposure.model.cpu(), case.exposure.update, input_shape=(256,), batch_size=size), "subspace"
        )
        there = dm.recover_features(moved, "subspace")
        gap = errors(there, Case(moved, here.features.double().to("cuda"), here.labels.to("cuda")))
        rows.append(
            {"batch": size, "classes": classes, "features": features, "largest_gap": float(gap.max()), "on_gpu": outcome_cpu(there)}
        )
    return rows


def outcome_cpu(found: FeatureEstimate) -> dict[str, Any]:
    return {"certified": int(found.certified.sum()), "complete": found.complete}


def coupled(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for size, classes, features in ((6, 10, 64), (8, 10, 64), (48, 100, 512), (64, 100, 512)):
        for seed in range(arguments.seeds):
            case = build(size, classes, features, seed=seed, device=arguments.device)
            found, seconds = timed(lambda: dm.recover_features(case.exposure, "subspace", labels=case.labels), arguments.device)  # noqa: B023
            rows.append({"batch": size, "classes": classes, "seed": seed, "seconds": seconds, **outcome(found, case)})
    return rows


def noise(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    settings = [("gaussian_noise", {"std": 10.0**power}) for power in (-8, -7, -6, -5, -4.5, -4, -3.5, -3, -2)]
    settings += [("laplace_noise", {"scale": 10.0**power}) for power in (-6, -5, -4, -3)]
    settings += [("quantisation", {"bits": bits}) for bits in (16, 14, 12, 10, 8, 6, 4)]
    settings += [("pruning", {"ratio": ratio}) for ratio in (0.1, 0.3, 0.5, 0.7, 0.9, 0.99, 0.999)]
    rows = []
    for name, options in settings:
        total: dict[str, Any] = {"defense": name, **options, "samples": 0, "certified": 0, "false_certificates": 0, "batches_with_one": 0}
        for seed in range(arguments.seeds):
            case = build(8, 100, 512, seed=seed, device=arguments.device, defenses=(dm.defense(name, **options),))
            row = outcome(dm.recover_features(case.exposure, "subspace"), case)
            for key in ("samples", "certified", "false_certificates"):
                total[key] += row[key]
            total["batches_with_one"] += row["certified"] > 0
        rows.append(total)
    return rows


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _resident_peak() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


STUDIES = {"speed": speed, "large": large, "growth": growth, "devices": devices, "coupled": coupled, "noise": noise}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rgla-steps", type=int, default=20_000)
    chosen = parser.parse_args()
    for line in STUDIES[chosen.study](chosen):
        print(json.dumps(line))
