"""The Bayesian attacker on digits behind noise, beside the same attacker with the other noise's likelihood, and Inverting Gradients.

    python benchmarks/noisy_posterior.py [--digits 5] [--seed 0] [--steps 600] [--shares 0.05 0.1]

The noise's standard deviation is a share of the update's root mean square. A small convolutional network, untrained, eval mode, one digit a
batch, 200 other digits as auxiliary data, labels given. Each number is the mean PSNR in dB over the digits.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import replace

import torch
from sklearn.datasets import load_digits

import dosimeter as dm
from dosimeter.models.loading import load_model


def noise(shape: str, deviation: float):
    if shape == "normal":
        return dm.defense("gaussian_noise", std=deviation)
    return dm.defense("laplace_noise", scale=deviation / math.sqrt(2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--digits", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--shares", type=float, nargs="+", default=(0.05, 0.1))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    pixels, classes = load_digits(return_X_y=True)
    images, labels = torch.tensor(pixels / 16, dtype=torch.float32).reshape(-1, 1, 8, 8), torch.tensor(classes)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(arguments.seed))
    images, labels = images[order], labels[order]
    auxiliary = dm.Batch(images[1000:1200], labels[1000:1200])
    print("noise, share of the update: bayesian, bayesian for the other noise, inverting_gradients")
    for shape, other in (("normal", "laplace"), ("laplace", "normal")):
        for share in arguments.shares:
            rows = torch.tensor(
                [scores(images, labels, auxiliary, number, shape, other, share, arguments) for number in range(arguments.digits)]
            )
            print(f"{shape}, {share}: {', '.join(f'{value:.1f}' for value in rows.mean(0).tolist())}", flush=True)


def scores(images, labels, auxiliary, number, shape, other, share, arguments) -> list[float]:
    model = load_model("small_cnn", {"size": 8, "width": 8, "channels": 1}, None, arguments.seed + number).eval()
    batch = dm.Batch(images[number : number + 1], labels[number : number + 1])
    clean = torch.cat([change.flatten() for change in dm.observe(model, batch).update.values()])
    deviation = share * float(clean.square().mean().sqrt())
    exposure = dm.observe(model, batch, defenses=(noise(shape, deviation),), auxiliary=auxiliary, seed=arguments.seed + number)
    mistaken = replace(exposure, public=replace(exposure.public, defenses=(noise(other, deviation),)))
    runs = ((exposure, "bayesian"), (mistaken, "bayesian"), (exposure, "inverting_gradients"))
    found = [dm.reconstruct(seen, name, labels=batch.targets, steps=arguments.steps, seed=arguments.seed) for seen, name in runs]
    return [float(dm.score(one, batch, metrics=["psnr"])["psnr"][0]) for one in found]


if __name__ == "__main__":
    main()
