"""One attack in motion: what moves, what is kept, when it ends, and what it hands back."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Generator, Tensor

from dosimeter.engines.matching.checkpoints import Checkpoint
from dosimeter.engines.matching.choice import choose
from dosimeter.engines.matching.compiled import precision
from dosimeter.engines.matching.consistency import consensus, with_consistency
from dosimeter.engines.matching.differentiable import in_one_precision, twice_differentiable
from dosimeter.engines.matching.guess import draw_start, make_guess
from dosimeter.engines.matching.objective import Objective, Terms
from dosimeter.engines.matching.optimisers import State
from dosimeter.engines.matching.paths import Eager, Evaluation, Evaluator
from dosimeter.engines.matching.recipe import Recipe
from dosimeter.interfaces import Exposure
from dosimeter.progress import advance
from dosimeter.types import LabelEstimate, Outcome, Reconstruction

PULSE = 10  # steps between two looks at the numbers, each of which waits for the device


class Run:
    """R restarts side by side, each with the best guess it has met."""

    def __init__(
        self, exposure: Exposure, labels: LabelEstimate | None, rng: Generator, recipe: Recipe, start: Tensor | None = None
    ) -> None:
        sent, exposure = exposure, in_one_precision(exposure)
        self.exposure, self.recipe, self.rng = exposure, recipe, rng
        self.widened = exposure.model is not sent.model
        self.guess = make_guess(exposure, labels, recipe)
        self.objective = Objective(exposure, recipe, self.guess.targets)
        self.device = self.guess.low.device
        self.variables = draw_start(self.guess, labels, recipe, rng)  # (R, D)
        if start is not None:
            self.variables[:, : start.numel()] = start.detach().flatten().to(self.variables)
        if recipe.boxed:
            self.variables = self.guess.boxed(self.variables)
        self.state: State = {}
        self.best = self.variables.clone()  # (R, D)
        self.best_objective = self.variables.new_full((recipe.restarts,), torch.inf)  # since the objective last changed
        self.alive = torch.ones(recipe.restarts, dtype=torch.bool, device=self.device)
        self.dropped: list[float] = []  # the objectives of the restarts that the trial ended
        self.constants: dict[tuple[float, ...], Tensor] = {}
        self.evaluate: Evaluator = Eager(self.objective)
        self.checkpoint = Checkpoint(exposure, recipe, self.variables, self.guess.targets)
        self.step = 0
        self.resumed = 0  # the step at which a killed run of the same attack was taken up
        self.improved, self.record = 0, torch.inf  # when the objective last got clearly better, and what it was
        self.note, self.stalled = "", False

    def carried_out(self) -> Reconstruction:
        self.optimise()
        result = self.result()
        self.checkpoint.remove()
        return result

    def optimise(self) -> None:
        recipe, began = self.recipe, time.monotonic()
        self.state = recipe.optimiser.start(self.variables)
        self.resume()
        self.evaluate = choose(self.exposure, self.objective, self.guess, self.variables)
        phase = self.phase((self.step - 1) / recipe.steps) if self.step else None
        while self.step < recipe.steps:
            if self.step % PULSE == 0 and self.checkpoint.due:
                self.save()
            progress = self.step / recipe.steps
            names, terms = self.terms(progress)
            if phase != (phase := self.phase(progress)):
                self.best_objective.fill_(torch.inf)
                self.improved, self.record = self.step, torch.inf
            evaluation = self.evaluate(*self.guess.unpack(self.variables), names, terms)
            if recipe.consistency > 0 and progress >= recipe.consistency_onset and len(self.variables) > 1:
                evaluation = with_consistency(evaluation, self.guess, self.variables, recipe.consistency)
            self.keep_best(evaluation)
            if self.step % PULSE == 0:
                self.note = self.reason_to_stop(evaluation, time.monotonic() - began)
                if self.note:
                    return
            self.move(evaluation, recipe.rate.at(progress))
            self.step += 1
            ending = recipe.trial is not None and self.step == max(1, round(recipe.trial * recipe.steps))
            if ending and len(self.variables) > recipe.kept:
                self.end_trial()
        advance(recipe.steps, recipe.steps, f"objective {float(self.best_objective.min()):.3g}")

    def reason_to_stop(self, evaluation: Evaluation, seconds: float) -> str:
        """Look at the numbers and tell whoever listens; the reason why nothing more is to be done, or nothing."""
        recipe = self.recipe
        lowest = float(self.best_objective.min())
        advance(self.step, recipe.steps, f"objective {lowest:.3g}")
        if lowest < (0.9 if recipe.anew else 0.999) * self.record:  # where fresh starts wait, creeping counts as standing still
            self.improved, self.record = self.step, lowest
        if not bool(self.alive.any()):
            self.stalled = True
            return f"every start left the finite numbers by step {self.step}"
        nothing = recipe.distance.scale(list(self.objective.target.values())) if recipe.found else 0.0
        if recipe.found and float(evaluation.distance.nan_to_num(torch.inf).min()) <= recipe.found * nothing:
            return f"matched after {self.step} steps"
        if recipe.patience is not None and self.step - self.improved >= recipe.patience:
            self.stalled = True
            return f"no better for {recipe.patience} steps, stopped after {self.step}"
        if recipe.seconds is not None and seconds >= recipe.seconds:
            return f"the time budget of {recipe.seconds:g} s ended after {self.step} of {recipe.steps} steps"
        return ""

    def terms(self, progress: float, final: bool = False) -> tuple[tuple[str, ...], Terms]:
        """The matched layers and the weights of everything after a fraction of the steps; `final` is without dropout."""
        recipe = self.recipe
        matched = recipe.layers.at(progress, self.objective.names)
        names = recipe.layers.ever(self.objective.names) if self.evaluate.one_layer_set else matched
        layers = masks = None
        if recipe.layer_weights is not None or (self.evaluate.one_layer_set and recipe.layers.shares > 1):
            given, entered = recipe.layer_weights or {}, set(matched)
            layers = self.constant(*(given.get(name, 1.0) * (name in entered) for name in names))
        if recipe.dropout > 0 and (not final or self.evaluate.one_layer_set):
            masks = self._masks([self.objective.target[name] for name in names], 0.0 if final else recipe.dropout)
        priors = self.constant(*(prior.weight_at(progress) for prior in recipe.priors))
        matching = self.constant(float(progress >= recipe.matching_onset))[0]
        return names, Terms(matching=matching, priors=priors, layers=layers, masks=masks)

    def constant(self, *values: float) -> Tensor:
        """Numbers on the device, sent there once: every sending waits for all that runs there."""
        if values not in self.constants:
            self.constants[values] = self.variables.new_tensor(values)
        return self.constants[values]

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

    def end_trial(self) -> None:
        """End every restart but those that did best so far."""
        order = self.best_objective.argsort()
        chosen, ended = order[: self.recipe.kept], order[self.recipe.kept :]
        self.dropped = self.best_objective[ended].tolist()
        self.variables, self.best, self.best_objective, self.alive = (
            tensor[chosen] for tensor in (self.variables, self.best, self.best_objective, self.alive)
        )
        self.state = {name: tensor[chosen] if tensor.ndim else tensor for name, tensor in self.state.items()}
        self.evaluate = choose(self.exposure, self.objective, self.guess, self.variables)

    def move(self, evaluation: Evaluation, rate: float) -> None:
        gradient = self.guess.pack(evaluation.inputs, evaluation.logits)
        gradient = torch.where(self.alive[:, None], gradient, torch.zeros_like(gradient)).nan_to_num(0.0, 0.0, 0.0)
        moved = self.recipe.optimiser.step(self.state, self.variables, gradient, rate)
        if self.recipe.boxed:
            moved = self.guess.boxed(moved)
        self.variables = torch.where(self.alive[:, None], moved, self.best)

    def result(self) -> Reconstruction:
        """The restart whose best guess has the lowest final objective, or the mean of those that are no worse by much."""
        names, terms = self.terms(1.0, final=True)
        finals = [self.evaluate(*self.guess.unpack(candidates), names, terms) for candidates in (self.best, self.variables)]
        objective = torch.stack([f.objective for f in finals]).nan_to_num(torch.inf, torch.inf)  # (2, R)
        distance = torch.stack([f.distance for f in finals])
        reached, which = objective.min(0)  # (R,)
        chosen = int(reached.argmin())
        if not bool(torch.isfinite(reached[chosen])):
            return self.gave_up(Outcome.DIVERGED, self.note or "the objective is not finite at any guess")
        ends = torch.where(which[:, None] == 0, self.best, self.variables)  # (R, D)
        inputs, labels = self._samples(ends[chosen])
        lowest, nearest = float(reached[chosen]), float(distance[int(which[chosen]), chosen])
        alike = [chosen, *(r for r in reached.argsort().tolist() if r != chosen and float(reached[r]) <= self.recipe.alike * lowest)]
        blended = ""
        if len(alike) > 1 and self.recipe.alike > 1 and self.guess.targets is not None:
            several, _ = self.guess.unpack(ends[alike])
            inputs = consensus(several, self.guess.targets)[0]
            mean = Eager(self.objective)(inputs[None], None, names, terms)
            best, lowest, nearest = lowest, float(mean.objective[0]), float(mean.distance[0])
            apart = float((several[0] - inputs).square().mean().sqrt() / (self.guess.high - self.guess.low).mean())
            blended = (
                f"the mean of {len(alike)} guesses that fit alike, {apart:.2g} of the data range from the best of them, "
                f"with an objective of {lowest:.2g} where that has {best:.2g}"
            )
        lost = int((~self.alive).sum())
        notes = [
            self.note,
            f"resumed at step {self.resumed}" if self.resumed else "",
            self.evaluate.note,
            "replayed in single precision, since squares of gradients leave the range of half" if self.widened else "",
            f"{len(self.dropped)} of {self.recipe.restarts} restarts ended after their trial" if self.dropped else "",
            f"{lost} of {len(self.alive)} restarts left the finite numbers" if lost else "",
            blended,
        ]
        return Reconstruction(
            inputs=inputs,
            labels=labels,
            objective=lowest,
            distance=nearest,
            normalization=self.exposure.public.normalization,
            restarts=(*(float(value) for value in reached), *self.dropped),
            message="; ".join(note for note in notes if note),
            objective_at=self.objective_at,
        )

    def objective_at(self, inputs: Tensor, targets: Tensor) -> float:
        """The final objective, prior included, at somebody else's inputs and targets."""
        names, terms = self.terms(1.0, final=True)
        objective = Objective(self.exposure, self.recipe, targets.to(self.device))
        with surroundings(self):
            return float(Eager(objective)(inputs[None].to(self.variables), None, names, terms).objective[0])

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

    def _masks(self, like: Sequence[Tensor], dropout: float) -> tuple[Tensor, ...]:
        """One draw for all layers: 1 where an entry is seen, 0 for a share `dropout` of them."""
        sizes = [tensor.numel() for tensor in like]
        kept = (torch.rand(sum(sizes), generator=self.rng, device=self.rng.device) >= dropout).to(like[0])
        return tuple(part.view(tensor.shape) for part, tensor in zip(kept.split(sizes), like))

    def save(self) -> None:
        tensors = {
            "variables": self.variables,
            "best": self.best,
            "best objective": self.best_objective,
            "alive": self.alive,
            "dropped": torch.tensor(self.dropped, dtype=torch.float64),
            "steps": torch.tensor([self.step, self.improved]),
            "record": torch.tensor(self.record, dtype=torch.float64),
            "own numbers": self.rng.get_state(),
            "global numbers": torch.get_rng_state(),
        }
        if self.device.type == "cuda":
            tensors["device numbers"] = torch.cuda.get_rng_state(self.device)
        tensors |= {f"optimiser {name}": tensor for name, tensor in self.state.items()}
        chosen = self.best[int(self.best_objective.argmin())]
        self.checkpoint.save(tensors, self._samples(chosen)[0])

    def resume(self) -> None:
        """Go on where an earlier run of the same attack was cut off, bit for bit."""
        kept = self.checkpoint.load(self.device)
        if kept is None:
            return
        self.variables, self.best, self.best_objective, self.alive = (
            kept[name] for name in ("variables", "best", "best objective", "alive")
        )
        self.dropped, self.record = kept["dropped"].tolist(), float(kept["record"])
        self.step, self.improved = kept["steps"].tolist()
        self.resumed = self.step
        self.state = {name: kept[f"optimiser {name}"] for name in self.state}
        self.state["count"] = self.state["count"].cpu()
        self.rng.set_state(kept["own numbers"].cpu())
        torch.set_rng_state(kept["global numbers"].cpu())
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(kept["device numbers"].cpu(), self.device)


@contextmanager
def surroundings(run: Run) -> Iterator[None]:
    """What every evaluation of a run stands in: random numbers of its own, its precision, and layers in forms of two derivatives."""
    with _own_random_numbers(run.rng, run.device), precision(run.recipe.precision), twice_differentiable():
        yield


@contextmanager
def _own_random_numbers(rng: Generator, device: torch.device) -> Iterator[None]:
    """Dropout in the model draws from the global generator: give it numbers of ours, and put the caller's back."""
    seed = int(torch.randint(2**62, (), generator=rng, device=rng.device))
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
