"""Activation maps of known architectures: how many samples are certified, how exact they are, and what that costs.

    python benchmarks/map_models.py cifar --data ../shared/data [--seed 0] [--record map-models-cifar.json]
    python benchmarks/map_models.py own
    python benchmarks/map_models.py large --data ../shared/data --weights DIR/weights [--only resnet50]

`cifar`: ResNet-18 with CIFAR's stem, untrained, photographs of 32 pixels. `own`: blocks of our own on one channel of 28 pixels, with
norms and activations of many kinds. `large`: photographs of 224 pixels; ResNet-50 has the weights that `papers/resnet50_from_keras.py`
writes.
A map is false where it is certified and off by more than its error bar. Seconds are of all threads together.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from map_photographs import photographs
from measured import write_measurement
from torch import Tensor, nn

import dosimeter as dm
from dosimeter.network.probing import input_of
from dosimeter.registry import MODELS

COLUMNS = ("model", "mode", "B", "layer", "certified", "false", "largest error", "largest bar", "CPU seconds")
CIFAR_SIZES, OWN_SIZES, LARGE_SIZES = (1, 2, 8, 16, 30), (1, 5, 9), (8, 10, 11)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One client: its model and how it trains."""

    name: str
    mode: str  # "eval" or "train"
    samples: int
    model: Callable[[int], nn.Module]  # of a seed
    inputs: Callable[[int, int], Tensor]  # of the number of samples and a seed


def measure(case: Case, seed: int) -> list[Any]:
    """One row of the table."""
    model = case.model(seed).train(case.mode == "train")
    inputs = case.inputs(case.samples, seed)
    classes = [module for module in model.modules() if isinstance(module, nn.Linear)][-1].out_features
    labels = torch.randint(0, classes, (case.samples,), generator=torch.Generator().manual_seed(seed))
    exposure = dm.observe(model, dm.Batch(inputs, labels), declare_batch_size=False, seed=seed)
    began = time.process_time()
    try:
        found = dm.recover_maps(exposure, seed=seed)
    except dm.Refused as reason:
        print(f"{case.name}, {case.mode}, B = {case.samples}: {reason}", flush=True)
        return [case.name, case.mode, case.samples, "–", f"0 of {case.samples}", 0, "–", "–", round(time.process_time() - began, 1)]
    seconds = time.process_time() - began
    truth = input_of(model, found.layer, inputs).double().flatten(1)
    distance, partner = torch.cdist(found.maps.flatten(1), truth, compute_mode="donot_use_mm_for_euclid_dist").min(1)
    error = distance / truth.norm(dim=1)[partner]
    certified = int(found.certified.sum()) if len(set(partner[found.certified].tolist())) == int(found.certified.sum()) else 0
    false = int((found.certified & ~(error <= found.error_bars)).sum())
    shown = [f"{certified} of {case.samples}", false, f"{float(error.max()):.1e}", f"{float(found.error_bars.max()):.1e}"]
    return [case.name, case.mode, case.samples, found.layer, *shown, round(seconds, 1)]


def cifar(options: argparse.Namespace) -> Iterator[Case]:
    images = np.load(options.data / "cifar100.npz")["test_images"]

    def inputs(samples: int, seed: int) -> Tensor:
        chosen = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))[:samples]
        return torch.from_numpy(images[chosen.numpy()]).permute(0, 3, 1, 2).float() / 255

    for activation in ("relu", "swish"):
        build = partial(registered, name="resnet18", classes=100, size=32, activation=activation)
        for mode in ("eval", "train"):
            for samples in CIFAR_SIZES if activation == "relu" else (2, 8):
                yield Case(name=f"ResNet-18, {activation}", mode=mode, samples=samples, model=build, inputs=inputs)
    for norm in ("group", "none"):
        for samples in (8, 30):
            build = partial(_without_batch_norm, norm)
            yield Case(name=f"ResNet-18, {norm} norm", mode="eval", samples=samples, model=build, inputs=inputs)


def registered(seed: int, *, name: str, **options: Any) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return MODELS.build(name, **options)


