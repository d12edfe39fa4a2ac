"""Is any attacker better than its ceiling? Random small nets behind random noise, and the best attacker that we have.

    python benchmarks/ceilings.py --nets 1000 --seed 1000 --jobs 16

Inputs are drawn from a Gaussian, which the attacker knows. The attacker also knows the labels, the other samples, the model and the noise,
and
computes the most probable input by Levenberg-Marquardt steps from the mean and from draws of the prior. The most probable of the
results is its guess. The table compares its mean squared error over the draws with the bound `van_trees`, and its share of candidates
identified with the bound `reconstruction_robustness`. A row counts as broken where the attacker is better by more than the 99.9 % error
of its mean.
"""

from __future__ import annotations

import argparse
import math
import random
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import jacfwd, vmap

import dosimeter as dm
from dosimeter.bounds.van_trees import VanTrees
from dosimeter.engines.bounds.jacobian import Jacobian
from dosimeter.engines.bounds.mechanism import mechanism_of
from dosimeter.engines.bounds.pixel_prior import PixelProblem
from dosimeter.interfaces import Mechanism

ACTIVATIONS = {"tanh": nn.Tanh, "sigmoid": nn.Sigmoid, "silu": nn.SiLU, "relu": nn.ReLU}
DRAWS, STARTS, ITERATIONS = 64, 3, 20
NORMAL_999 = 3.29


@dataclass(frozen=True)
class Result:
    """One net: the attacker's squared error with its own error, and the bound."""

    activation: str
    defense: str
    shown: float
    error: float
    bound: float
    proved: bool

    @property
    def broken(self) -> bool:
        return self.shown + NORMAL_999 * self.error < self.bound

    @property
    def gap(self) -> float:
        """In decibels, between ceiling and attacker."""
        return 10 * math.log10(self.shown / self.bound) if self.bound > 0 else math.inf


def measure(seed: int) -> Result:
    """One random net behind one random defense."""
    torch.set_num_threads(1)
    choice = random.Random(seed)
    torch.manual_seed(seed)
    activation, size = choice.choice(list(ACTIVATIONS)), choice.choice([6, 12, 20])
    width, classes, batch = choice.choice([4, 8, 16]), choice.choice([2, 3, 10]), choice.choice([1, 2, 4])
    model = nn.Sequential(nn.Linear(size, width), ACTIVATIONS[activation](), nn.Linear(width, classes)).double()
    prior_root = torch.randn(size, size, dtype=torch.float64) / math.sqrt(size)
    auxiliary = torch.randn(4000, size, dtype=torch.float64) @ prior_root.T + torch.randn(size, dtype=torch.float64)
    data = dm.Batch(auxiliary[:batch].clone(), torch.randint(0, classes, (batch,)))
    name, defenses = _defense(choice)
    mechanism = mechanism_of(model, data, defenses=defenses, auxiliary=dm.Batch(auxiliary, torch.zeros(4000, dtype=torch.int64)))
    problem = PixelProblem(mechanism, "van_trees")
    ceiling = VanTrees(points=32)(mechanism, torch.Generator().manual_seed(seed))
    truth = problem.prior.draw(DRAWS, torch.Generator().manual_seed(seed + 1))
    squared = (attack(mechanism, problem, truth, seed) - truth).square().sum(1)
    bound = size * 10 ** (-float(ceiling.values[0]) / 10)
    return Result(activation, name, float(squared.mean()), float(squared.std()) / math.sqrt(DRAWS), bound, ceiling.proved)


