"""How exact activation maps are, and how long they take, as the batch, the channels and the grid grow.

    python benchmarks/maps.py growth [--seed 0] [--draws 2] [--out maps.json]
    python benchmarks/maps.py linear [--data ../shared/data]
    python benchmarks/maps.py spear --data ../shared/data
    python benchmarks/maps.py defenses

`growth`: one convolutional net of 3 by 3 kernels on random images; one of batch size, channels and side of the grid grows, the others
stay. Prints a table, and the exponent of each growth by least squares of logarithms. `linear`: the share of exact samples (relative error
below 1e-3) of `shifts`, `spear` and `cocktail_party` on fully connected ReLU nets, on CIFAR-10 images with `--data`, else on random
pictures. `spear`: why SPEAR stops where it does. `defenses`: what remains behind each defense and norm. What is certified wrongly is
counted by
`python benchmarks/certificates.py --only maps: --jobs 16`.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import dosimeter as dm
from dosimeter.network.probing import input_of
from dosimeter.normalization import from_pixels
from dosimeter.registry import DEFENSES

BATCH_SIZES, CHANNELS, SIDES = (2, 4, 8, 16, 28), (72, 144, 288, 512), (2, 3, 5, 7)
GROWTHS = {
    "batch size": [(batch, 512, 4) for batch in BATCH_SIZES],
    "channels": [(4, channels, 4) for channels in CHANNELS],
    "positions": [(4, 512, side) for side in SIDES],
}

LINEAR_SIZES = (1, 2, 4, 8, 12, 16, 24)
DEFENSES_TRIED: dict[str, list[dict[str, Any]]] = {
    "gaussian_noise": [{"std": 10.0**power} for power in (-7, -6, -5, -4)],
    "pruning": [{"ratio": ratio} for ratio in (0.1, 0.5, 0.9)],
    "quantisation": [{"bits": bits} for bits in (24, 16, 8)],
    "laplace_noise": [{"scale": 10.0**power} for power in (-7, -6)],
    "clipping": [{"max_norm": 0.05}, {"max_norm": 0.05, "mode": "layer"}],
    "dpsgd": [{"max_norm": 1.0, "noise_multiplier": 0.01}, {"max_norm": 1.0, "noise_multiplier": 1e-4}],
}


def measure(samples: int, channels: int, side: int, seed: int) -> dict[str, float]:
    torch.manual_seed(seed)
    body = [nn.Conv2d(3, channels, 3, 2, 1), nn.ReLU(), nn.Conv2d(channels, channels, 3, 1, 1), nn.ReLU()]
    model = nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10)).eval()
    batch = dm.Batch(torch.rand(samples, 3, 2 * side, 2 * side), torch.randint(0, 10, (samples,)))
    exposure = dm.observe(model, batch)
    start = time.perf_counter()
    found = dm.recover_maps(exposure, layer="2", seed=seed)
    seconds = time.perf_counter() - start
    truth = input_of(model, "2", batch.inputs).double().flatten(1)
    distance, partner = torch.cdist(found.maps.flatten(1), truth).min(1)
    error = float((distance / truth.norm(dim=1)[partner]).max())
    return {"seconds": seconds, "error": error, "bar": float(found.error_bars.max()), "certified": float(found.certified.sum())}


def exponent(sizes: list[float], values: list[float]) -> float:
    """Of the power law that fits best."""
    x, y = [math.log(size) for size in sizes], [math.log(value) for value in values]
    return statistics.linear_regression(x, y).slope


def growth(options: argparse.Namespace) -> dict[str, Any]:
    measure(2, 72, 2, options.seed)  # the first call imports and warms up
    table: dict[str, Any] = {}
    print("| growth | B | C | H = W | certified | largest error | largest bar | median s |\n|---|---|---|---|---|---|---|---|")
    for grown, sizes in GROWTHS.items():
        rows = []
        for samples, channels, side in sizes:
            draws = [measure(samples, channels, side, options.seed + draw) for draw in range(options.draws)]
            seconds, error, bar = (statistics.median(one[key] for one in draws) for key in ("seconds", "error", "bar"))
            certified = int(sum(one["certified"] for one in draws))
            size = {"batch size": samples, "channels": channels, "positions": side**2}[grown]
            rows.append(
                {"B": samples, "C": channels, "side": side, "size": size, "seconds": seconds, "error": error, "certified": certified}
            )
            of = samples * options.draws
            print(
                f"| {grown} | {samples} | {channels} | {side} | {certified} of {of} | {error:.1e} | {bar:.1e} | {seconds:.2f} |",
                flush=True,
            )
        grid = [float(row["size"]) for row in rows]
        laws = {key: exponent(grid, [row[key] for row in rows]) for key in ("seconds", "error")}
        print(f"{grown}: seconds grow with power {laws['seconds']:.1f}, errors with power {laws['error']:.1f}")
        table[grown] = {"rows": rows, "powers": laws}
    return table


def linear(options: argparse.Namespace) -> dict[str, Any]:
    """Layer 1 receives the images, layer 3 what a ReLU gives. The share of exact samples, and the median error; `–` where refused."""
    table: dict[str, Any] = {}
    print("| method | layer | " + " | ".join(f"B = {size}" for size in LINEAR_SIZES) + " |\n" + "|---" * (2 + len(LINEAR_SIZES)) + "|")
    for method, layer in (("shifts", "3"), ("spear", "3"), ("spear", "1"), ("cocktail_party", "3"), ("cocktail_party", "1")):
        if options.only not in method:
            continue
        cells: dict[str, list[float | None]] = {}
        for size in LINEAR_SIZES:
            errors = [one for draw in range(options.draws) for one in _errors(method, layer, size, options.seed + draw, options.data)]
            known = [one for one in errors if one < math.inf]
            cells[str(size)] = [sum(one < 1e-3 for one in errors) / len(errors), statistics.median(known) if known else None]
        table[f"{method} {layer}"] = cells
        shown = [f"{share:.0%}, {'–' if off is None else f'{off:.1e}'}" for share, off in cells.values()]
        print(f"| `{method}` | {layer} | " + " | ".join(shown) + " |", flush=True)
    return table


def _errors(method: str, layer: str, samples: int, seed: int, data: Path | None) -> list[float]:
    """Of each sample by the map nearest to it, relative; infinite where the method refuses."""
    torch.manual_seed(seed)
    if data is None:
        inputs = torch.nn.functional.interpolate(torch.rand(samples, 3, 8, 8), (32, 32), mode="bilinear")
    else:
        images = np.load(data / "cifar10.npz")["test_images"]
        inputs = torch.from_numpy(images[torch.randperm(len(images))[:samples].numpy()]).permute(0, 3, 1, 2).float() / 255
    hidden = (nn.Linear(3072, 400), nn.ReLU(), nn.Linear(400, 400), nn.ReLU())
    model = nn.Sequential(nn.Flatten(), *hidden, nn.Linear(400, 100)).eval()
    exposure = dm.observe(model, dm.Batch(inputs, torch.randint(0, 100, (samples,))))
    try:
        found = dm.recover_maps(exposure, layer=layer, method=method, seed=seed)
    except dm.Refused:
        return [math.inf] * samples
    truth = input_of(model, layer, inputs).double().flatten(1)
    return (torch.cdist(found.maps.flatten(1).double(), truth).amin(0) / truth.norm(dim=1)).tolist()


def spear(options: argparse.Namespace) -> dict[str, Any]:
    """Why SPEAR stops where it does: the share of slopes that are zero, and in how many units two samples agree."""
    table: dict[str, Any] = {}
    print("| pixels | B | layer | zero slopes | units in which two samples agree | exact |\n|---|---|---|---|---|---|")
    for pixels in ("in [0, 1]", "normalised"):
        for samples in (8, 12, 16, 20):
            for layer in ("1", "3"):
                zero, agree, exact = _switched_off(options, pixels == "normalised", samples, layer)
                table[f"{pixels}, {samples}, {layer}"] = [zero, agree, exact]
                print(f"| {pixels} | {samples} | {layer} | {zero:.2f} | {agree:.2f} | {exact} of {samples} |", flush=True)
    return table


def _switched_off(options: argparse.Namespace, normalised: bool, samples: int, layer: str) -> tuple[float, float, int]:
    torch.manual_seed(options.seed)
    images = np.load(options.data / "cifar10.npz")["test_images"]
    inputs = torch.from_numpy(images[torch.randperm(len(images))[:samples].numpy()]).permute(0, 3, 1, 2).float() / 255
    normalization = dm.Normalization(mean=(0.4914, 0.4822, 0.4465), std=(0.247, 0.2435, 0.2616)) if normalised else dm.Normalization()
    inputs = from_pixels(inputs, normalization)
    hidden = (nn.Linear(3072, 400), nn.ReLU(), nn.Linear(400, 400), nn.ReLU())
    model = nn.Sequential(nn.Flatten(), *hidden, nn.Linear(400, 100)).eval()
    batch = dm.Batch(inputs, torch.randint(0, 100, (samples,)))
    exposure = dm.observe(model, batch, normalization=normalization)
    on = (model[: int(layer) + 1](inputs) > 0).double()  # (B, units)
    agree = float(((on[:, None] == on[None]).double().mean(2).sum() - samples) / (samples * (samples - 1)))
    zero = 1 - float(on[:, on.any(0)].mean())
    try:
        found = dm.recover_maps(exposure, layer=layer, method="spear", seed=options.seed, submatrices=100_000)
    except dm.Refused:
        return zero, agree, 0
    truth = input_of(model, layer, inputs).double().flatten(1)
    distance, partner = torch.cdist(found.maps.flatten(1).double(), truth).min(1)
    return zero, agree, len(set(partner[distance / truth.norm(dim=1)[partner] < 1e-3].tolist()))


def defenses(options: argparse.Namespace) -> dict[str, Any]:
    """A net of 64 channels on a grid of 3 by 3, batches of 4: samples certified, recovered to 1e-2, and the median error.

    The price is the median change of the update by the defense, as a share of the update's norm.
    """
    settings = {
        "no norm": {},
        "batch norm, eval": {"norm": "batch"},
        "batch norm, train": {"norm": "batch", "train": True},
        "GroupNorm": {"norm": "group"},
        "SiLU": {"activation": nn.SiLU},
        "GELU": {"activation": nn.GELU},
        "8 samples, above the limit of 7": {"samples": 8},
        "FedAvg, one local step": {"training": dm.FedAvg(steps=1, learning_rate=0.01)},
        "FedAvg, two local steps of 1e-4": {"training": dm.FedAvg(steps=2, learning_rate=1e-4)},
        "FedAvg, two local steps of .01": {"training": dm.FedAvg(steps=2, learning_rate=0.01)},
    }
    for name in sorted(DEFENSES):
        strengths = [*DEFENSES_TRIED.get(name, []), *getattr(DEFENSES.entry(name), "strengths", ())]
        settings |= {f"`{name}`, {_spelt(one)}": {"defenses": (dm.defense(name, **one),)} for one in strengths}
    settings = {name: setting for name, setting in settings.items() if options.only in name}
    table: dict[str, Any] = {}
    print("| setting | certified | within 1e-2 | of | median error | change of the update |\n|---|---|---|---|---|---|")
    for name, setting in settings.items():
        draws = [_behind(options.seed + draw, **setting) for draw in range(4 * options.draws)]
        certified, near, of = (sum(one[index] for one in draws) for index in range(3))
        errors = sorted(error for one in draws for error in one[3])
        middle = f"{statistics.median(errors):.1e}" if errors else "–"
        change = f"{statistics.median(one[4] for one in draws):.1e}" if "defenses" in setting else "–"
        table[name] = {"certified": certified, "near": near, "of": of, "median": middle, "change": change}
        print(f"| {name} | {certified} | {near} | {of} | {middle} | {change} |", flush=True)
    return table


def _spelt(options: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}" for key, value in options.items())


def _behind(
    seed: int, *, norm: str = "none", train: bool = False, activation: type[nn.Module] = nn.ReLU, samples: int = 4, **options: Any
) -> tuple[int, int, int, list[float], float]:
    torch.manual_seed(seed)

    def block(inputs: int, stride: int) -> list[nn.Module]:
        norms = {"batch": nn.BatchNorm2d(64), "group": nn.GroupNorm(4, 64), "none": nn.Identity()}
        return [nn.Conv2d(inputs, 64, 3, stride, 1), norms[norm], activation()]

    body = [*block(1, 2), *block(64, 1), *block(64, 1)]
    model = nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)).train(train)
    inputs = torch.nn.functional.interpolate(torch.rand(samples, 1, 4, 4), (6, 6), mode="bilinear")
    batch = dm.Batch(inputs, torch.randint(0, 10, (samples,)))
    exposure = dm.observe(model, batch, seed=seed, **options)
    change = _change(dm.observe(model, batch, seed=seed).update, exposure.update) if "defenses" in options else 0.0
    try:
        found = dm.recover_maps(exposure, seed=seed)
    except dm.Refused:
        return 0, 0, samples, [], change
    truth = input_of(exposure.model, found.layer, inputs).double().flatten(1)
    distance, partner = torch.cdist(found.maps.flatten(1), truth).min(1)
    error = distance / truth.norm(dim=1)[partner]
    return int(found.certified.sum()), int((error < 1e-2).sum()), samples, error.tolist(), change


def _change(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> float:
    """‖after − before‖ / ‖before‖ over the parameters that both have in one shape."""
    both = [name for name in before if name in after and before[name].shape == after[name].shape]
    size, off = (torch.stack([part.norm() for part in parts]).norm() for parts in zip(*((before[n], after[n] - before[n]) for n in both)))
    return float(off / size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("growth", "linear", "spear", "defenses"), default="growth")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--draws", type=int, default=2, help="of each size")
    parser.add_argument("--data", type=Path, help="folder of the shared data")
    parser.add_argument("--only", default="", help="linear and defenses: methods or settings whose name holds this")
    parser.add_argument("--out", type=Path, help="the table as JSON")
    options = parser.parse_args()
    table = {"growth": growth, "linear": linear, "spear": spear, "defenses": defenses}[options.what](options)
    if options.out:
        options.out.write_text(json.dumps(table, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