def _without_batch_norm(norm: str, seed: int) -> nn.Module:
    model = registered(seed, name="resnet18", classes=100, size=32)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.BatchNorm2d):
                setattr(parent, name, nn.GroupNorm(8, child.num_features) if norm == "group" else nn.Identity())
            elif isinstance(child, nn.Conv2d) and norm == "none":
                child.bias = nn.Parameter(torch.zeros(child.out_channels))  # a network without norms has biases
    return model


class OwnNet(nn.Module):
    """A stem of 7 by 7 and stride 7, a block with a shortcut and a plain one, on a grid of 4 by 4."""

    def __init__(self, norm: str, activation: nn.Module, channels: int = 160) -> None:
        super().__init__()
        norms: dict[str, Callable[[], nn.Module]] = {
            "batch": lambda: nn.BatchNorm2d(channels),
            "group": lambda: nn.GroupNorm(8, channels),
            "no": nn.Identity,
        }
        self.activation = activation
        self.stem = nn.Conv2d(1, channels, 7, 7)
        self.convolutions = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in range(4))
        self.norms = nn.ModuleList(norms[norm]() for _ in range(4))
        self.head = nn.Linear(channels, 40)

    def forward(self, inputs: Tensor) -> Tensor:
        maps = self.activation(self.stem(inputs))
        first, second, third, fourth = (nn.Sequential(*pair) for pair in zip(self.convolutions, self.norms))
        maps = self.activation(maps + second(self.activation(first(maps))))
        return self.head(self.activation(fourth(self.activation(third(maps)))).mean((2, 3)))


def _own(norm: str, activation: nn.Module, seed: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return OwnNet(norm, activation)


def _drawn(samples: int, seed: int) -> Tensor:
    """Random pictures with large and small structures."""
    rng = torch.Generator().manual_seed(seed)
    coarse = nn.functional.interpolate(torch.rand(samples, 1, 4, 4, generator=rng), (28, 28), mode="bilinear")
    return (coarse + 0.3 * torch.rand(samples, 1, 28, 28, generator=rng)).clamp(0, 1)


def own(_: argparse.Namespace) -> Iterator[Case]:
    for norm in ("batch", "group", "no"):
        for activation in (nn.ReLU(), nn.SiLU(), nn.GELU()):
            for mode in ("eval", "train") if norm == "batch" else ("eval",):
                for samples in OWN_SIZES[mode == "train" :]:
                    name = f"own, {norm} norm, {type(activation).__name__}"
                    yield Case(name=name, mode=mode, samples=samples, model=partial(_own, norm, activation), inputs=_drawn)


def large(options: argparse.Namespace) -> Iterator[Case]:
    inputs = partial(photographs, options.data / "imagenet_photos.zip")
    for name in ("resnet50", "resnet34", "resnet18"):
        build = (
            partial(_trained, options.weights)
            if name == "resnet50"
            else partial(registered, name=name, classes=1000, size=224, stem="imagenet")
        )
        for mode in ("train", "eval"):
            for samples in LARGE_SIZES:
                yield Case(name=name, mode=mode, samples=samples, model=build, inputs=inputs)


def _trained(folder: Path, seed: int) -> nn.Module:
    from safetensors.torch import load_file

    model = registered(seed, name="resnet50", classes=1000, size=224, stem="imagenet", variant="keras")
    model.load_state_dict({name: tensor.float() for name, tensor in load_file(folder / "resnet50_keras.safetensors").items()}, strict=False)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("cifar", "own", "large"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", type=Path, help="folder of the shared data")
    parser.add_argument("--weights", type=Path, help="folder of the weights")
    parser.add_argument("--only", default="", help="cases whose line holds this")
    parser.add_argument("--record", type=Path, help="the table as a JSON file for docs/results/build.py")
    options = parser.parse_args()
    print("| " + " | ".join(COLUMNS) + " |\n" + "|---" * len(COLUMNS) + "|")
    rows = []
    for case in {"cifar": cifar, "own": own, "large": large}[options.what](options):
        if options.only in f"{case.name}, {case.mode}, B = {case.samples}":
            rows.append(measure(case, options.seed))
            print("| " + " | ".join(map(str, rows[-1])) + " |", flush=True)
    if options.record:
        write_measurement(options.record, str(options.seed), COLUMNS, rows, [])


if __name__ == "__main__":
    main()
