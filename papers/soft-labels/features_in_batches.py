# ruff: noqa: T201
"""What certified features add to Inverting Gradients on batches: soft-labels Eq. (8) beyond the paper's batch of one.

    python papers/soft-labels/features_in_batches.py [--batches 8 16 32 64] [--seeds 0 3] [--steps 1000] [--data ../shared/data]

Columns: the gradient alone; with each certified sample's feature from `subspace` as a term (beta 2, alpha 0); and the same with the
features alone matched for the first tenth of the steps. CIFAR-100 images, true labels, an untrained network with 200 outputs, so
that the head's gradient determines all features. PSNR of every sample, median over a batch.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

import dosimeter as dm
from dosimeter.data.load import load_images
from dosimeter.models.loading import load_model
from dosimeter.normalization import from_pixels

CIFAR = dm.Normalization(mean=(0.5071, 0.4867, 0.4408), std=(0.2675, 0.2565, 0.2761))
COLUMNS = {
    "gradient": {},
    "term": {"features": "subspace", "feature_weight": 2.0},
    "term beside the head": {"features": "subspace", "feature_weight": 2.0, "head_weight": 1.0},
    "start": {"features": "subspace", "feature_weight": 2.0, "feature_start": 0.1},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--seeds", type=int, nargs=2, default=(0, 3), metavar=("FIRST", "END"))
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--model", default="lenet5")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--data", type=Path, default=Path(__file__).resolve().parents[3] / "shared" / "data")
    options = parser.parse_args()
    images = load_images(options.data / "cifar100.npz", part="test")
    for size in options.batches:
        medians: dict[str, list[float]] = {name: [] for name in COLUMNS}
        for seed in range(*options.seeds):
            chosen = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))[:size]
            inputs = from_pixels(images.images[chosen], CIFAR).to(options.device)
            batch = dm.Batch(inputs, images.labels[chosen].to(options.device))
            model = load_model(options.model, {"classes": 200}, None, seed).eval().to(options.device)
            exposure = dm.observe(model, batch, normalization=CIFAR)
            for name, extra in COLUMNS.items():
                found = dm.reconstruct(exposure, "inverting_gradients", labels=batch.targets, seed=seed, steps=options.steps, **extra)
                values = torch.as_tensor(dm.score(found, batch, metrics=("psnr",))["psnr"])
                medians[name].append(float(values.median()))
                print(f"B = {size}, seed {seed}, {name}: median {medians[name][-1]:.2f} dB; {found.message}", flush=True)
        told = ", ".join(f"{name} {sum(values) / len(values):.2f}" for name, values in medians.items())
        print(f"B = {size}, mean of the medians: {told} dB", flush=True)


if __name__ == "__main__":
    main()
