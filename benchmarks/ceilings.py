"""Is any attacker better than its ceiling? Random small nets behind random noise, and the best attacker that we have.

    python benchmarks/ceilings.py --nets 1000 --seed 1000 --jobs 16

Inputs are drawn from a Gaussian, which the attacker knows. The attacker also knows the labels, the other samples, the model and the noise.
It gets what `dm.observe` sends, and has its own model of the client, so that a bound that misreads a defense is found. It computes the
most probable input by Levenberg-Marquardt steps from the mean and from draws of the prior. The most probable of the results is its guess.
The table compares its mean squared error over the draws with the bound `van_trees`. Behind clipping and noise a second attacker picks the
input among ten candidates, and its share of successes stands beside the bound `reconstruction_robustness`. A bound counts as broken where
an attacker is better by more than the 99.9 % interval of its mean. Squared errors are skewed, and the interval is Hall's, which takes that
into account. A net that looks broken is measured again, with 32 times as many other draws, which alone decide.
"""

from __future__ import annotations

import argparse
import math
import random
import time
import warnings
from collections import OrderedDict
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from measured import write_measurement
from torch import Tensor, nn
from torch.func import functional_call, grad, jacfwd, vmap

import dosimeter as dm
from dosimeter.bounds.reconstruction_robustness import ReconstructionRobustness
from dosimeter.bounds.van_trees import VanTrees
from dosimeter.client.losses import BinaryCrossEntropy, SquaredError
from dosimeter.engines.bounds.candidates import identify
from dosimeter.engines.bounds.mechanism import mechanism_of
from dosimeter.engines.bounds.pixel_prior import PixelProblem
from dosimeter.interfaces import Mechanism

ACTIVATIONS = {"tanh": nn.Tanh, "sigmoid": nn.Sigmoid, "silu": nn.SiLU, "relu": nn.ReLU}
GAINS = [1, 1, 1, 4]  # of all weights; with large ones many inputs leave no trace, and few tell much
LOSSES = {"cross_entropy": dm.CrossEntropy, "squared_error": SquaredError, "binary_cross_entropy": BinaryCrossEntropy}
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
    width, classes, batch = choice.choice([4, 8, 16]), choice.choice([2, 3, 10]), choice.choice([1, 2, 4, 8])
    name, defenses, steps = _defense(choice)
    model = _net(choice, size, width, classes, ACTIVATIONS[activation], mixing="dpsgd" not in name and batch > 1)
    prior_root = torch.randn(size, size, dtype=torch.float64) / math.sqrt(size)
    auxiliary = torch.randn(4000, size, dtype=torch.float64) @ prior_root.T + torch.randn(size, dtype=torch.float64)
    loss, targets = _aim(choice, classes, batch)
    data = dm.Batch(auxiliary[:batch].clone(), targets)
    options = {"defenses": defenses, "loss": loss, "training": dm.FedAvg(steps=steps, learning_rate=0.2) if steps else dm.FedSGD()}
    known = auxiliary[: choice.choice([3, 4000, 4000, 4000])]
    mechanism = mechanism_of(model, data, auxiliary=dm.Batch(known, torch.zeros(len(known), dtype=torch.int64)), **options)
    problem = PixelProblem(mechanism, "van_trees")
    ceiling = VanTrees()(mechanism, torch.Generator().manual_seed(seed))
    drawing = seed + first_draw * OTHER_DRAWS
    truth = problem.prior.draw(draws, torch.Generator().manual_seed(drawing + 1))
    client = Client(model, data, loss, defenses, steps, size)
    client.check()
    seen = torch.stack([client.observe(point, drawing + place) for place, point in enumerate(truth)])
    squared = (attack(client, problem, seen, drawing) - truth).square().sum(1)
    bound = size * 10 ** (-float(ceiling.values[0]) / 10)
    picked = _identification(mechanism, client, truth, seed)
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


