"""What the analytic attacks recover on real images, and how much of what they claim is right. Needs ../shared/data.

    python benchmarks/analytic.py imprint loki trap_weights linear_recursion quotients few_levels [--seeds 0 5] [--device cpu] [--data ...]

A sample counts as recovered at 40 dB; a claim is right where it is a sample of the batch at 40 dB.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from torch import Tensor, nn

import dosimeter as dm
from dosimeter.attacks.loki import Loki
from dosimeter.data.load import load_images
from dosimeter.models.loading import load_model

RECOVERED = 40.0  # dB
ACTIVATIONS = ("relu", "tanh", "sigmoid", "leaky_relu")
IMPRINTED = (("imagenet_photos.zip", 224, ("resnet18", "mobilenet_v2")), ("cifar100.npz", None, ("resnet20", "resnet18")))
TRAPPED = {
    "fcn3": {"hidden": (1000, 100)},
    "fcn4": {"hidden": (512, 256, 128)},
    "lenet5": {},
    "small_cnn": {},
    "resnet20": {},
    "vgg11": {"hidden": 256},
    "mobilenet_v2": {},
}


def imprint(arguments: argparse.Namespace) -> None:
    """64 images into 1,000 bins."""
    for file, size, models in IMPRINTED:
        if file not in arguments.images:
            continue
        images = load_images(arguments.data / file, size=size).images
        for name in models:
            for options in ({}, {"sparse": True}, {"functionals": ("brightness",)}):
                rows = []
                for seed in range(*arguments.seeds):
                    batch = drawn(images, 64, 100, seed)
                    model = load_model(name, {"classes": 100, "size": images.shape[-1]}, None, seed).eval()
                    attack = dm.attack("imprint", input_shape=tuple(images.shape[1:]), **options)
                    rows.append(attacked(attack, model, batch, arguments.device))
                show(f"imprint {file} {name} {options or ''}", 64, rows)


def loki(arguments: argparse.Namespace) -> None:
    """Ten clients of 64 images each behind secure aggregation: a claim is right where it is a sample of the client that it is given to."""
    images = load_images(arguments.data / "cifar100.npz").images
    eight_steps = dm.FedAvg(learning_rate=1e-4, mini_batch=8)
    for training, scale in ((dm.FedSGD(), 2.0**15), *((eight_steps, scale) for scale in (1.0, 512.0, 2.0**15))):
        rows = []
        for seed in range(*arguments.seeds):
            began, everything = time.monotonic(), drawn(images, 640, 100, seed)
            batches = [dm.Batch(*pair) for pair in zip(everything.inputs.split(64), everything.targets.split(64), strict=True)]
            model = load_model("resnet20", {"classes": 100}, None, seed).eval()
            attack = Loki(clients=10, scale=scale, input_shape=(3, 32, 32))
            found = attack.of_clients(dm.observe(attack.tamper(model), batches, training=training))
            right = sum(_right(one, batch) for one, batch in zip(found, batches, strict=True))
            rows.append((right, sum(len(one.inputs) for one in found), time.monotonic() - began))
        show(f"loki {training.name} scale {scale:g}", 640, rows)


def _right(found: dm.Reconstruction, batch: dm.Batch) -> int:
    if len(found.inputs) == 0:
        return 0
    return int((dm.score(found, batch, metrics=["psnr"])["psnr"].nan_to_num(0.0) >= RECOVERED).sum())


def trap_weights(arguments: argparse.Namespace) -> None:
    images = load_images(arguments.data / "cifar10.npz").images
    for name, options in TRAPPED.items():
        rows = []
        for seed in range(*arguments.seeds):
            model = load_model(name, {"size": 32, **options}, None, seed).eval()
            attack = dm.attack("trap_weights", input_shape=(3, 32, 32))
            rows.append(attacked(attack, model, drawn(images, 32, 10, seed), arguments.device))
        show(f"trap_weights {name}", 32, rows)


def linear_recursion(arguments: argparse.Namespace) -> None:
    """FCN-4 without bias, one image at a time, 100 images, others for every first seed; the label is not given."""
    images = load_images(arguments.data / "cifar10.npz").images
    for activation in ACTIVATIONS:
        for augmentation in ("smoothing", "mixup"):
            values = []
            for index in range(100 * arguments.seeds[0], 100 * arguments.seeds[0] + 100):
                rng = torch.Generator().manual_seed(10_000 + index)
                model = load_model("fcn4", {"bias": False, "activation": activation}, None, index).to(arguments.device)
                batch = augmented(images, augmentation, rng)
                found = dm.reconstruct(dm.observe(model, moved(batch, arguments.device)), "linear_recursion")
                values.append(float(dm.score(found, moved(batch, arguments.device), metrics=["psnr"])["psnr"].nan_to_num(0.0)[0]))
            psnr = torch.tensor(values)
            poor = f"{int((psnr < RECOVERED).sum())} below 40 dB"
            print(
                f"linear_recursion {activation} {augmentation}: mean {psnr.mean():.1f} dB, median {psnr.median():.1f} dB, {poor}",
                flush=True,
            )


def quotients(arguments: argparse.Namespace) -> None:
    """FCN-4 with bias: the first layer's quotients, for batches."""
    images = load_images(arguments.data / "cifar10.npz").images
    for activation in ("relu", "sigmoid"):
        for size in (1, 8, 32):
            rows = []
            for seed in range(*arguments.seeds):
                model = load_model("fcn4", {"bias": True, "activation": activation}, None, seed)
                rows.append(attacked(dm.attack("linear_recursion"), model, drawn(images, size, 10, seed), arguments.device))
            show(f"first-layer quotients {activation} B = {size}", size, rows)


