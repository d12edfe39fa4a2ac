"""Does the inversion influence predict how far noise moves an inversion? The law of I²F on small nets over digits.

    python benchmarks/inversion_influence.py --samples 6 --seed 0

Zhang, Hong, Sun & Zhou, "Understanding Deep Gradient Leakage via Inversion Influence Functions", NeurIPS 2023. For each digit and each size
of noise on its gradient, an attacker without a prior inverts the noisy gradient by least squares. Its error stands beside the influence
√(tr JᵀJ) / λmax(JᵀJ), a lower end, and √(tr (JᵀJ)⁻¹), the first-order error itself. The law: on a logarithmic scale they lie along a
line, and no mean error falls below the lower end.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from measured import write_measurement
from torch import Tensor, nn
from torch.func import functional_call, grad, jacfwd

import dosimeter as dm
from dosimeter.bounds.inversion_influence import InversionInfluence
from dosimeter.data.load import load_images
from dosimeter.engines.bounds.mechanism import mechanism_of

SIZES = (1e-5, 1e-4, 1e-3, 3e-3, 1e-2)  # of the noise
DRAWS, ITERATIONS = 6, 30
WIDTHS = (80, 160)


def invert(update, jacobian, seen: Tensor, start: Tensor) -> Tensor:
    """The input whose update is nearest to `seen`, by Levenberg-Marquardt steps from `start`, without a prior."""
    point, damping = start.clone(), 1e-3
    error = update(point) - seen
    for _ in range(ITERATIONS):
        matrix = jacobian(point)
        normal = matrix.T @ matrix
        step = torch.linalg.solve(normal + damping * normal.diagonal().mean() * torch.eye(len(point)).to(normal), matrix.T @ error)
        trial = point - step
        tried = update(trial) - seen
        better = tried.square().sum() < error.square().sum()
        point, error, damping = (trial, tried, damping / 5) if better else (point, error, damping * 5)
        if float(step.norm()) < 1e-12 * float(point.norm()):
            break
    return point


def measure(sample: Tensor, label: Tensor, width: int, seed: int) -> list[list[float]]:
    """One row a size of noise: the width, the size, the mean error, the lower end, and the first-order error."""
    torch.manual_seed(seed)
    size = sample.numel()
    model = nn.Sequential(nn.Flatten(), nn.Linear(size, width), nn.Sigmoid(), nn.Linear(width, 10)).double()
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def update(point: Tensor) -> Tensor:
        def loss(at: dict[str, Tensor]) -> Tensor:
            return nn.functional.cross_entropy(functional_call(model, at, (point.reshape(1, *sample.shape),)), label[None])

        return torch.cat([change.flatten() for change in grad(loss)(parameters).values()])

    jacobian, truth = jacfwd(update), sample.flatten()
    information = jacobian(truth).T @ jacobian(truth)
    rows, rng = [], torch.Generator().manual_seed(seed)
    auxiliary = dm.Batch(torch.rand(40, *sample.shape, generator=rng).double(), torch.zeros(40, dtype=torch.int64))
    for std in SIZES:
        sent = update(truth)
        noisy = [sent + std * torch.randn(len(sent), generator=rng, dtype=torch.float64) for _ in range(DRAWS)]
        found = torch.stack([invert(update, jacobian, seen, torch.full_like(truth, 0.5)) for seen in noisy])
        error = float((found - truth).square().sum(1).mean()) ** 0.5
        mechanism = mechanism_of(
            model, dm.Batch(sample[None], label[None]), defenses=(dm.defense("gaussian_noise", std=std),), auxiliary=auxiliary
        )
        ceiling = InversionInfluence()(mechanism, torch.Generator().manual_seed(seed))
        lower = math.sqrt(size * 10 ** (-float(ceiling.values[0]) / 10))
        first_order = std * float(torch.linalg.inv(information).trace()) ** 0.5
        rows.append([width, std, error, lower, first_order])
    return rows


def correlation(first: list[float], second: list[float]) -> float:
    """Of the logarithms."""
    return float(torch.corrcoef(torch.tensor([first, second], dtype=torch.float64).log())[0, 1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", type=Path, help="the table as a JSON file for docs/results/build.py")
    words = parser.parse_args()
    torch.set_num_threads(1)
    digits = load_images("digits", part="all", size=None)
    chosen = torch.randperm(len(digits.images), generator=torch.Generator().manual_seed(words.seed))[: words.samples]
    every = [
        row
        for width in WIDTHS
        for place in chosen.tolist()
        for row in measure(digits.images[place].double(), digits.labels[place], width, words.seed + place)
    ]
    columns = ["hidden units", "noise", "median error", "median lower end", "median first order", "below the lower end", "of"]
    rows = []
    for width in WIDTHS:
        for std in SIZES:
            those = torch.tensor([row[2:] for row in every if row[:2] == [width, std]], dtype=torch.float64)
            middle = [float(f"{value:.3g}") for value in those.median(0).values.tolist()]
            rows.append([width, std, *middle, int((those[:, 0] < those[:, 1]).sum()), len(those)])
            print(*rows[-1], flush=True)
    errors, lowers, firsts = ([row[place] for row in every] for place in (2, 3, 4))
    said = [
        f"Correlation of the logarithms of error and lower end: {correlation(errors, lowers):.3f}; "
        f"of error and first order: {correlation(errors, firsts):.3f}; over {len(every)} pairs of a digit and a size of noise.",
        f"The error is below the lower end {sum(e < low for e, low in zip(errors, lowers))} times.",
    ]
    print(*said, sep="\n")
    if words.record:
        write_measurement(words.record, str(words.seed), columns, rows, said)


if __name__ == "__main__":
    main()
