"""The bound of Hayes et al. beside the attack that it bounds: DP-SGD on digits.

    python benchmarks/reconstruction_robustness.py --trials 20000

A small classifier trains on 500 digits by DP-SGD, `--steps` steps. One of `--candidates` digits is the secret sample. The attacker knows
all other samples, the weights of each step and the candidates. The noise is set so that the whole training spends ε at δ = 1e-5, by the
RDP accountant. The table has the chance to pick the secret among the candidates: without the updates, by the attack, and by the bound.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from measured import write_measurement
from torch import Tensor, nn

import dosimeter as dm
from dosimeter.client.gradients import per_sample_gradients
from dosimeter.data.load import load_images
from dosimeter.defenses.dpsgd import ClippedSGD
from dosimeter.engines.bounds.candidates import identify
from dosimeter.engines.bounds.reconstruction_robustness import success_bound
from dosimeter.engines.privacy import gaussian_epsilon


def noise_for(epsilon: float, *, sample_rate: float, steps: int) -> float:
    """The noise multiplier that spends ε at δ = 1e-5, by bisection."""
    low, high = 1e-2, 1e4
    for _ in range(50):
        middle = math.sqrt(low * high)
        spent = gaussian_epsilon(noise_multiplier=middle, sample_rate=sample_rate, steps=steps, delta=1e-5)
        low, high = (middle, high) if spent > epsilon else (low, middle)
    return high


def terms_of_training(model: nn.Module, data: dm.Batch, candidates: dm.Batch, *, steps: int, max_norm: float, rate: float) -> Tensor:
    """The clipped gradient of each candidate at the weights of each step, over the norm: (steps, candidates, parameters)."""
    rows = []
    clipped = ClippedSGD(max_norm=max_norm)
    for _ in range(steps):
        each = per_sample_gradients(model, candidates.inputs, candidates.targets, dm.CrossEntropy())
        flat = torch.cat([gradient.flatten(1) for gradient in each.values()], 1).detach()
        rows.append(flat / flat.norm(dim=1, keepdim=True).clamp(min=max_norm))
        update = clipped(model, data.inputs, data.targets, dm.CrossEntropy())
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter -= rate * update[name]
    return torch.stack(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--candidates", type=int, default=10)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--trials", type=int, default=20_000)
    parser.add_argument("--max-norm", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", type=Path, help="the table as a JSON file for docs/results/build.py")
    words = parser.parse_args()
    digits = load_images("digits")
    order = torch.randperm(len(digits.images), generator=torch.Generator().manual_seed(words.seed))
    inputs, targets = digits.images[order].float(), digits.labels[order]
    data, candidates = dm.Batch(inputs[:500], targets[:500]), dm.Batch(inputs[500:][: words.candidates], targets[500:][: words.candidates])
    torch.manual_seed(words.seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ELU(), nn.Linear(32, 10))
    terms = terms_of_training(model, data, candidates, steps=words.steps, max_norm=words.max_norm, rate=20.0)
    rows, broken = [], 0
    print(f"{'epsilon':>8} {'q':>5} {'noise':>8} {'chance':>7} {'attack':>7} {'± 99 %':>7} {'bound':>7} {'up to':>7}")
    for rate in (1.0, 0.1):
        for epsilon in (1.0, 10.0, 100.0):
            noise = noise_for(epsilon, sample_rate=rate, steps=words.steps)
            rng = torch.Generator().manual_seed(words.seed + 1)
            shares = []
            for secret in range(words.candidates):  # every candidate in turn
                turned = terms.roll(-secret, 1)
                trials = words.trials // words.candidates
                shares.append(identify(turned, noise_multiplier=noise, sample_rate=rate, trials=trials, rng=rng) == 0)
            shown = float(torch.cat(shares).double().mean())
            error = 2.576 * math.sqrt(shown * (1 - shown) / words.trials)
            chance = 1 / words.candidates
            bound = success_bound(noise_multiplier=noise, chance=chance, sample_rate=rate, steps=words.steps)
            worse = shown - error > bound.high
            broken += worse
            print(
                f"{epsilon:8g} {rate:5g} {noise:8.3f} {chance:7.3f} {shown:7.3f} {error:7.3f} {bound.value:7.3f} {bound.high:7.3f}"
                + ("  BROKEN" if worse else "")
            )
            rows.append([epsilon, rate, *(round(one, 3) for one in (noise, chance, shown, error, bound.value, bound.high))])
    if words.record:
        columns = ["ε", "share of samples a step", "noise multiplier", "chance", "attack", "± 99 %", "bound", "bound up to"]
        write_measurement(words.record, str(words.seed), columns, rows, [f"The attack exceeds the bound in {broken} of {len(rows)} rows."])


if __name__ == "__main__":
    main()
