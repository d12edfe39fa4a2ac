"""What the optimisation attacks recover on real images, beside their nulls. Needs ../shared/data.

    python benchmarks/matching_quality.py dlg --seeds 0 10
    python benchmarks/matching_quality.py inverting_gradients --model lenet5 --batch 4 --seeds 0 5 --steps 4800
    python benchmarks/matching_quality.py soft_labels --augmentation mixup --distance l2 --seeds 0 5
    python benchmarks/matching_quality.py instance_labels --seeds 0 3 --steps 500
    python benchmarks/matching_quality.py pack --count 64 --out photographs.safetensors        (for machines without an image library)
    python benchmarks/matching_quality.py photographs --data photographs.safetensors --model resnet18 --batch 8 --steps 4000 --out out.json

Every line is one attacked batch: the median and range of PSNR over its samples, after one-to-one assignment.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import zipfile
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
IMAGENET = dm.Normalization(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("dlg", "inverting_gradients", "soft_labels", "instance_labels", "pack", "photographs"))
    parser.add_argument("--seeds", type=int, nargs=2, default=(0, 10), metavar=("FIRST", "END"))
    parser.add_argument("--model", default="lenet5")
    parser.add_argument("--weights", default=None)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=None)
    parser.add_argument("--total-variation", type=float, default=None)
    parser.add_argument("--augmentation", choices=("mixup", "smoothing"), default="mixup")
    parser.add_argument("--distance", choices=("l2", "cosine"), default="l2")
    parser.add_argument("--attacks", nargs="+", default=["stepwise", "gradinversion", "inverting_gradients", "dlg"])
    parser.add_argument("--precision", default="tf32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--count", type=int, default=64, help="photographs to pack")
    parser.add_argument("--data", default=None, help="packed photographs")
    parser.add_argument("--out", default=None)
    options = parser.parse_args()
    {
        "dlg": dlg,
        "inverting_gradients": inverting_gradients,
        "soft_labels": soft_labels,
        "instance_labels": instance_labels,
        "pack": pack,
        "photographs": photographs,
    }[options.what](options)


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
    images, labels = cifar("test")
    mean_image = cifar("train")[0].mean(0, keepdim=True)
    gains = []
    for seed in range(*options.seeds):
        model = seeded_model(options.model, seed)
        if options.weights:
            load_cifar_weights(model, options.weights)
        model = model.to(options.device)
        batch = on(options.device, pick(images, labels, seed, options.batch, CIFAR))
        foreign = on(options.device, pick(images, labels, seed + 1000, options.batch, CIFAR))
        settings = {"steps": options.steps or 4800}
        if options.total_variation is not None:
            settings["total_variation"] = options.total_variation
        exposure = dm.observe(model, batch, normalization=CIFAR)
        found, seconds = attacked(exposure, "inverting_gradients", batch.targets, seed, **settings)
        other, _ = attacked(dm.observe(model, foreign, normalization=CIFAR), "inverting_gradients", foreign.targets, seed, **settings)
        values = psnr(found, batch)
        nulls = {
            "mean image": psnr_of(mean_image.expand(len(values), -1, -1, -1), to_pixels(batch.inputs, CIFAR).cpu()),
            "foreign": psnr(other, batch),
        }
        best_null = max(float(null.median()) for null in nulls.values())
        gains.append(float(values.median()) - best_null)
        shown = ", ".join(f"{name} {float(null.median()):.1f}" for name, null in nulls.items())
        line(seed, values, seconds, f"nulls: {shown}; gain {gains[-1]:+.1f}; distance {found.distance}; {found.outcome}; {found.message}")
    print(f"median gain over the best null {np.median(gains):+.2f} dB")


def soft_labels(options: argparse.Namespace) -> None:
    """Soft-label batches of one: the true soft label, the recovered one, the one-hot one; and features in the objective."""
    images, labels = cifar("test")
    columns: dict[str, list[float]] = {}
    for seed in range(*options.seeds):
        batch = augmented(images, labels, seed, options.augmentation)
        model = seeded_model(options.model, seed)
        exposure = dm.observe(model, batch)
        recovered = dm.recover_labels(exposure, "soft_scalar", seed=seed, family=options.augmentation)
        hard = batch.targets.argmax(1)
        settings = soft_label_settings(options)
        runs = {
            "true": (batch.targets, {}),
            "recovered": (recovered, {}),
            "one-hot": (hard, {}),
            "features": (recovered, {"features": "labels"}),
        }
        shown = []
        for name, (given, extra) in runs.items():
            found, seconds = attacked(exposure, settings["attack"], given, seed, **settings["options"], **extra)
            columns.setdefault(name, []).append(float(psnr(found, batch).median()))
            shown.append(f"{name} {columns[name][-1]:.2f} ({seconds:.0f} s)")
        print(seed, "; ".join(shown), flush=True)
    for name, values in columns.items():
        print(f"{name}: mean {np.mean(values):.2f} dB, median {np.median(values):.2f} dB")


def soft_label_settings(options: argparse.Namespace) -> dict:
    if options.distance == "l2":
        return {"attack": "dlg", "options": {"steps": options.steps or 2000, "restarts": 1}}
    return {"attack": "inverting_gradients", "options": {"steps": options.steps or 2000, "total_variation": 1e-4}}


def instance_labels(options: argparse.Namespace) -> None:
    """FCN-3 on digits, batches of 50: Inverting Gradients under instance-wise labels and under class-wise ones (iLRG, Fig. 4)."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images, labels = torch.tensor(digits.images[:, None] / 16).float(), torch.tensor(digits.target)
    for seed in range(*options.seeds):
        batch = pick(images, labels, seed, 50)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = MODELS.build("fcn3", inputs=64)
        exposure = dm.observe(model, batch)
        instance = dm.recover_labels(exposure, "ilrg")
        classes = torch.unique(batch.targets)
        spread = classes.repeat(50)[:50].sort().values
        shown = []
        for name, given in (("true", batch.targets), ("instance-wise", instance), ("class-wise", spread)):
            found, _ = attacked(exposure, "inverting_gradients", given, seed, steps=options.steps or 500, total_variation=1e-4)
            shown.append(f"{name} {float(psnr(found, batch).median()):.2f} dB")
        print(seed, "; ".join(shown), flush=True)