def few_levels(arguments: argparse.Namespace) -> None:
    """Posterised images, of which mixtures lie on 8-bit levels by chance."""
    images = load_images(arguments.data / "cifar10.npz").images
    settings = (
        ("trap_weights", {"input_shape": (3, 32, 32)}, 32, "small_cnn"),
        ("imprint", {"input_shape": (3, 32, 32), "bins": 64}, 64, "small_cnn"),
        ("imprint", {"input_shape": (3, 32, 32), "bins": 128}, 64, "small_cnn"),
        ("imprint", {"input_shape": (3, 32, 32)}, 64, "small_cnn"),
        ("linear_recursion", {}, 16, "fcn3"),
    )
    for levels in (2, 4, 6, 16, 256):
        posterised = ((images * (levels - 1)).round() * (255 / (levels - 1))).round() / 255
        for name, options, size, network in settings:
            rows = []
            for seed in range(*arguments.seeds):
                model = load_model(network, {"bias": True} if network == "fcn3" else {}, None, seed).eval()
                rows.append(attacked(dm.attack(name, **options), model, drawn(posterised, size, 10, seed), arguments.device))
            show(f"{levels} levels: {name} {options.get('bins', '')}", size, rows)


def augmented(images: Tensor, augmentation: str, rng: torch.Generator) -> dm.Batch:
    """One image with a smoothed label (ε uniform in [0, .5]), or a mixture of two."""
    first, second = torch.randperm(len(images), generator=rng)[:2]
    classes, share = torch.randperm(10, generator=rng)[:2], float(torch.rand((), generator=rng))
    label = torch.zeros(1, 10)
    if augmentation == "smoothing":
        label += 0.5 * share / 10
        label[0, classes[0]] += 1 - 0.5 * share
        return dm.Batch(images[first][None], label)
    label[0, classes[0]], label[0, classes[1]] = share, 1 - share
    return dm.Batch((share * images[first] + (1 - share) * images[second])[None], label)


def drawn(images: Tensor, size: int, classes: int, seed: int) -> dm.Batch:
    rng = torch.Generator().manual_seed(5000 + seed)
    return dm.Batch(images[torch.randperm(len(images), generator=rng)[:size]], torch.randint(classes, (size,), generator=rng))


def moved(batch: dm.Batch, device: str) -> dm.Batch:
    return dm.Batch(batch.inputs.to(device), batch.targets.to(device))


def attacked(attack, model: nn.Module, batch: dm.Batch, device: str) -> tuple[int, int, float]:
    """Samples recovered, claims, seconds."""
    began = time.monotonic()
    sent = attack.tamper(model) if hasattr(attack, "tamper") else model
    found = dm.reconstruct(dm.observe(sent.to(device), moved(batch, device)), attack)
    if len(found.inputs) == 0:
        return 0, 0, time.monotonic() - began
    psnr = dm.score(found, moved(batch, device), metrics=["psnr"])["psnr"].nan_to_num(0.0)
    return int((psnr >= RECOVERED).sum()), len(found.inputs), time.monotonic() - began


def show(label: str, size: int, rows: list[tuple[int, int, float]]) -> None:
    recovered, claims = [row[0] for row in rows], sum(row[1] for row in rows)
    precision = f"{sum(recovered) / claims:.3f} of {claims} claims right" if claims else "no claims"
    mean, seconds = sum(recovered) / len(rows), sum(row[2] for row in rows) / len(rows)
    print(
        f"{label}: {mean:.1f} of {size} at 40 dB (least {min(recovered)}), {precision}, {len(rows)} seeds, {seconds:.1f} s each", flush=True
    )


ATTACKS = {
    "imprint": imprint,
    "loki": loki,
    "trap_weights": trap_weights,
    "linear_recursion": linear_recursion,
    "quotients": quotients,
    "few_levels": few_levels,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("attacks", nargs="+", choices=list(ATTACKS))
    parser.add_argument("--seeds", type=int, nargs=2, default=(0, 5), metavar=("FIRST", "END"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--images", nargs="+", default=[file for file, _, _ in IMPRINTED], help="that imprint is tried on")
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    arguments = parser.parse_args()
    torch.backends.cudnn.allow_tf32 = False  # the client's gradients in full precision
    for name in arguments.attacks:
        ATTACKS[name](arguments)


if __name__ == "__main__":
    main()
