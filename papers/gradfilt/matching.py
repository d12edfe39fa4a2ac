# ruff: noqa: T201
"""Thesis Tables 5.2 and 5.3: what gradient matching gives of the target samples, with GradFilt's filter and without.

    python papers/gradfilt/matching.py run 5.2 --seeds 0 5 --device cuda --workers 8 --out out/
    python papers/gradfilt/matching.py summary out/

`run` writes one file a reconstruction as they come, so that nothing is lost when it is cut off; `summary` scores what is there.
Settings of the thesis: eval mode, untrained, PyTorch's initialisation, CIFAR-10 and ConvNet in Table 5.2; cosine distance,
signed Adam and total variation for GradFilt and IG alike, L-BFGS for DLG; IG is given the labels, DLG looks for them, GradFilt
restores them. `gradfilt` matches the whole update, as published; `gradfilt_default` is the attack as it is unless told otherwise, ours:
class mean features where no layer is narrower than an input, else the update, polished by least squares. Departures: the
thesis allows IG up to 12,000 steps, `--steps` says how many there are here (the rate falls at 3/8, 5/8 and 7/8 of them); it names
no weight of the total variation, which both attacks choose alike from the distance at the start unless `--total-variation` is
given. Several workers on one GPU gain where CUDA's MPS runs.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from itertools import combinations
from math import nan
from multiprocessing import get_context
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from settings import MODELS, Drawn, draw, require_seeds, setting
from torch import Tensor, nn

import dosimeter as dm
from dosimeter.surfaces.assignment import assign

COUNTS = {"5.2": ((1, 2), (2, 4), (4, 8), (8, 16)), "5.3": ((4, 16), (8, 32))}  # target samples, batch
PUBLISHED_5_2 = {
    "gradfilt": (22.41, 19.54, 18.11, 14.85),
    "gradfilt_default": (nan, nan, nan, nan),  # ours
    "inverting_gradients": (18.30, 14.60, 14.99, 13.54),
    "dlg": (8.47, 9.61, 9.71, 9.26),
    "dlg_with_labels": (nan, nan, nan, nan),  # ours: the labels given, the best of several starts, anew where it stalls
}
PUBLISHED_5_3 = {
    "F-MNIST": (39.25, 35.94),
    "SVHN": (20.50, 18.94),
    "CIFAR-10": (14.09, 12.59),
    "CIFAR-100": (18.49, 16.52),
    "ImageNet": (12.11, 10.26),
}
GROUPED = ("table", "data_set", "model", "targets", "size", "spread", "width", "precision", "steps", "total_variation", "scale")
SETTINGS = ("steps", "total_variation", "scale", "width", "precision", "spread", "quick", "device")  # of a job, as they are given
DLG_STEPS = 600  # as in the thesis
AUXILIARY = 1000  # images of which the mean is the null


@dataclass(frozen=True)
class Job:
    """One reconstruction."""

    table: str
    data_set: str
    model: str
    attack: str
    targets: int
    size: int
    seed: int
    steps: int
    total_variation: float | None
    scale: float
    width: int
    precision: str
    spread: bool
    quick: bool
    device: str

    @property
    def name(self) -> str:
        many = "-spread" if self.spread else ""
        own = f"{self.table}-{self.data_set}-{self.model}-{self.attack}-{self.targets}of{self.size}{many}-seed{self.seed}"
        variation = "auto" if self.total_variation is None else f"{self.total_variation:g}"
        return f"{own}-width{self.width}-{self.precision}-steps{self.steps}-tv{variation}-scale{self.scale:g}"


def run(arguments: argparse.Namespace) -> None:
    out = Path(arguments.out)
    out.mkdir(parents=True, exist_ok=True)
    waiting = [job for job in jobs(arguments) if not (out / f"{job.name}.safetensors").exists()]
    until = time.time() + arguments.seconds if arguments.seconds else None
    with ProcessPoolExecutor(arguments.workers, mp_context=get_context("spawn")) as pool:
        running = [pool.submit(reconstruct, job, Path(arguments.data), out, until) for job in waiting]
        for done in as_completed(running):
            print(done.result() if done.exception() is None else f"failed: {done.exception()!r}", flush=True)


def jobs(arguments: argparse.Namespace) -> Iterator[Job]:
    """Seed by seed, so that a run that is cut off has whole seeds; the large batches first."""
    table = arguments.table
    attacks = arguments.attacks or (("gradfilt", "inverting_gradients", "dlg") if table == "5.2" else ("gradfilt",))
    data_sets = arguments.data_sets or (("CIFAR-10",) if table == "5.2" else list(MODELS))
    for seed in range(*arguments.seeds):
        for targets, size in reversed(COUNTS[table]):
            for data_set in data_sets:
                for attack in attacks:
                    if arguments.targets and targets not in arguments.targets:
                        continue
                    model = arguments.model or ("convnet" if table == "5.2" else MODELS[data_set])
                    given = {name: getattr(arguments, name) for name in SETTINGS}
                    if attack == "gradfilt_default":
                        given["precision"] = "fp32"  # what the inputs change in a feature is about a hundredth of it
                    yield Job(table=table, data_set=data_set, model=model, attack=attack, targets=targets, size=size, seed=seed, **given)


def reconstruct(job: Job, data: Path, out: Path, until: float | None) -> str:
    if until is not None and time.time() > until:
        return f"{job.name}: not started, the time is over"
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False  # the client's gradient in full precision; the attack has its own setting
    began = time.monotonic()
    width = job.width if job.model == "convnet" and not job.quick else None
    chosen = setting(job.data_set, data, job.seed, quick=job.quick, model=job.model, width=width)
    drawn = draw(chosen, job.targets, job.size, torch.Generator().manual_seed(1000 * job.seed + job.targets), spread=job.spread)
    batch = dm.Batch(drawn.batch.inputs.to(job.device), drawn.batch.targets.to(job.device))
    model = chosen.model.to(job.device)
    fast = "captured" if job.device.startswith("cuda") else "eager"
    found = attacked(job, model, batch, drawn, fast)
    if job.attack.startswith("gradfilt"):
        truth, is_target = drawn.own.inputs, torch.ones(job.targets, dtype=torch.bool)
    else:
        truth, is_target = drawn.batch.inputs, torch.isin(drawn.batch.targets, torch.tensor(drawn.classes))
    tensors = {"found": found.inputs.detach().cpu(), "truth": truth, "target": is_target, "mean": chosen.images[-AUXILIARY:].mean(0)}
    message = found.message if fast == "eager" or sound(found) else f"{found.message}; an eager evaluation gives another objective"
    note = {**asdict(job), "objective": found.objective, "distance": found.distance, "message": message}
    save_file({name: value.contiguous() for name, value in tensors.items()}, out / f"{job.name}.safetensors", {"note": json.dumps(note)})
    value = float(psnr(tensors["found"], truth)[is_target].mean())
    return f"{job.name}: {value:.2f} dB, distance {found.distance}, {time.monotonic() - began:.1f} s; {message}"


def attacked(job: Job, model: nn.Module, batch: dm.Batch, drawn: Drawn, path: str) -> dm.Reconstruction:
    options = {"steps": job.steps, "total_variation": job.total_variation, "path": path, "precision": job.precision}
    if job.attack.startswith("gradfilt"):
        options["matched"] = "update" if job.attack == "gradfilt" else None
        attack = dm.attack("gradfilt", targets=drawn.classes, scale=job.scale, input_shape=drawn.shape, **options)
        return dm.reconstruct(dm.observe(attack.tamper(model), batch), attack, seed=job.seed)
    exposure = dm.observe(model, batch)
    if job.attack == "inverting_gradients":
        return dm.reconstruct(exposure, "inverting_gradients", labels=batch.targets, seed=job.seed, **options)
    options = {"steps": min(job.steps, DLG_STEPS), "path": path}
    if job.attack == "dlg":  # as published: one start, which also looks for the labels
        return dm.reconstruct(exposure, "dlg", seed=job.seed, restarts=1, patience=None, **options)
    return dm.reconstruct(exposure, "dlg", labels=batch.targets, seed=job.seed, **options)


def sound(found: dm.Reconstruction) -> bool:
    """Whether the objective that the attack ended at is the one that an eager evaluation gives its result."""
    if found.distance is None or found.objective_at is None:
        return False
    again = found.objective_at(found.inputs, found.labels)
    return abs(again - found.objective) <= 0.1 * abs(again) + 1e-5


def psnr(found: Tensor, truth: Tensor) -> Tensor:
    """Of each true sample, after a one-to-one assignment; 0 where it has no partner: (n,)."""
    values = torch.zeros(len(truth))
    if len(found):
        partner = assign(found.clamp(0, 1), truth)
        has = partner >= 0
        error = (found.clamp(0, 1)[partner[has]] - truth[has]).square().flatten(1).mean(1)
        values[has] = -10 * error.clamp_min(1e-10).log10()
    return values


def summary(arguments: argparse.Namespace) -> None:
    """A row a cell: mean and median PSNR of the target samples over all seeds, beside its nulls; then who was ahead how often."""
    groups: dict[tuple, dict[int, dict[str, Tensor]]] = defaultdict(dict)
    for file in sorted(Path(arguments.out).glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            note = json.loads(opened.metadata()["note"])
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        key = tuple(note[k] for k in (*GROUPED, "attack"))
        groups[key][note["seed"]] = tensors
    names = ("data", "model", "targets", "spread", "width", "precision", "steps", "TV", "α", "attack", "seeds")
    columns = (*names, "mean PSNR", "median", "published", "mean image", "foreign", "own mean")
    print("|", " | ".join(columns), "|")
    print("|---" * len(columns) + "|")
    for key in sorted(groups, key=str):
        table, data_set, model, targets, size, *chosen_settings, attack = key
        seeds = groups[key]
        own, mean, foreign, blurred = [], [], [], []
        for position, seed in enumerate(sorted(seeds)):
            here, other = seeds[seed], seeds[sorted(seeds)[position - 1]]
            chosen = here["target"]
            own.append(psnr(here["found"], here["truth"])[chosen])
            mean.append(psnr(here["mean"].expand_as(here["truth"]), here["truth"])[chosen])
            foreign.append(psnr(other["found"], here["truth"])[chosen])
            targeted = here["truth"][chosen]
            blurred.append(psnr(targeted.mean(0).expand_as(targeted), targeted))
        values, nulls = torch.cat(own), [torch.cat(null) for null in (mean, foreign, blurred)]
        position = [pair[0] for pair in COUNTS[table]].index(targets)
        published = (PUBLISHED_5_2[attack] if table == "5.2" else PUBLISHED_5_3[data_set])[position]
        cells = (data_set, model, f"{targets} of {size}", *chosen_settings, attack, len(seeds))
        figures = (float(values.mean()), float(values.median()), published, *(float(null.mean()) for null in nulls))
        print("|", " | ".join([*map(str, cells), *(f"{figure:.2f}" for figure in figures)]), "|")
    compared(groups)


def compared(groups: dict[tuple, dict[int, dict[str, Tensor]]]) -> None:
    """Of every two attacks on the same targets: their means over the seeds that both have, and in how many of them the first is ahead."""
    for first, second in combinations(sorted(groups, key=str), 2):
        if first[:6] != second[:6]:
            continue
        both = sorted(groups[first].keys() & groups[second].keys())
        means = [[_of_targets(groups[key][seed]) for seed in both] for key in (first, second)]
        if both:
            ahead = sum(a > b for a, b in zip(*means))
            names = [" ".join(map(str, key[6:])) for key in (first, second)]
            average = [sum(values) / len(both) for values in means]
            means_shown = f"{names[0]} {average[0]:.2f} dB, {names[1]} {average[1]:.2f}"
            print(f"{first[1]} {first[3]} of {first[4]}: {means_shown}; ahead in {ahead} of {len(both)}")


def _of_targets(tensors: dict[str, Tensor]) -> float:
    return float(psnr(tensors["found"], tensors["truth"])[tensors["target"]].mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    running = commands.add_parser("run")
    running.add_argument("table", choices=list(COUNTS))
    running.add_argument("--seeds", type=int, nargs=2, default=(0, 5), metavar=("FIRST", "END"))
    running.add_argument("--attacks", nargs="+", choices=list(PUBLISHED_5_2))
    running.add_argument("--data-sets", nargs="+", choices=list(MODELS))
    running.add_argument("--model", help="instead of the thesis's")
    running.add_argument("--targets", type=int, nargs="+")
    running.add_argument("--steps", type=int, default=2400)
    running.add_argument("--total-variation", type=float)
    running.add_argument("--scale", type=float, default=1.0, help="GradFilt's α")
    running.add_argument("--width", type=int, default=64, help="of the ConvNet, which the thesis leaves open")
    running.add_argument("--precision", default="fp32", choices=("fp32", "tf32"))
    running.add_argument("--device", default="cpu")
    running.add_argument("--workers", type=int, default=1)
    running.add_argument("--seconds", type=float, help="start nothing new after")
    running.add_argument("--spread", action="store_true", help="every target sample of a class of its own")
    running.add_argument("--quick", action="store_true", help="narrow networks")
    running.add_argument("--data", default="../shared/data")
    running.add_argument("--out", required=True)
    running.set_defaults(command=run)
    summing = commands.add_parser("summary")
    summing.add_argument("out")
    summing.set_defaults(command=summary)
    arguments = parser.parse_args()
    if arguments.command is run:
        require_seeds(parser, arguments.seeds)
    arguments.command(arguments)


if __name__ == "__main__":
    main()
