# ruff: noqa: T201
"""What decides at 224 pixels: single settings of the attacks of tables.py, on photographs that its tables do not use.

    python papers/hfginv/settings.py attack papers/hfginv/settings.txt --weights FOLDER --out DIR [--workers 14] [--seconds 250]
    python papers/hfginv/settings.py report papers/hfginv/settings.txt --out DIR

Every line of the file is one attack: model, batch, seed, steps, labels, attack and its options, as `key=value`. FOLDER holds
`resnet50_backbone.safetensors` with `resnet50_head.safetensors`, and `mobilenet_v2-b0353104.pth`. `report` prints one line each: means
over the samples, the distance at the end, and the objective there and at the photographs.
"""

from __future__ import annotations

import argparse
import json
import os
import tomllib
from pathlib import Path
from typing import Any

import torch
from report_page import recovered_pixels
from safetensors import safe_open
from tables import DATA, IMAGENET, drawn, mean_image, scored, share

from dosimeter.metrics.lpips import VARIABLE
from dosimeter.normalization import to_pixels

WEIGHTS = {"resnet50": ("resnet50_backbone.safetensors", "resnet50_head.safetensors"), "mobilenet_v2": ("mobilenet_v2-b0353104.pth",)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("attack", "report"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--weights", type=Path, default=Path())
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--path", default="captured" if torch.cuda.is_available() else "auto")
    parser.add_argument("--precision", default="tf32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=None)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault(VARIABLE, str(options.data / "weights" / "lpips_alex_v0.1_full_fp32.pth"))
    jobs = [job(line, options) for line in options.file.read_text().splitlines() if line.strip()]
    share(jobs, options.workers, options.seconds) if options.what == "attack" else report(jobs)


def job(line: str, common: argparse.Namespace) -> tuple[argparse.Namespace, int, str, str, dict[str, Any]]:
    model, batch, seed, steps, labels, attack, *settings = line.split()
    own = {"model": model, "batch": int(batch), "steps": int(steps), "labels": labels}
    own["weights"] = [common.weights / name for name in WEIGHTS[model]]
    options = argparse.Namespace(**vars(common) | own)
    return options, int(seed), "-".join((model, batch, steps, labels, attack, *settings)), attack, tomllib.loads("\n".join(settings))


def report(jobs: list[tuple[argparse.Namespace, int, str, str, dict[str, Any]]]) -> None:
    print("| batch | setting | LPIPS | PSNR | SSIM | PSNR of the mean image | distance | objective | at the photographs | seconds | note |")
    print("|" + "---|" * 11)
    for options, seed, row, _, _ in jobs:
        file = options.out / f"{seed}-{row}.safetensors"
        if not file.exists():
            continue
        truth = to_pixels(drawn(options, seed).inputs, IMAGENET)
        pixels = next(pixels for name, pixels in recovered_pixels(options.out, seed) if name == row)
        values, mean = scored(pixels, truth).mean(0).tolist(), float(scored(mean_image(options, seed), truth)[:, 1].mean())
        with safe_open(file, "pt") as stored:
            facts = json.loads(stored.metadata()["facts"])
        ends = [f"{facts[name]:.4g}" for name in ("distance", "objective", "at the photographs", "seconds")]
        shown = (str(seed), row, f"{values[0]:.2f}", f"{values[1]:.2f}", f"{values[2]:.2f}", f"{mean:.2f}", *ends, facts["message"])
        print(f"| {' | '.join(shown)} |", flush=True)


if __name__ == "__main__":
    main()