def attack(mechanism: Mechanism, problem: PixelProblem, truth: Tensor, seed: int) -> Tensor:
    """The most probable inputs, given noisy updates of the inputs `truth` (n, d) in the first sample's place."""
    jacobian, prior = Jacobian(mechanism), problem.prior
    rng = torch.Generator().manual_seed(seed + 2)
    precision = torch.linalg.pinv(prior.root(torch.eye(problem.size, dtype=torch.float64)))  # Λ^-½

    def update(point: Tensor) -> Tensor:
        return torch.cat([change.flatten() for change in jacobian.update(0, point).values()])

    seen = torch.stack([update(point).detach() for point in truth])
    seen = seen + torch.randn(seen.shape, generator=rng, dtype=torch.float64)

    def residual(point: Tensor, observed: Tensor) -> Tensor:
        return torch.cat((observed - _pure_update(jacobian, point), precision @ (point - prior.mean)))

    slopes = vmap(jacfwd(residual))
    best = cost_of_best = None
    for start in range(STARTS):
        point = prior.mean.expand_as(truth).clone() if start == 0 else prior.draw(len(truth), rng)
        damping = torch.ones(len(truth), 1, 1, dtype=torch.float64)
        errors = vmap(residual)(point, seen)
        for _ in range(ITERATIONS):
            matrix = slopes(point, seen)  # (n, m, d)
            normal = matrix.mT @ matrix
            step = torch.linalg.solve(normal + damping * torch.eye(problem.size, dtype=torch.float64), matrix.mT @ errors[..., None])
            trial = point - step[..., 0]
            tried = vmap(residual)(trial, seen)
            better = tried.square().sum(1) < errors.square().sum(1)
            point, errors = torch.where(better[:, None], trial, point), torch.where(better[:, None], tried, errors)
            damping = torch.where(better[:, None, None], damping / 5, damping * 5).clamp(1e-9, 1e9)
        cost = errors.square().sum(1)
        if best is None:
            best, cost_of_best = point, cost
        else:
            best, cost_of_best = torch.where((cost < cost_of_best)[:, None], point, best), torch.minimum(cost, cost_of_best)
    return best


def _pure_update(jacobian: Jacobian, point: Tensor) -> Tensor:
    """The update that is sent with `point` as the first sample, by functional differentiation."""
    from torch.func import functional_call, grad

    client = jacobian.mechanism.client
    parameters = {name: parameter.detach() for name, parameter in client.model.named_parameters()}

    def loss(parameters: dict[str, Tensor], sample: Tensor, target: Tensor) -> Tensor:
        return client.loss(functional_call(client.model, parameters, (sample[None],)), target[None])

    total: dict[str, Tensor] = {}
    for place, target in enumerate(client.batch.targets):
        sample = point if place == 0 else client.batch.inputs[place]
        term = client.training.sample_term(grad(loss)(parameters, sample, target))
        total = {name: total.get(name, 0) + change / len(client.batch.inputs) for name, change in term.items()}
    return torch.cat([change.flatten() for change in jacobian._sent(total).values()])


def _defense(choice: random.Random) -> tuple[str, tuple]:
    size = 10 ** choice.uniform(-3, 0)
    kind = choice.choice(["gaussian_noise", "dpsgd", "clipping + gaussian_noise", "head_withheld + gaussian_noise"])
    noise = dm.defense("gaussian_noise", std=size)
    if kind == "dpsgd":
        return kind, (dm.defense("dpsgd", max_norm=10 ** choice.uniform(-1, 1), noise_multiplier=size),)
    if kind.startswith("clipping"):
        return kind, (dm.defense("clipping", max_norm=10 ** choice.uniform(-1, 1)), noise)
    return kind, (dm.defense("head_withheld"), noise) if kind.startswith("head") else (noise,)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=1)
    words = parser.parse_args()
    seeds = range(words.seed, words.seed + words.nets)
    if words.jobs == 1:
        results = [measure(seed) for seed in seeds]
    else:
        with ProcessPoolExecutor(words.jobs) as pool:
            results = list(pool.map(measure, seeds, chunksize=4))
    print(f"{'activation':<10} {'defense':<32} {'nets':>5} {'broken':>7} {'median gap dB':>14} {'largest gap dB':>15}")
    for (activation, defense), count in sorted(Counter((r.activation, r.defense) for r in results).items()):
        those = [r for r in results if (r.activation, r.defense) == (activation, defense)]
        gaps = sorted(r.gap for r in those)
        broken = sum(r.broken for r in those)
        print(f"{activation:<10} {defense:<32} {count:>5} {broken:>7} {gaps[len(gaps) // 2]:>14.2f} {gaps[-1]:>15.2f}")
    print(f"broken: {sum(r.broken for r in results)} of {len(results)}; of them proved: {sum(r.broken and r.proved for r in results)}")


if __name__ == "__main__":
    main()
