"""Is any attacker better than its ceiling? Random small nets behind random noise, and the best attacker that we have.

    python benchmarks/ceilings.py --nets 1000 --seed 1000 --jobs 16

Inputs are drawn from a Gaussian, which the attacker knows. The attacker also knows the labels, the other samples, the model and the noise.
It computes the most probable input by Levenberg-Marquardt steps from the mean and from draws of the prior. The most probable of the
results is its guess. The table compares its mean squared error over the draws with the bound `van_trees`. Behind clipping and noise a
second attacker picks the input among ten candidates, and its share of successes stands beside the bound `reconstruction_robustness`. A
bound counts as broken where an attacker is better by more than the 99.9 % interval of its mean. Squared errors are skewed, and the interval
is Hall's, which takes that into account. A net that looks broken is measured again, with 32 times as many other draws, which alone decide.
"""

from __future__ import annotations

import argparse
import math
import random
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from measured import write_measurement
from torch import Tensor, nn
from torch.func import jacfwd, vmap

import dosimeter as dm
from dosimeter.bounds.reconstruction_robustness import ReconstructionRobustness
from dosimeter.bounds.van_trees import VanTrees
from dosimeter.engines.bounds.candidates import identify
from dosimeter.engines.bounds.jacobian import Jacobian
from dosimeter.engines.bounds.mechanism import mechanism_of
from dosimeter.engines.bounds.pixel_prior import PixelProblem
from dosimeter.interfaces import Mechanism

ACTIVATIONS = {"tanh": nn.Tanh, "sigmoid": nn.Sigmoid, "silu": nn.SiLU, "relu": nn.ReLU}
DRAWS, STARTS, ITERATIONS = 64, 3, 20
SECOND_LOOK = 32  # times as many draws for a net that looks broken
CANDIDATES, TRIALS = 10, 2000
NORMAL_999 = 3.29
OTHER_DRAWS = 10**6  # between the seeds of a net's first draws and of its second


@dataclass(frozen=True)
class Result:
    """One net: the attacker's mean squared error and its upper end beside the bound, and its share of successes beside the most."""

    activation: str
    defense: str
    shown: float
    at_most: float  # the upper end of the interval of the mean
    bound: float
    proved: bool
    identified: float | None  # None: without clipping no bound is known
    possible: float | None
    draws: int

    @property
    def broken(self) -> bool:
        return self.at_most < self.bound

    @property
    def identified_too_often(self) -> bool:
        if self.identified is None or self.possible is None:
            return False
        return self.identified - NORMAL_999 * math.sqrt(self.possible * (1 - self.possible) / TRIALS) > self.possible

    @property
    def gap(self) -> float:
        """In decibels, between ceiling and attacker."""
        return 10 * math.log10(self.shown / self.bound) if self.bound > 0 else math.inf


def measure(seed: int, draws: int = DRAWS) -> Result:
    """One random net behind one random defense. Where it looks broken, more and other draws decide."""
    first = measure_once(seed, draws)
    return measure_once(seed, SECOND_LOOK * draws, first_draw=1) if first.broken else first


def measure_once(seed: int, draws: int, first_draw: int = 0) -> Result:
    """One random net behind one random defense; the attacker's error is a mean over `draws` inputs and noises."""
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
    drawing = seed + first_draw * OTHER_DRAWS
    truth = problem.prior.draw(draws, torch.Generator().manual_seed(drawing + 1))
    squared = (attack(mechanism, problem, truth, drawing) - truth).square().sum(1)
    bound = size * 10 ** (-float(ceiling.values[0]) / 10)
    picked = _identification(mechanism, truth, seed)
    return Result(activation, name, float(squared.mean()), largest_mean(squared), bound, ceiling.proved, *picked, draws)


def largest_mean(values: Tensor) -> float:
    """The upper end of the 99.9 % interval of the mean of skewed values (n,).

    Hall, "On the removal of skewness by transformation", J. Royal Statistical Society B 1992: the studentised mean t has the skewness γ of
    the values, and W + γ W²/3 + γ² W³/27 + γ/(6n) for W = t/√n has none. The cube is (1 + γ W/3)³, which is solved for W.
    """
    count, spread = len(values), float(values.std())
    if spread == 0:
        return float(values.mean())
    skewness = float(((values - values.mean()) / values.std(correction=0)).pow(3).mean())
    level = -NORMAL_999 / math.sqrt(count) - skewness / (6 * count)
    if abs(skewness) < 1e-6:
        return float(values.mean()) - spread * level
    cube = 1 + skewness * level
    return float(values.mean()) - spread * 3 / skewness * (math.copysign(abs(cube) ** (1 / 3), cube) - 1)