def _identification(mechanism: Mechanism, client: Client, candidates: Tensor, seed: int) -> tuple[float | None, float | None]:
    """The share of trials in which the first sample is picked out of ten candidates (n, d), and the bound on it."""
    if not mechanism.noise_multipliers:
        return None, None
    rng = torch.Generator().manual_seed(seed + 3)
    ceiling = ReconstructionRobustness(chance=1 / CANDIDATES)(mechanism, rng)
    sent = torch.stack([client.pure(point).detach() for point in candidates[:CANDIDATES]]) / client.noise  # in units of the noise
    hits = [
        identify((sent - sent[one]).roll(-one, 0)[None], noise_multiplier=1.0, trials=TRIALS // CANDIDATES, rng=rng) == 0
        for one in range(CANDIDATES)
    ]
    return float(torch.cat(hits).double().mean()), float(ceiling.values[0])


def attack(client: Client, problem: PixelProblem, seen: Tensor, seed: int) -> Tensor:
    """The most probable inputs (n, d) in the first sample's place, given the updates `seen` (n, m)."""
    prior = problem.prior
    rng = torch.Generator().manual_seed(seed + 2)
    precision = torch.linalg.pinv(prior.root(torch.eye(problem.size, dtype=torch.float64)))  # Λ^-½

    def residual(point: Tensor, observed: Tensor) -> Tensor:
        sent = client.pure(point)
        if client.rescaled:  # the clipping after the noise hides the scale, which is fitted
            observed = observed * (observed @ sent) / (observed @ observed)
        return torch.cat(((observed - sent) / client.noise, precision @ (point - prior.mean)))

    slopes = vmap(jacfwd(residual))
    best = cost_of_best = None
    for start in range(STARTS):
        point = prior.mean.expand(len(seen), -1).clone() if start == 0 else prior.draw(len(seen), rng)
        damping = torch.ones(len(seen), 1, 1, dtype=torch.float64)
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


class Client:
    """What the attacker knows of the client: how it trains, what it withholds and how much noise it adds; without `mechanism_of`."""

    def __init__(self, model: nn.Module, data: dm.Batch, loss, defenses: tuple, steps: int, size: int) -> None:
        self.model, self.data, self.loss, self.defenses, self.steps = model, data, loss, defenses, steps
        self.options = {defense.name: defense for defense in defenses}
        private = self.options.get("dpsgd")
        clip = self.options.get("clipping")
        self.each = private.max_norm if private else math.inf  # to which each sample is clipped, or the update
        self.whole = clip.max_norm if clip and not private else math.inf
        self.rescaled = bool(clip and private)
        self.sent = [name for name, _ in model.named_parameters() if "head_withheld" not in self.options or not name.startswith(HEAD)]
        self.noise = self._noise()

    def _noise(self) -> float:
        """The deviation of each entry; behind Laplace noise that of the Gaussian with as much information."""
        if private := self.options.get("dpsgd"):
            return private.noise_multiplier * private.max_norm / len(self.data.inputs)
        return self.options["laplace_noise"].scale if "laplace_noise" in self.options else self.options["gaussian_noise"].std

    def observe(self, point: Tensor, seed: int, noiseless: bool = False) -> Tensor:
        inputs = torch.cat((point[None], self.data.inputs[1:]))
        training = dm.FedAvg(steps=self.steps, learning_rate=0.2) if self.steps else dm.FedSGD()
        defenses = [defense for defense in self.defenses if not noiseless or defense.name == "head_withheld"]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # inputs outside [0, 1]
            exposure = dm.observe(
                self.model, dm.Batch(inputs, self.data.targets), defenses=defenses, training=training, loss=self.loss, seed=seed
            )
        return torch.cat([exposure.update[name].flatten() for name in self.sent])

    def check(self) -> None:
        """The attacker's model of the client is right: without clipping and noise it computes what the client sends."""
        each, whole, point = self.each, self.whole, self.data.inputs[0]
        self.each = self.whole = math.inf
        assert torch.allclose(self.pure(point), self.observe(point, 0, noiseless=True), rtol=1e-6, atol=1e-9)
        self.each, self.whole = each, whole

    def pure(self, point: Tensor) -> Tensor:
        """The update without noise with `point` as the first sample, by functional differentiation."""
        inputs = torch.cat((point[None], self.data.inputs[1:]))
        start = {name: parameter.detach() for name, parameter in self.model.named_parameters()}
        slope = grad(lambda at, x, y: self.loss(functional_call(self.model, at, (x,)), y))
        if self.each < math.inf:
            terms = [slope(start, x[None], y[None]) for x, y in zip(inputs, self.data.targets)]
            terms = [self._clipped(term, self.each) for term in terms]
            total = {name: sum(term[name] for term in terms) / len(terms) for name in start}
        else:
            at = start
            for _ in range(max(1, self.steps)):
                gradient = slope(at, inputs, self.data.targets)
                at = {name: at[name] - 0.2 * gradient[name] for name in at}
            total = {name: (start[name] - at[name]) / 0.2 / max(1, self.steps) for name in at}
        total = self._clipped({name: total[name] for name in self.sent}, self.whole)
        return torch.cat([total[name].flatten() for name in self.sent])

    @staticmethod
    def _clipped(update: dict[str, Tensor], norm: float) -> dict[str, Tensor]:
        if math.isinf(norm):
            return update
        size = torch.cat([change.flatten() for change in update.values()]).norm()
        return {name: change * torch.clamp(norm / size, max=1.0) for name, change in update.items()}


HEAD = "head."


def _net(choice: random.Random, size: int, width: int, classes: int, activation, mixing: bool) -> nn.Module:
    """A linear layer or a convolution, a norm or none, an activation and a head."""
    norms = [nn.Identity(), nn.LayerNorm(width), nn.GroupNorm(2, width), *([nn.BatchNorm1d(width, track_running_stats=False)] * mixing)]
    first = [("linear", nn.Linear(size, width))]
    if choice.random() < 0.25:
        place = nn.Conv1d(1, 2, 3, padding=1)
        first = [
            ("raise", nn.Unflatten(1, (1, size))),
            ("convolution", place),
            ("flat", nn.Flatten()),
            ("linear", nn.Linear(2 * size, width)),
        ]
    layers = [*first, ("norm", choice.choice(norms)), ("activation", activation()), ("head", nn.Linear(width, classes))]
    model, gain = nn.Sequential(OrderedDict(layers)).double(), choice.choice(GAINS)
    for parameter in model.parameters():
        parameter.data *= gain
    return model


def _aim(choice: random.Random, classes: int, batch: int) -> tuple:
    """A loss and targets."""
    name = choice.choice([*LOSSES, "cross_entropy"])
    targets = torch.randint(0, classes, (batch,))
    return LOSSES[name](), torch.randn(batch, classes, dtype=torch.float64) if name == "squared_error" else targets


def _defense(choice: random.Random) -> tuple[str, tuple, int]:
    """A list of defenses by its name, and the local steps; 0: one gradient is sent."""
    std, multiplier, norm = 10 ** choice.uniform(-3, 0), 10 ** choice.uniform(-2, 1), 10 ** choice.uniform(-1, 1)
    noise, private = dm.defense("gaussian_noise", std=std), dm.defense("dpsgd", max_norm=norm, noise_multiplier=multiplier)
    without, clip = dm.defense("head_withheld"), dm.defense("clipping", max_norm=norm)
    tight = dm.defense("clipping", max_norm=1e-3)  # below the size of the noisy update, which is then rescaled
    lists = [
        (noise,),
        (private,),
        (clip, dm.defense("gaussian_noise", std=multiplier * norm)),
        (without, noise),
        (noise, without),
        (dm.defense("laplace_noise", scale=std),),
        (tight, private),
        (private, tight),
    ]
    chosen = choice.choice(lists)
    steps = choice.choice([0, 0, 3]) if private not in chosen else 0
    return " + ".join([defense.name for defense in chosen] + ["local steps"] * bool(steps)), chosen, steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--draws", type=int, default=DRAWS)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=math.inf, help="after which one job begins no further net")
    parser.add_argument("--record", type=Path, help="the table as a JSON file for docs/results/build.py")
    words = parser.parse_args()
    seeds, began = range(words.seed, words.seed + words.nets), time.monotonic()
    if words.jobs == 1:
        results = [measure(seed, words.draws) for seed in seeds if time.monotonic() - began < 60 * words.minutes]
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
        f"`van_trees`: broken on {broken} of {len(results)} nets, on {proved} of the {sum(r.proved for r in results)} where it is proved.",
        f"`reconstruction_robustness`: broken on {picked} of {bounded} nets.",
        f"{again} nets looked broken with {words.draws} draws, and were measured again with {SECOND_LOOK * words.draws} others.",
    ]
    print(*said, sep="\n")
    if words.record:
        write_measurement(words.record, f"{words.seed} to {words.seed + len(results) - 1}", columns, rows, said)


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
