"""What DLG and Inverting Gradients recover of real images, beside their nulls. Needs ../shared/data.

    python benchmarks/matching_quality.py dlg --seeds 0 10
    python benchmarks/matching_quality.py inverting_gradients --model lenet5 --batch 4 --seeds 0 5 [--ring 2]

Every line is one attacked batch: the median and range of PSNR over its samples, after one-to-one assignment. With `--ring N` each N
batches have one network, and the guess for one of them is the foreign gradient's null of the one before it: half the time.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import dosimeter as dm
from dosimeter.normalization import to_pixels
from dosimeter.registry import MODELS

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
CIFAR = dm.Normalization(mean=(0.4914, 0.4822, 0.4465), std=(0.247, 0.2435, 0.2616))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("dlg", "inverting_gradients"))
    parser.add_argument("--seeds", type=int, nargs=2, default=(0, 10), metavar=("FIRST", "END"))
    parser.add_argument("--model", default="lenet5")
    parser.add_argument("--width", type=int, default=None, help="of the ConvNet: 64 is the paper's, fewer channels are for CPUs")
    parser.add_argument("--weights", default=None)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=None)
    parser.add_argument("--total-variation", type=float, default=None)
    parser.add_argument("--sign", choices=("signed", "raw", "soft"), default=None)
    parser.add_argument("--restarts", type=int, default=1)
    parser.add_argument("--ring", type=int, default=1)
    parser.add_argument("--path", default="auto")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    dlg(options) if options.what == "dlg" else inverting_gradients(options)


def dlg(options: argparse.Namespace) -> None:
    """One CIFAR-10 image, DLG's sigmoid LeNet, label unknown, four restarts chosen by the objective."""
    images, labels = cifar("test")
    good = 0
    for seed in range(*options.seeds):
        model = seeded_model("lenet_dlg", seed)
        batch = pick(images, labels, seed, 1)
        extra = {} if options.steps is None else {"steps": options.steps}
        found, seconds = attacked(dm.observe(model, batch), "dlg", None, seed, restarts=4, **extra)
        values = psnr(found, batch)
        right = int(found.labels.argmax(1)) == int(batch.targets)
        good += float(values.median()) >= 30
        line(seed, values, seconds, f"label {'right' if right else 'wrong'}; {found.outcome}; {found.message}; distance {found.distance}")
    print(f"at least 30 dB in {good} of {len(range(*options.seeds))} seeds")


def inverting_gradients(options: argparse.Namespace) -> None:
    """CIFAR-10 batches with their labels known, beside the mean image and the same attack on a foreign gradient."""
    torch.backends.cudnn.allow_tf32 = False  # the client's gradient in full precision; the attack has its own setting
    images, labels = cifar("test")
    mean_image = cifar("train")[0].mean(0, keepdim=True)
    settings = {"steps": options.steps or 4800, "restarts": options.restarts, "sign": options.sign, "path": options.path}
    settings["precision"] = options.precision
    if options.total_variation is not None:
        settings["total_variation"] = options.total_variation
    gains = []
    for first in range(*options.seeds, options.ring):
        model = seeded_model(options.model, first, **({} if options.width is None else {"width": options.width}))
        if options.weights:
            load_cifar_weights(model, options.weights)
        model = model.to(options.device)
        own = range(first, first + options.ring)
        seeds = [*own] if options.ring > 1 else [first, first + 1000]
        batches = {seed: on(options.device, pick(images, labels, seed, options.batch, CIFAR)) for seed in seeds}
        found = {
            seed: attacked(dm.observe(model, batch, normalization=CIFAR), "inverting_gradients", batch.targets, seed, **settings)
            for seed, batch in batches.items()
        }
        for seed, following in zip(own, [*seeds[1:], seeds[0]]):
            guess, seconds = found[seed]
            values = psnr(guess, batches[seed])
            nulls = {
                "mean image": psnr_of(mean_image.expand(len(values), -1, -1, -1), to_pixels(batches[seed].inputs, CIFAR).cpu()),
                "foreign": psnr(found[following][0], batches[seed]),
            }
            gains.append(float(values.median()) - max(float(null.median()) for null in nulls.values()))
            shown = ", ".join(f"{name} {float(null.median()):.1f}" for name, null in nulls.items())
            told = f"nulls: {shown}; gain {gains[-1]:+.1f}; distance {guess.distance}; {guess.outcome}; {guess.message}"
            line(seed, values, seconds, told)
    print(f"median gain over the best null {np.median(gains):+.2f} dB")


def attacked(exposure: dm.Exposure, name: str, labels, seed: int, **settings) -> tuple[dm.Reconstruction, float]:
    began = time.perf_counter()
    found = dm.reconstruct(exposure, name, labels=labels, seed=seed, **settings)
    return found, time.perf_counter() - began


def psnr(found: dm.Reconstruction, batch: dm.Batch) -> Tensor:
    """Per sample of the truth, in pixels, after one-to-one assignment."""
    recovered, truth = to_pixels(found.inputs, found.normalization).clamp(0, 1).cpu(), to_pixels(batch.inputs, found.normalization).cpu()
    cost = torch.cdist(truth.flatten(1).double(), recovered.flatten(1).double()).square()
    rows, columns = linear_sum_assignment(cost.numpy())
    return psnr_of(recovered[columns], truth[rows])


def psnr_of(recovered: Tensor, truth: Tensor) -> Tensor:
    return -10 * (recovered - truth).flatten(1).square().mean(1).clamp_min(1e-12).log10()


def line(name, values: Tensor, seconds: float, note: str) -> None:
    print(
        f"{name}: median {float(values.median()):.2f} dB ({float(values.min()):.1f} to {float(values.max()):.1f}), {seconds:.0f} s; {note}",
        flush=True,
    )


def seeded_model(name: str, seed: int, **settings) -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return MODELS.build(name, **settings).eval()


def pick(images: Tensor, labels: Tensor, seed: int, size: int, normalization: dm.Normalization | None = None) -> dm.Batch:
    chosen = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))[:size]
    inputs = images[chosen]
    if normalization is not None:
        inputs = (inputs - torch.tensor(normalization.mean)[:, None, None]) / torch.tensor(normalization.std)[:, None, None]
    return dm.Batch(inputs, labels[chosen])


def on(device: str, batch: dm.Batch) -> dm.Batch:
    return dm.Batch(batch.inputs.to(device), batch.targets.to(device))


def cifar(part: str) -> tuple[Tensor, Tensor]:
    stored = np.load(DATA / "cifar10.npz")
    images = torch.tensor(stored[f"{part}_images"]).permute(0, 3, 1, 2).contiguous().float() / 255
    return images, torch.tensor(stored[f"{part}_labels"]).long()


def load_cifar_weights(model: torch.nn.Module, file: str) -> None:
    state = torch.load(file, weights_only=True, map_location="cpu")["state_dict"]
    model.load_state_dict({name.removeprefix("module."): tensor for name, tensor in state.items()})


if __name__ == "__main__":
    main()