def _identification(mechanism: Mechanism, candidates: Tensor, seed: int) -> tuple[float | None, float | None]:
    """The share of trials in which the first sample is picked out of ten candidates (n, d), and the bound on it."""
    if not mechanism.noise_multipliers:
        return None, None
    rng = torch.Generator().manual_seed(seed + 3)
    ceiling = ReconstructionRobustness(chance=1 / CANDIDATES)(mechanism, rng)
    jacobian = Jacobian(mechanism)
    sent = torch.stack([_pure_update(jacobian, point).detach() for point in candidates[:CANDIDATES]])  # in units of the noise
    hits = [
        identify((sent - sent[one]).roll(-one, 0)[None], noise_multiplier=1.0, trials=TRIALS // CANDIDATES, rng=rng) == 0
        for one in range(CANDIDATES)
    ]
    return float(torch.cat(hits).double().mean()), float(ceiling.values[0])


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
    std, multiplier, norm = 10 ** choice.uniform(-3, 0), 10 ** choice.uniform(-2, 1), 10 ** choice.uniform(-1, 1)
    kind = choice.choice(["gaussian_noise", "dpsgd", "clipping + gaussian_noise", "head_withheld + gaussian_noise"])
    if kind == "dpsgd":
        return kind, (dm.defense("dpsgd", max_norm=norm, noise_multiplier=multiplier),)
    if kind.startswith("clipping"):
        return kind, (dm.defense("clipping", max_norm=norm), dm.defense("gaussian_noise", std=multiplier * norm))
    noise = dm.defense("gaussian_noise", std=std)
    return kind, (dm.defense("head_withheld"), noise) if kind.startswith("head") else (noise,)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--draws", type=int, default=DRAWS)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--record", type=Path, help="the table as a JSON file for docs/results/build.py")
    words = parser.parse_args()
    seeds = range(words.seed, words.seed + words.nets)
    if words.jobs == 1:
        results = [measure(seed, words.draws) for seed in seeds]
    else:
        with ProcessPoolExecutor(words.jobs) as pool:
            results = list(pool.map(partial(measure, draws=words.draws), seeds, chunksize=4))
    columns = ["activation", "defense", "nets", "broken", "median gap dB", "largest gap dB", "identified", "at most"]
    rows = [
        _row(activation, defense, [r for r in results if (r.activation, r.defense) == (activation, defense)])
        for activation, defense in sorted({(r.activation, r.defense) for r in results})
    ]
    for row in [columns, *rows]:
        print("  ".join(f"{'' if cell is None else cell!s:<{width}}" for cell, width in zip(row, (10, 32, 5, 7, 14, 15, 11, 8))))
    again = sum(r.draws > words.draws for r in results)
    broken, proved = sum(r.broken for r in results), sum(r.broken and r.proved for r in results)
    picked, bounded = sum(r.identified_too_often for r in results), sum(r.possible is not None for r in results)
    said = [
        f"`van_trees`: broken on {broken} of {len(results)} nets, on {proved} of them where it is proved.",
        f"`reconstruction_robustness`: broken on {picked} of {bounded} nets.",
        f"{again} nets looked broken with {words.draws} draws, and were measured again with {SECOND_LOOK * words.draws} others.",
    ]
    print(*said, sep="\n")
    if words.record:
        write_measurement(words.record, f"{words.seed} to {words.seed + words.nets - 1}", columns, rows, said)


def _row(activation: str, defense: str, those: list[Result]) -> list:
    """The figures of all nets with one activation behind one defense."""
    gaps = sorted(r.gap for r in those)
    known = [r for r in those if r.identified is not None and r.possible is not None]
    identified, possible = (
        round(sum(getattr(r, name) for r in known) / len(known), 3) if known else None for name in ("identified", "possible")
    )
    broken = sum(r.broken or r.identified_too_often for r in those)
    return [activation, defense, len(those), broken, round(gaps[len(gaps) // 2], 2), round(gaps[-1], 2), identified, possible]


if __name__ == "__main__":
    main()
