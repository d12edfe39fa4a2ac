"""Certified activation maps on random nets and batches: how many are certified, and how many of those are wrong.

    python benchmarks/maps.py [--draws 100] [--seed 0] [--resnet]

Small convolutional nets (norm, mode, activation's bias, channels and batch size drawn at random) on scikit-learn's digits, some images
black or repeated. With --resnet, ResNet-18 on bundled photographs of 32 pixels instead. A certificate is wrong where its map is
further from every true map than its error bar, or than 1e-2. Repeated images count as one sample. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import dosimeter as dm
from dosimeter.data.load import load_images
from dosimeter.network.probing import input_of
from dosimeter.registry import MODELS

LARGEST_ERROR = 1e-2


def small_net(channels: int, norm: str) -> nn.Module:
    def block(inputs: int, stride: int) -> list[nn.Module]:
        norms = {"batch": nn.BatchNorm2d(channels), "group": nn.GroupNorm(4, channels), "none": nn.Identity()}
        return [nn.Conv2d(inputs, channels, 3, stride, 1, bias=norm == "none"), norms[norm], nn.ReLU()]

    layers = [*block(1, 2), *block(channels, 2), *block(channels, 1), *block(channels, 1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


def draw(seed: int, resnet: bool) -> tuple[nn.Module, dm.Batch]:
    torch.manual_seed(seed)
    samples = int(torch.randint(1, 17 if resnet else 9, ()))
    if resnet:
        images = load_images("photographs", size=32).images
        model = MODELS.build("resnet18", classes=100, size=32)
        inputs = images[torch.randperm(len(images))[:samples]]
        return model.train(bool(seed % 2)), dm.Batch(inputs, torch.randint(0, 100, (len(inputs),)))
    digits = load_digits()
    images = torch.tensor(digits.images / 16, dtype=torch.float32)[:, None]
    norm = ("batch", "group", "none")[int(torch.randint(3, ()))]
    inputs = images[torch.randperm(len(images))[:samples]].clone()
    if seed % 4 == 3:
        inputs[0] = 0 if seed % 8 == 3 else inputs[-1]
    model = small_net(4 * int(torch.randint(9, 25, ())), norm)
    return model.train(norm == "batch" and samples > 1 and bool(seed % 2)), dm.Batch(inputs, torch.randint(0, 10, (samples,)))


def errors(found: dm.MapEstimate, model: nn.Module, inputs: Tensor) -> Tensor:
    """The relative distance of each map to the nearest true one."""
    truth = input_of(model, found.layer, inputs).double().flatten(1)
    distance, partner = torch.cdist(found.maps.flatten(1), truth).min(1)
    return distance / truth.norm(dim=1)[partner]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resnet", action="store_true")
    options = parser.parse_args()
    count: Counter[str] = Counter()
    worst = 0.0
    for seed in range(options.seed, options.seed + options.draws):
        model, batch = draw(seed, options.resnet)
        count["samples"] += len(batch.inputs)
        exposure = dm.observe(model, batch, declare_batch_size=bool(seed % 3))
        try:
            found = dm.recover_maps(exposure)
        except dm.Refused:
            count["refused"] += 1
            continue
        off = errors(found, model, batch.inputs)
        certified = found.certified
        count["certified"] += int(certified.sum())
        count["false"] += int((certified & (off > torch.minimum(found.error_bars + 1e-6, torch.tensor(LARGEST_ERROR)))).sum())
        count["wrong size"] += int(bool(certified.all()) and found.batch_size != len(batch.inputs))
        worst = max(worst, float(off[certified].max())) if bool(certified.any()) else worst
    print(json.dumps({"draws": options.draws, **count, "largest error": worst}))


if __name__ == "__main__":
    main()
