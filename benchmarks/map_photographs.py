"""HFGInv's setting from exact maps: a pretrained ResNet-50, photographs of 224 pixels, eval mode; labels and batch size unknown.

    python benchmarks/map_photographs.py --weights resnet50_keras.safetensors --photographs imagenet_photos.zip --batch 8 --seed 0
        [--settings settings.json] [--device cuda] --out DIR

`papers/resnet50_from_keras.py` writes the weights. Weights in half precision are used as they are: the rounded ones are the model. Every
setting of the JSON list overrides options of the matching. `DIR` gets a tensor of pictures for each setting.
`--score DIR` computes LPIPS, PSNR and SSIM of such tensors, and needs no GPU. `DOSIMETER_LPIPS_WEIGHTS` names LPIPS's weights.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import dosimeter as dm
from dosimeter.engines.downward.matching import Matching, match
from dosimeter.engines.downward.pictures import Descent, descend
from dosimeter.network.tape import tensors_of
from dosimeter.registry import MODELS

SIDE = 224
MATCHING: dict[str, Any] = {"approach": 4000, "steps": 3000, "precision": "tf32"}


def photographs(path: Path, count: int, seed: int) -> Tensor:
    """(count, 3, 224, 224) in [0, 1]: the middle of photographs drawn by the seed; or those of an `.npy` file, in order."""
    if path.suffix == ".npy":
        return torch.from_numpy(np.load(path)).float()[:count] / 255
    from PIL import Image

    with zipfile.ZipFile(path) as archive:
        names = sorted(name for name in archive.namelist() if name.lower().endswith((".jpg", ".jpeg", ".png")))
        chosen = torch.randperm(len(names), generator=torch.Generator().manual_seed(seed))[:count]
        opened = [np.array(Image.open(io.BytesIO(archive.read(names[int(index)]))).convert("RGB")) for index in chosen]
    pixels = torch.stack([torch.from_numpy(one).permute(2, 0, 1) for one in opened])
    edge = (pixels.shape[-1] - SIDE) // 2
    return pixels[:, :, edge : edge + SIDE, edge : edge + SIDE].float() / 255


def prepare(options: argparse.Namespace) -> tuple[dm.Exposure, dm.Batch]:
    from safetensors.torch import load_file

    model = MODELS.build("resnet50", classes=1000, size=SIDE, stem="imagenet", variant="keras")
    state = {name: tensor.float() for name, tensor in load_file(options.weights).items()}
    model.load_state_dict(state, strict=False)
    model = model.eval().to(options.device)
    pixels = photographs(options.photographs, options.batch, options.seed).to(options.device)
    labels = torch.randint(0, 1000, (options.batch,), generator=torch.Generator().manual_seed(options.seed)).to(options.device)
    batch = dm.Batch(pixels, labels)
    return dm.observe(model, batch, declare_batch_size=False), batch


def report_maps(exposure: dm.Exposure, descent: Descent, batch: dm.Batch) -> None:
    true = descent.tape.run({0: batch.inputs}, tensors_of(exposure.model), [one.value for one in descent.known])
    for one, wanted in zip(descent.known, true):
        found, known = one.maps.to(wanted), one.known.to(wanted)
        order = torch.cdist((found * known).flatten(1), (wanted * known).flatten(1)).argmin(0)
        off = ((found[order] - wanted) * known).flatten(1).norm(dim=1) / (wanted * known).flatten(1).norm(dim=1)
        name = descent.names.get(one.value, "?")
        print(
            f"{name}: {tuple(wanted.shape[1:])}, {float(known.mean()):.0%} known, flips {one.flips}, error {float(off.max()):.1g}",
            flush=True,
        )
    for value, reason in descent.reasons.items():
        print(f"{descent.names.get(value, '?')}: {reason}", flush=True)


def attack(options: argparse.Namespace) -> None:
    options.out.mkdir(parents=True, exist_ok=True)
    exposure, batch = prepare(options)
    began = time.perf_counter()
    descent = descend(exposure, seed=options.seed)
    print(f"{time.perf_counter() - began:.1f} s down from {descent.start}, {int(descent.certified.sum())} certified", flush=True)
    report_maps(exposure, descent, batch)
    np.save(options.out / "truth.npy", (255 * batch.inputs).round().byte().cpu().numpy())
    settings: list[dict[str, Any]] = json.loads(options.settings.read_text()) if options.settings else [{"name": "matched"}]
    for setting in settings:
        began = time.perf_counter()
        rng = torch.Generator(options.device).manual_seed(options.seed)
        found = match(exposure, descent, rng, Matching(**(MATCHING | setting.get("match", {}))))
        pictures, spent = found.inputs, time.perf_counter() - began
        order = torch.cdist(pictures.flatten(1), batch.inputs.flatten(1)).argmin(0)
        psnr = -10 * (pictures[order].clamp(0, 1) - batch.inputs).square().flatten(1).mean(1).log10()
        print(
            f"{setting['name']}: {spent:.0f} s, objective {found.objective:.3g}, distance {found.distance}, "
            f"PSNR {[round(float(v), 1) for v in psnr]} mean {float(psnr.mean()):.2f}",
            flush=True,
        )
        np.save(options.out / f"{setting['name']}.npy", (255 * pictures[order].clamp(0, 1)).round().byte().cpu().numpy())


def score(folder: Path) -> None:
    truth = torch.from_numpy(np.load(folder / "truth.npy")).float() / 255
    batch = dm.Batch(truth, torch.zeros(len(truth), dtype=torch.int64))
    for path in sorted(folder.glob("*.npy")):
        pictures = torch.from_numpy(np.load(path)).float() / 255
        found = dm.Reconstruction(inputs=pictures, labels=batch.targets, objective=0.0)
        scores = dm.score(found, batch, metrics=["lpips", "psnr", "ssim"])
        means = {name: round(statistics.mean(float(value) for value in scores[name]), 3) for name in ("lpips", "psnr", "ssim")}
        print(path.stem, means, {name: [round(float(value), 2) for value in scores[name]] for name in ("lpips", "psnr")})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--photographs", type=Path)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--settings", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--score", type=Path)
    options = parser.parse_args()
    torch.backends.cudnn.allow_tf32 = False  # the client computes in single precision
    score(options.score) if options.score else attack(options)


if __name__ == "__main__":
    main()
