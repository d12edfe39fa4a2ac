"""Pictures from exact maps beside matching attacks and nulls, on CIFAR images and a ResNet-18 of our registry.

    python benchmarks/map_pictures.py --data DIR --images cifar100 --batch 8 --seeds 0 1 [--norm group] [--mode train]
        [--attacks inverting_gradients stepwise] [--steps 1000] [--device cuda] [--out table.json]

Labels and batch size are unknown to `maps`; the matching attacks are given both. Prints PSNR of every sample, seconds, and the seconds of
processors. Nulls: the mean of other images, and the attack on the gradient of another batch (`--foreign`).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import dosimeter as dm
from dosimeter.registry import DATASETS, MODELS

GROUPS = 8


def images_of(folder: Path | None, name: str) -> Tensor:
    if folder is None:
        return DATASETS.build("photographs", size=32, crops=9).images
    with np.load(folder / f"{name}.npz") as data:
        return torch.from_numpy(data["test_images"]).permute(0, 3, 1, 2).float() / 255


def network(norm: str, mode: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = MODELS.build("resnet18", classes=100, size=32)
    if norm == "group":
        for name, module in list(model.named_modules()):
            if isinstance(module, nn.BatchNorm2d):
                parent, _, last = name.rpartition(".")
                setattr(model.get_submodule(parent), last, nn.GroupNorm(GROUPS, module.num_features))
    return model.train(mode == "train")


def batches_of(pixels: Tensor, size: int, seed: int, device: str) -> tuple[dm.Batch, dm.Batch, dm.Batch]:
    """The private batch, a foreign one, and all other images; no image is in two of them."""
    rng = torch.Generator().manual_seed(seed)
    shuffled = pixels[torch.randperm(len(pixels), generator=rng)].to(device)
    labels = torch.randint(0, 100, (len(pixels),), generator=rng).to(device)
    parts = [slice(0, size), slice(size, 2 * size), slice(2 * size, 2 * size + 200)]
    private, foreign, rest = (dm.Batch(shuffled[part], labels[part]) for part in parts)
    return private, foreign, rest


def save_picture(path: Path, truth: Tensor, found: Tensor) -> None:
    """Each sample above what was drawn of it, four times as large."""
    from PIL import Image

    order = torch.cdist(found.flatten(1), truth.flatten(1)).argmin(0)
    rows = [torch.cat(list(one.clamp(0, 1).cpu()), -1) for one in (truth, found[order])]
    pixels = torch.cat(rows, -2).permute(1, 2, 0).repeat_interleave(4, 0).repeat_interleave(4, 1)
    Image.fromarray((255 * pixels).round().byte().numpy()).save(path)


def measure(options: argparse.Namespace, seed: int, attack: str, extra: dict[str, Any]) -> dict[str, Any]:
    pixels = images_of(options.data, options.images)
    model = network(options.norm, options.mode, seed).to(options.device)
    batch, other, rest = batches_of(pixels, options.batch, seed, options.device)
    exposure = dm.observe(model, batch, declare_batch_size=attack != "maps")
    began, processor = time.perf_counter(), time.process_time()
    found = dm.reconstruct(exposure, attack, labels=None if attack == "maps" else batch.targets, seed=seed, **extra)
    seconds, processor = time.perf_counter() - began, time.process_time() - processor
    foreign = None
    if options.foreign:
        strange = dm.observe(model, other, declare_batch_size=attack != "maps")
        foreign = dm.reconstruct(strange, attack, labels=None if attack == "maps" else batch.targets, seed=seed, **extra)
    scores = dm.score(found, batch, auxiliary=rest, foreign=foreign, metrics=["psnr"])
    if options.picture and attack == "maps":
        save_picture(options.picture, batch.inputs, found.inputs)
    psnr = [round(float(value), 1) for value in scores["psnr"]]
    nulls = {name: round(statistics.median(float(value) for value in values["psnr"]), 1) for name, values in scores.nulls.items()}
    spent = {"seconds": round(seconds, 1), "processor_seconds": round(processor, 1)}
    return {"attack": attack, "seed": seed, "psnr": psnr, **spent, "nulls": nulls, "message": found.message}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="the folder of the CIFAR files; without it, crops of the bundled photographs")
    parser.add_argument("--images", choices=["cifar10", "cifar100"], default="cifar100")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--norm", choices=["batch", "group"], default="batch")
    parser.add_argument("--mode", choices=["eval", "train"], default="eval")
    parser.add_argument("--attacks", nargs="*", default=[], help="matching attacks beside maps")
    parser.add_argument("--steps", type=int, default=1000, help="of the matching attacks")
    parser.add_argument("--option", nargs="*", default=[], help="of maps, as name=value")
    parser.add_argument("--foreign", action="store_true", help="also attack the gradient of another batch")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--picture", type=Path, help="a PNG of the last batch: truth above, recovery below")
    options = parser.parse_args()
    torch.backends.cudnn.allow_tf32 = False  # the client computes in single precision
    given = {name: json.loads(value) for name, value in (one.split("=", 1) for one in options.option)}
    rows = []
    for seed in options.seeds:
        for attack in ("maps", *options.attacks):
            row = measure(options, seed, attack, given if attack == "maps" else {"steps": options.steps})
            rows.append(row)
            images = options.images if options.data else "photographs"
            setting = f"{images} B={options.batch} {options.norm} norm, {options.mode} mode, seed {seed}"
            middle = statistics.median(row["psnr"])
            spent = f"{row['seconds']} s ({row['processor_seconds']} s of processors)"
            print(f"{attack} {setting}: median {middle:.1f} dB, {row['psnr']}, {spent}, nulls {row['nulls']}; {row['message']}", flush=True)
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
