"""Which evaluator is taken, and what happens where a model cannot be traced for it."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dosimeter.engines.matching.compiled import Captured, Compiled
from dosimeter.engines.matching.errors import first_line
from dosimeter.engines.matching.objective import Objective, Terms
from dosimeter.engines.matching.paths import Eager, Evaluation, Evaluator, Functional
from dosimeter.engines.matching.problem import Problem, in_double_precision

WORTH_COMPILING_STEPS = 15_000  # on a GPU, so many steps win back what compilation costs


def choose(problem: Problem, variables: Tensor) -> Evaluator:
    """The evaluator for the recipe's path and the restarts in `variables` (R, D), with the simpler ones to fall back on.

    "auto" is a fixed rule, so that the same seed gives the same bits on a CPU. There one start is fastest eagerly, and several in one
    functional forward pass (benchmarks/matching.py). On a GPU the functional form is recorded as a graph; long runs compile it first.
    "fastest" measures on the spot.
    """
    objective, recipe = problem.objective, problem.recipe
    path = recipe.path
    if path == "auto":
        path = "functional" if len(variables) > 1 else "eager"
        if variables.is_cuda:
            path = "compiled" if recipe.steps >= WORTH_COMPILING_STEPS else "captured"
    if path == "eager":
        return Eager(objective)
    if not objective.replayable:
        return _with_note(Eager(objective), f"{objective.public.training.name} has no functional form, so the run was eager")
    normed = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in problem.exposure.model.modules())
    note = "" if len(variables) == 1 or normed else reason_against_batching(problem, variables)
    # vmap has no batching rule for batch norm: slow in eval mode, wrong in train mode
    together = len(variables) == 1 or not (note or normed)

    def build(kind: type[Evaluator]) -> Evaluator:
        return kind(objective) if together else OneByOne(kind(objective))

    if path == "fastest":
        return _with_note(Measured(objective, [Eager(objective), *map(build, (Functional, Captured, Compiled))]), note)
    ladder: list[Evaluator] = [Functional(objective), Eager(objective)] if together else [Eager(objective)]
    if path in ("captured", "compiled"):
        ladder.insert(0, build(Captured))
    if path == "compiled":
        ladder.insert(0, build(Compiled))
    return _with_note(WithFallback(ladder), note)


def reason_against_batching(problem: Problem, variables: Tensor) -> str:
    """Why restarts must not share one forward pass: together, two have other gradients than alone. Empty if they may.

    `torch.func.vmap` silently gives wrong second derivatives through layer norm, instance norm and batch norm in train mode. A model
    that draws random numbers differs from call to call. So two restarts are tried, in double precision.
    """
    one_by_one = "restarts ran one by one, as"
    double = in_double_precision(problem)
    objective = double.objective
    inputs, logits = double.guess.unpack(variables[:2].double())
    terms = Terms(matching=inputs.new_ones(()), priors=inputs.new_ones(len(problem.recipe.priors)))

    def slope(kind: type[Evaluator]) -> Tensor:
        return kind(objective)(inputs, logits, objective.names, terms).inputs

    with torch.random.fork_rng(devices=[inputs.device] if inputs.is_cuda else []):
        try:
            alone, again = slope(Eager), slope(Eager)
        except Exception as error:  # memory, or a constant of single precision; a defect of the model shows where it is first evaluated
            return f"{one_by_one} their trial in double precision failed ({first_line(error)})"
        try:
            together = slope(Functional)
        except Exception as error:  # tracing fails in as many ways as there are models
            return f"{one_by_one} this model cannot be traced side by side ({first_line(error)})"
    if not bool(torch.isfinite(alone).all()):
        return f"{one_by_one} their gradients are not finite"
    allowed = 1e-8 * alone.abs().max()
    if bool((alone - again).abs().max() > allowed):
        return f"{one_by_one} this model draws random numbers"
    return "" if bool((alone - together).abs().max() <= allowed) else f"{one_by_one} PyTorch differentiates this model wrongly side by side"


class OneByOne(Evaluator):
    """Several restarts through an evaluator of one."""

    one_layer_set = True

    def __init__(self, single: Evaluator) -> None:
        super().__init__(single.objective)
        self.single, self.name = single, single.name

    def __call__(self, inputs: Tensor, logits: Tensor | None, names: Sequence[str], terms: Terms) -> Evaluation:
        evaluations = []
        for r in range(len(inputs)):
            one = self.single(inputs[r : r + 1], None if logits is None else logits[r : r + 1], names, terms)
            evaluations.append((one.objective, one.distance, one.inputs.clone(), None if one.logits is None else one.logits.clone()))
        objective, distance, slope, label_slope = zip(*evaluations)
        together = None if logits is None else torch.cat(label_slope)
        return Evaluation(torch.cat(objective), torch.cat(distance), torch.cat(slope), together)


def _with_note(evaluator: Evaluator, note: str) -> Evaluator:
    evaluator.note = note
    return evaluator


class WithFallback(Evaluator):
    """Tries the fastest evaluator first. Where the model cannot be traced for it, the next one is taken and the note says so."""

    def __init__(self, ladder: Sequence[Evaluator]) -> None:
        super().__init__(ladder[0].objective)
        self.ladder = list(ladder)

    @property
    def one_layer_set(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.ladder[0].one_layer_set

    def __call__(self, inputs: Tensor, logits: Tensor | None, names: Sequence[str], terms: Terms) -> Evaluation:
        while len(self.ladder) > 1:
            try:
                return self.ladder[0](inputs, logits, names, terms)
            except Exception as error:  # tracing fails in as many ways as there are models; the last rung is not guarded
                failed = self.ladder.pop(0)
                self.note = (
                    f"{self.note}; " * bool(self.note) + f"{failed.name} form refused ({first_line(error)}), ran {self.ladder[0].name}"
                )
        return self.ladder[0](inputs, logits, names, terms)


class Measured(Evaluator):
    """Times every evaluator on the first call and stays with the fastest."""

    one_layer_set = True

    def __init__(self, objective: Objective, candidates: Sequence[Evaluator]) -> None:
        super().__init__(objective)
        self.candidates = candidates
        self.chosen: Evaluator | None = None

    def __call__(self, inputs: Tensor, logits: Tensor | None, names: Sequence[str], terms: Terms) -> Evaluation:
        if self.chosen is None:
            self.chosen, measured = self._measure(inputs, logits, names, terms)
            self.note = "; ".join(part for part in (self.note, measured) if part)
        return self.chosen(inputs, logits, names, terms)

    def _measure(self, inputs: Tensor, logits: Tensor | None, names: Sequence[str], terms: Terms) -> tuple[Evaluator, str]:
        seconds: dict[Evaluator, float] = {}
        for candidate in self.candidates:
            try:
                times = [_measure_seconds(candidate, inputs, logits, names, terms) for _ in range(8)]
            except Exception:
                if not seconds and candidate is self.candidates[-1]:
                    raise
                continue
            seconds[candidate] = sorted(times[2:])[3]
        best = min(seconds, key=lambda candidate: seconds[candidate])
        listed = ", ".join(f"{candidate.name} {1e3 * value:.1f} ms" for candidate, value in seconds.items())
        return best, f"measured {listed}"


def _measure_seconds(evaluate: Evaluator, inputs: Tensor, logits: Tensor | None, names: Sequence[str], terms: Terms) -> float:
    began = time.perf_counter()
    float(evaluate(inputs, logits, names, terms).objective.sum())
    return time.perf_counter() - began
