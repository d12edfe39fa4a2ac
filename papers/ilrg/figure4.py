# ruff: noqa: T201
"""iLRG's Fig. 4: what instance-wise labels are worth to Inverting Gradients, on FCN-3 with batches of 50 digits.

    python papers/ilrg/figure4.py [--data mnist.npz] [--seeds 0 10] [--steps 4800]

Columns: the true labels, those of iLRG, and class-wise ones: the classes that a presence rule (iDLG's) finds, shared out evenly over
the batch. Every sample is scored, by PSNR after one-to-one assignment; beside it, as the paper has it, the mean of the best six.
Published: an increase of 6 to 7 dB over Inverting Gradients without labels, over the best six samples.
Departures: without MNIST's file, scikit-learn's digits at 28 pixels; the total variation's weight is the attack's default.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor

import dosimeter as dm
from dosimeter.data.load import load_images
from dosimeter.models.loading import load_model
from dosimeter.normalization import from_pixels

MNIST = dm.Normalization(mean=(0.1307,), std=(0.3081,))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=None)
    parser.add_argument("--seeds", type=int, nargs=2, default=(0, 10), metavar=("FIRST", "END"))
    parser.add_argument("--steps", type=int, default=4800)
    parser.add_argument("--batch", type=int, default=50)
    options = parser.parse_args()
    images = load_images(options.data or "digits", size=28, channels=1)
    everything: dict[str, list[Tensor]] = {}
    for seed in range(*options.seeds):
        chosen = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))[: options.batch]
        batch = dm.Batch(from_pixels(images.images[chosen], MNIST), images.labels[chosen])
        exposure = dm.observe(load_model("fcn3", {"channels": 1, "size": 28}, None, seed).eval(), batch, normalization=MNIST)
        columns = {"true": batch.targets, "instance-wise": dm.recover_labels(exposure, "ilrg"), "class-wise": class_wise(exposure)}
        for name, labels in columns.items():
            found = dm.reconstruct(exposure, "inverting_gradients", labels=labels, seed=seed, steps=options.steps)
            values = torch.as_tensor(dm.score(found, batch, metrics=("psnr",))["psnr"])
            everything.setdefault(name, []).append(values)
            counts = torch.bincount(labels if isinstance(labels, Tensor) else labels.labels, minlength=10)
            right = int(torch.minimum(counts, torch.bincount(batch.targets, minlength=10)).sum())
            print(f"{seed} {name}: {right} of {len(values)} labels right, {told(values)}, distance {found.distance:.2g}", flush=True)
    for name, parts in everything.items():
        print(f"{name}: {told(torch.cat(parts))}, best six of each batch {torch.stack([best_six(p) for p in parts]).mean():.2f}")


def class_wise(exposure: dm.Exposure) -> Tensor:
    """The present classes, shared out over the batch as evenly as can be: (B,)."""
    present = dm.recover_labels(exposure, "idlg", as_published=True).labels
    assert exposure.public.batch_size is not None
    return present.repeat(exposure.public.batch_size)[: exposure.public.batch_size].sort().values


def best_six(values: Tensor) -> Tensor:
    return values.topk(min(6, len(values))).values.mean()


def told(values: Tensor) -> str:
    return f"PSNR median {float(values.median()):.2f}, mean {float(values.mean()):.2f}, best six {float(best_six(values)):.2f} dB"


if __name__ == "__main__":
    main()