def pack(options: argparse.Namespace) -> None:
    """The first photographs as bytes in one file."""
    from safetensors.torch import save_file

    images, labels = photographs_224()
    save_file({"images": (images[: options.count] * 255).round().byte(), "labels": labels[: options.count]}, options.out)


def photographs(options: argparse.Namespace) -> None:
    """224-pixel photographs on an ImageNet model, batch of 8: the attacks of hfginv's Tables 1 and 2, all samples scored."""
    if options.data:
        from safetensors.torch import load_file

        stored = load_file(options.data)
        images, labels = stored["images"].float() / 255, stored["labels"]
    else:
        images, labels = photographs_224()
    results = []
    for seed in range(*options.seeds):
        model = seeded_model(options.model, seed, classes=1000).eval()
        if options.weights:
            model.load_state_dict(weights_in(options.weights))
        chosen = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))[: options.batch]
        inputs = (images[chosen] - torch.tensor(IMAGENET.mean)[:, None, None]) / torch.tensor(IMAGENET.std)[:, None, None]
        batch = dm.Batch(inputs.to(options.device), labels[chosen].to(options.device))
        exposure = dm.observe(model.to(options.device), batch, normalization=IMAGENET)
        grey = psnr_of(images.mean(0, keepdim=True).expand(options.batch, -1, -1, -1), images[chosen])
        print(seed, f"mean image {float(grey.median()):.2f} dB", flush=True)
        for name in options.attacks:
            attack, extra = ABLATION.get(name, (name, {}))
            settings = {"precision": options.precision, **extra} if attack != "dlg" else dict(extra)
            found, seconds = attacked(exposure, attack, batch.targets, seed, steps=options.steps or 4000, **settings)
            values = psnr(found, batch)
            line(f"{seed} {name}", values, seconds, f"distance {found.distance}; {found.message}")
            results.append({"seed": seed, "attack": name, "psnr": values.tolist(), "seconds": seconds, "distance": found.distance})
            if options.out:
                Path(options.out).write_text(json.dumps(results, indent=1))


ABLATION = {
    "gradient only": (
        "stepwise",
        {"layers_at_once": None, "skip_first_block": False, "dropout": 0.0, "batch_norm": 0.0, "total_variation": 0.0},
    ),
    "with priors": (
        "stepwise",
        {"layers_at_once": None, "skip_first_block": False, "dropout": 0.0, "total_variation_onset": 0.0, "batch_norm_onset": 0.0},
    ),
    "stepwise, priors from the start": ("stepwise", {"total_variation_onset": 0.0, "batch_norm_onset": 0.0}),
    "stepwise without dropout": ("stepwise", {"dropout": 0.0}),
    "stepwise paper": ("stepwise", {"variant": "paper"}),
}


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


def augmented(images: Tensor, labels: Tensor, seed: int, kind: str) -> dm.Batch:
    """soft-labels.txt, Section 4.3: mixup with λ ~ U(0, 1) of two classes, or smoothing with ε ~ U(0, .5)."""
    rng = torch.Generator().manual_seed(seed)
    first, second = torch.randperm(len(images), generator=rng)[:2].tolist()
    while labels[second] == labels[first]:
        second = int(torch.randint(len(images), (), generator=rng))
    share = float(torch.rand((), generator=rng))
    one, other = torch.nn.functional.one_hot(labels[[first, second]], 10).float()
    if kind == "mixup":
        return dm.Batch((share * images[first] + (1 - share) * images[second])[None], (share * one + (1 - share) * other)[None])
    return dm.Batch(images[first : first + 1], ((1 - share / 2) * one + share / 2 / 10)[None])


def cifar(part: str) -> tuple[Tensor, Tensor]:
    stored = np.load(DATA / "cifar10.npz")
    images = torch.tensor(stored[f"{part}_images"]).permute(0, 3, 1, 2).contiguous().float() / 255
    return images, torch.tensor(stored[f"{part}_labels"]).long()


def load_cifar_weights(model: torch.nn.Module, file: str) -> None:
    state = torch.load(file, weights_only=True, map_location="cpu")["state_dict"]
    model.load_state_dict({name.removeprefix("module."): tensor for name, tensor in state.items()})


def weights_in(file: str) -> dict[str, Tensor]:
    if file.endswith(".safetensors"):
        from safetensors.torch import load_file

        return load_file(file)
    return torch.load(file, weights_only=True, map_location="cpu")


def photographs_224() -> tuple[Tensor, Tensor]:
    from PIL import Image

    images, labels = [], []
    with zipfile.ZipFile(DATA / "imagenet_photos.zip") as archive:
        manifest = json.loads(archive.read(next(name for name in archive.namelist() if name.endswith("manifest.json"))))
        entries = manifest
        names = {Path(name).name: name for name in archive.namelist()}
        for entry in entries:
            with archive.open(names[Path(entry["file"]).name]) as stream:
                picture = Image.open(stream).convert("RGB").crop((16, 16, 240, 240))
                images.append(torch.tensor(np.array(picture)).permute(2, 0, 1).float() / 255)
            labels.append(int(entry["index"]))
    return torch.stack(images), torch.tensor(labels)


if __name__ == "__main__":
    main()
