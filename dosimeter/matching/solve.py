"""The loop under every optimisation attack: guess inputs, replay the client's training, compare, step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Generator, Tensor

from dosimeter.matching.choice import choose, first_line
from dosimeter.matching.compiled import precision
from dosimeter.matching.consistency import with_consistency
from dosimeter.matching.guess import draw_start, make_guess
from dosimeter.matching.objective import Objective, Terms
from dosimeter.matching.paths import Eager, Evaluation, Evaluator
from dosimeter.matching.recipe import Recipe
from dosimeter.progress import advance
from dosimeter.types import Exposure, LabelEstimate, Outcome, Reconstruction

PULSE = 10  # steps between two looks at the numbers, each of which waits for the device


def solve(exposure: Exposure, labels: LabelEstimate | None, rng: Generator, recipe: Recipe) -> Reconstruction:
    """Run `recipe` on an exposure. Restarts are chosen by the objective alone; every failure ends in an outcome."""
    run = Run(exposure, labels, rng, recipe)
    if all(not bool(change.any()) for change in run.objective.target.values()):
        return run.gave_up(Outcome.IMPOSSIBLE, "the update is zero in every layer: it says nothing about the inputs")
    try:
        with _own_random_numbers(rng, run.device), precision(recipe.precision):
            run.optimise()
            return run.result()
    except (RuntimeError, NotImplementedError) as error:
        return run.gave_up(Outcome.IMPOSSIBLE, f"the model's gradient cannot be differentiated once more: {first_line(error)}")


class Run:
    """One attack in motion: R restarts side by side, each with the best guess it has met."""

    def __init__(self, exposure: Exposure, labels: LabelEstimate | None, rng: Generator, recipe: Recipe) -> None:
        self.exposure, self.recipe, self.rng = exposure, recipe, rng
        self.guess = make_guess(exposure, labels, recipe)
        self.objective = Objective(exposure, recipe, self.guess.targets)
        self.device = self.guess.low.device
        self.variables = draw_start(self.guess, labels, recipe, rng)  # (R, D)
        if recipe.boxed:
            self.variables = self.guess.boxed(self.variables)
        self.state = recipe.optimiser.start(self.variables)
        self.best = self.variables.clone()  # (R, D)
        self.best_objective = self.variables.new_full((recipe.restarts,), torch.inf)  # since the objective last changed
        self.alive = torch.ones(recipe.restarts, dtype=torch.bool, device=self.device)
        self.dropped: list[float] = []  # the objectives of the restarts that the trial ended
        self.evaluate: Evaluator = Eager(self.objective)
        self.step = 0
        self.note = ""

    def _choose(self) -> Evaluator:
        return choose(self.exposure, self.objective, self.guess, self.variables)

    def optimise(self) -> None:
        self.evaluate = self._choose()
        recipe, began, improved, record = self.recipe, time.monotonic(), 0, torch.inf
        nothing = recipe.distance.scale(list(self.objective.target.values()))
        phase = None
        while self.step < recipe.steps:
            progress = self.step / recipe.steps
            names, terms = self.terms(progress)
            if phase != (phase := self.phase(progress)):
                self.best_objective.fill_(torch.inf)
                improved, record = self.step, torch.inf
            evaluation = self.evaluate(*self.guess.unpack(self.variables), names, terms)
            if recipe.consistency > 0 and progress >= recipe.consistency_onset and len(self.variables) > 1:
                evaluation = with_consistency(evaluation, self.guess, self.variables, recipe.consistency)
            self.keep_best(evaluation)
            if self.step % PULSE == 0:
                lowest = float(self.best_objective.min())
                advance(self.step, recipe.steps, f"objective {lowest:.3g}")
                if not bool(self.alive.any()):
                    self.note = f"every start left the finite numbers by step {self.step}"
                    return
                if lowest < 0.999 * record:
                    improved, record = self.step, lowest
                if recipe.found and float(evaluation.distance.nan_to_num(torch.inf).min()) <= recipe.found * nothing:
                    self.note = f"matched after {self.step} steps"
                    return
                if recipe.patience is not None and self.step - improved >= recipe.patience:
                    self.note = f"no better for {recipe.patience} steps, stopped after {self.step}"
                    return
                if recipe.seconds is not None and time.monotonic() - began >= recipe.seconds:
                    self.note = f"the time budget of {recipe.seconds:g} s ended after {self.step} of {recipe.steps} steps"
                    return
            self.move(evaluation, recipe.rate.at(progress))
            self.step += 1
            if recipe.trial is not None and self.step == max(1, round(recipe.trial * recipe.steps)):
                self.keep_one()
        advance(recipe.steps, recipe.steps, f"objective {float(self.best_objective.min()):.3g}")

    def terms(self, progress: float, final: bool = False) -> tuple[tuple[str, ...], Terms]:
        """The matched layers and the weights of everything after a fraction of the steps; `final` is without dropout."""
        recipe = self.recipe
        names = matched = recipe.layers.at(progress, self.objective.names)
        if self.evaluate.one_layer_set:
            names = recipe.layers.ever(self.objective.names)
        layers = None
        if recipe.layer_weights is not None or len(names) != len(matched):
            given, entered = recipe.layer_weights or {}, set(matched)
            layers = self.variables.new_tensor([given.get(name, 1.0) * (name in entered) for name in names])
        masks = None
        if recipe.dropout > 0 and not final:
            masks = tuple(self._mask(self.objective.target[name]) for name in names)
        priors = self.variables.new_tensor([prior.weight_at(progress) for prior in recipe.priors])
        matching = self.variables.new_tensor(float(progress >= recipe.matching_onset))
        return names, Terms(matching=matching, priors=priors, layers=layers, masks=masks)

    def phase(self, progress: float) -> tuple[object, ...]:
        """What the objective is made of; guesses are comparable only within one phase."""
        recipe = self.recipe
        weights = tuple(prior.weight_at(progress) for prior in recipe.priors)
        matched = recipe.layers.at(progress, self.objective.names)
        return matched, weights, progress >= recipe.matching_onset, progress >= recipe.consistency_onset

    def keep_best(self, evaluation: Evaluation) -> None:
        """Remember each restart's best guess; a restart that leaves the finite numbers ends at its best."""
        objective = evaluation.objective
        self.alive &= torch.isfinite(objective)
        better = (objective < self.best_objective) & self.alive
        if self.recipe.dropout > 0:
            better = self.alive
        self.best = torch.where(better[:, None], self.variables, self.best)
        self.best_objective = torch.where(better, objective, self.best_objective)

    def keep_one(self) -> None:
        """End every restart but the one that did best so far."""
        chosen = int(self.best_objective.argmin())
        self.dropped = [float(value) for r, value in enumerate(self.best_objective) if r != chosen]
        one = slice(chosen, chosen + 1)
        self.variables, self.best, self.best_objective, self.alive = (
            tensor[one] for tensor in (self.variables, self.best, self.best_objective, self.alive)
        )
        self.state = {name: tensor[one] if tensor.ndim else tensor for name, tensor in self.state.items()}
        self.evaluate = self._choose()

    def move(self, evaluation: Evaluation, rate: float) -> None:
        gradient = self.guess.pack(evaluation.inputs, evaluation.logits)
        gradient = torch.where(self.alive[:, None], gradient, torch.zeros_like(gradient)).nan_to_num(0.0, 0.0, 0.0)
        moved = self.recipe.optimiser.step(self.state, self.variables, gradient, rate)
        if self.recipe.boxed:
            moved = self.guess.boxed(moved)
        self.variables = torch.where(self.alive[:, None], moved, self.best)

    def result(self) -> Reconstruction:
        """The restart whose best guess has the lowest final objective."""
        names, terms = self.terms(1.0, final=True)
        finals = [self.evaluate(*self.guess.unpack(candidates), names, terms) for candidates in (self.best, self.variables)]
        objective = torch.stack([f.objective for f in finals]).nan_to_num(torch.inf, torch.inf)  # (2, R)
        distance = torch.stack([f.distance for f in finals])
        reached, which = objective.min(0)  # (R,)
        chosen = int(reached.argmin())
        if not bool(torch.isfinite(reached[chosen])):
            return self.gave_up(Outcome.DIVERGED, self.note or "the objective is not finite at any guess")
        variables = (self.best, self.variables)[int(which[chosen])][chosen]
        inputs, labels = self._samples(variables)
        lost = int((~self.alive).sum())
        notes = [
            self.note,
            self.evaluate.note,
            f"{len(self.dropped)} of {self.recipe.restarts} restarts ended after their trial" if self.dropped else "",
            f"{lost} of {len(self.alive)} restarts left the finite numbers" if lost else "",
        ]
        return Reconstruction(
            inputs=inputs,
            labels=labels,
            objective=float(reached[chosen]),
            distance=float(distance[int(which[chosen]), chosen]),
            normalization=self.exposure.public.normalization,
            restarts=(*(float(value) for value in reached), *self.dropped),
            message="; ".join(note for note in notes if note),
        )

    def gave_up(self, outcome: Outcome, message: str) -> Reconstruction:
        inputs, labels = self._samples(self.best[0])
        normalization = self.exposure.public.normalization
        return Reconstruction(
            inputs=inputs, labels=labels, objective=torch.inf, normalization=normalization, outcome=outcome, message=message
        )

    def _samples(self, variables: Tensor) -> tuple[Tensor, Tensor]:
        """One row (D,) as inputs (B, *shape) and the labels that they were guessed under."""
        inputs, logits = self.guess.unpack(variables[None])
        if logits is not None:
            return inputs[0].clone(), self.objective.soft_targets(logits[0])
        assert self.guess.targets is not None
        return inputs[0].clone(), self.guess.targets.clone()

    def _mask(self, like: Tensor) -> Tensor:
        kept = torch.rand(like.shape, generator=self.rng, device=self.rng.device) >= self.recipe.dropout
        return kept.to(like)


@contextmanager
def _own_random_numbers(rng: Generator, device: torch.device) -> Iterator[None]:
    """Dropout in the model draws from the global generator: give it numbers of ours, and put the caller's back."""
    seed = int(torch.randint(2**62, (), generator=rng, device=rng.device))
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
