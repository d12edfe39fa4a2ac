"""One sample's head gradient as a function of one unknown scalar, and how the bias or the label's form tells it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import softmax

from dosimeter.head import Head
from dosimeter.types import Outcome

Family = Literal["smoothing", "mixup", "one_hot"]

POINTS = 192  # of each of the grid's three parts, for each sign
GENTLE, SATURATED = 7.0, 60.0  # ranges of logits from which on the softmax turns within a step, and beyond which it is one-hot
SMALLEST = 1e-8  # error of the row r that the grid reaches down to
POLISHED = 12  # local minima of the grid that Newton polishes
POLISHINGS = 8  # at most
SETTLED = 1e-4  # a step of Gauss-Newton this short is the last: the next would be its square
CHUNK = 2**21  # label entries held at once
DISTINCT = 1e-3  # labels further apart than this (L1) are different answers
BLURRED = 1e-2  # error bar (L1) beyond which a range of answers fits
UNEXPLAINED = 1e-2  # relative distance from the family beyond which the answer is none
BELIEVED = 1e-2  # relative distance between the bias's gradient and the rows' beyond which the bias is not believed


@dataclass(frozen=True, kw_only=True)
class ScalarProblem:
    """∇W = (p − y) fᵀ / τ of one sample, seen from row r: f = g_r / s, with s = (p_r − y_r) / τ unknown (Eqs. 2-4)."""

    row: Tensor  # (H,) g_r
    ratios: Tensor  # (C,) (p_i − y_i) / (p_r − y_r)
    pull: Tensor  # (C,) W g_r
    bias: Tensor  # (C,)
    temperature: float
    family: Family
    precision: float  # rounding unit of the client's arithmetic
    noise: float  # relative distance of ∇W from rank one
    sign: int  # of s where non-negative features tell it, else 0

    @property
    def free(self) -> int:
        """Entries of the label that the family lets differ from the rest."""
        return 2 if self.family == "mixup" else 1

    def probabilities(self, errors: Tensor) -> Tensor:
        """p at each guess of s: (n,) -> (n, C)."""
        return softmax((self.pull / errors[:, None] + self.bias) / self.temperature, 1)

    def labels(self, errors: Tensor) -> Tensor:
        """ŷ at each guess of s (Eq. 4): (n,) -> (n, C)."""
        return self.probabilities(errors) - self.temperature * errors[:, None] * self.ratios


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """Local solutions, the best first."""

    errors: Tensor  # (n,) s
    labels: Tensor  # (n, C)
    residuals: Tensor  # (n,) distance from the family's shape, relative to the gradient's
    floors: Tensor  # (n,) what rounding and noise alone would leave of it
    spreads: Tensor  # (n,) what the noise may change in s, and so in the feature, relative
    error_bars: Tensor  # (n,) what it may thereby change in the label, L1
    read: bool = False  # off the bias, without the family's help


def scalar_problem(head: Head, temperature: float, family: Family, row: int) -> ScalarProblem:
    """∇W as the outer product nearest to it, (p − y)/(p_r − y_r) times g_r, by one power iteration from its row r; float64."""
    assert head.weight_gradient is not None
    gradient = head.weight_gradient.double()
    chosen = gradient[row]
    ratios = gradient @ chosen / (chosen @ chosen)  # (C,) g_i / g_r
    chosen = ratios @ gradient / (ratios @ ratios)  # (H,) every row's word on g_r
    ratios = gradient @ chosen / (chosen @ chosen)
    return ScalarProblem(
        row=chosen,
        ratios=ratios,
        pull=head.weight.double() @ chosen,
        bias=torch.zeros_like(ratios) if head.bias is None else head.bias.double(),
        temperature=temperature,
        family=family,
        precision=torch.finfo(head.weight.dtype).eps,
        noise=_off_rank_one(gradient, ratios, chosen),
        sign=int(chosen.sum().sign()) if head.non_negative else 0,
    )


def _off_rank_one(gradient: Tensor, ratios: Tensor, chosen: Tensor) -> float:
    """‖∇W − r gᵀ‖ / ‖∇W‖, by ‖∇W‖² − ‖r‖²‖g‖² as r projects; where that is lost in rounding, entry by entry."""
    flat = gradient.flatten()
    whole = float(flat @ flat)
    share = 1 - float(ratios @ ratios) * float(chosen @ chosen) / whole
    if share > 1e-14:
        return share**0.5
    return float(torch.linalg.vector_norm(gradient - torch.outer(ratios, chosen))) / whole**0.5


def solve(head: Head, temperature: float, family: Family, use_bias: bool) -> tuple[ScalarProblem, Candidates]:
    """The scalar of a single sample: off the bias where it is shared and may be used, else by the label's family."""
    assert head.weight_gradient is not None
    if use_bias and head.bias_gradient is not None and (read := read_from_bias(head, temperature, family)) is not None:
        return read
    problem = scalar_problem(head, temperature, family, int(torch.linalg.vector_norm(head.weight_gradient, dim=1).argmax()))
    return problem, grid_search(problem)


def read_from_bias(head: Head, temperature: float, family: Family) -> tuple[ScalarProblem, Candidates] | None:
    """s from ∇b = (p − y)/τ, in which the feature has no part; nothing where the rows of ∇W do not go as the entries of ∇b.

    A pruned or noisy bias gradient does not agree with the rows, which then have to tell s by themselves.
    """
    assert head.weight_gradient is not None
    assert head.bias_gradient is not None
    gradient, seen = head.weight_gradient.double(), head.bias_gradient.double()
    size = float(seen @ seen)
    feature = seen @ gradient / max(size, 1e-300)  # (H,)
    errors = gradient @ feature / (feature @ feature)  # (C,) (p − y)/τ as all rows have it
    mismatch = float(torch.linalg.vector_norm(seen - errors)) / max(size, 1e-300) ** 0.5
    if not mismatch < BELIEVED:
        return None
    error = float(seen[seen.abs().argmax()])
    problem = ScalarProblem(
        row=error * feature,
        ratios=errors / error,
        pull=error * (head.weight.double() @ feature),
        bias=torch.zeros_like(errors) if head.bias is None else head.bias.double(),
        temperature=temperature,
        family=family,
        precision=torch.finfo(head.weight.dtype).eps,
        noise=_off_rank_one(gradient, errors, feature),
        sign=0,
    )
    return problem, _read(problem, error, mismatch + problem.noise + problem.precision)


def _read(problem: ScalarProblem, error: float, spread: float) -> Candidates:
    """The one candidate that the bias leaves, and how far it is from the family: in floats, as there is but one."""
    errors = problem.ratios.new_tensor([error, error * math.exp(min(spread, 0.5))])
    labels = problem.labels(errors)  # (2, C)
    label, scale = labels[:1], abs(problem.temperature * error)
    bar = float((labels[1] - labels[0]).abs().sum())
    misfit = float(torch.linalg.vector_norm(_off_family(label.clone(), _largest(label, problem.free), problem)))
    largest_logit = float((problem.pull / error + problem.bias).abs().amax())
    floor = bar + problem.precision * (2 + 4 * largest_logit)  # of the label itself
    residuals, floors, spreads, bars = problem.ratios.new_tensor([misfit / scale, floor / scale, spread, bar])[:, None]
    return Candidates(errors=errors[:1], labels=label, residuals=residuals, floors=floors, spreads=spreads, error_bars=bars, read=True)


def grid_search(problem: ScalarProblem) -> Candidates:
    """Every guess of a grid at once, then Gauss-Newton from the grid's local minima.

    The residual is relative, (ŷ off the family) / (s τ): the plain variance also vanishes as s → 0, where the softmax
    saturates and any label can be explained.
    """
    size = _sizes(problem)
    errors = torch.stack([sign * size for sign in ((problem.sign,) if problem.sign else (1, -1))])  # (signs, 3 POINTS)
    step = max(1, CHUNK // len(problem.pull))
    values = torch.cat([_distance(problem, part) for part in errors.flatten().split(step)]).reshape(errors.shape)
    lowest = _is_local_minimum(values)
    starts = torch.cat([errors[lowest][values[lowest].argsort()[:POLISHED]], _fitting(problem, errors, values)])
    errors, residuals, slopes = _polished(problem, starts)
    labels = problem.labels(errors)
    plausible = (labels.amin(1) > -1e-3) & (labels.amax(1) < 1 + 1e-3)
    order = torch.where(plausible, residuals, residuals + residuals.max() + 1).argsort()
    order = order[: max(1, int(plausible.sum()))]
    floors = _noise_floors(problem, errors[order], labels[order])
    return _candidates(problem, errors[order], residuals[order], floors, floors / slopes[order].clamp_min(1e-300))


def verdict(found: Candidates, problem: ScalarProblem) -> tuple[Outcome, str]:
    """Whether the best candidate fits, and whether it alone does."""
    label, bar, residual = found.labels[0], float(found.error_bars[0]), float(found.residuals[0])
    if found.read and residual > 10 * float(found.floors[0]):
        return Outcome.PARTIAL, f"the bias tells the feature, but the label is no {problem.family} one: was the gradient scaled?"
    if not found.read and residual > UNEXPLAINED:
        return Outcome.PARTIAL, f"no scalar makes a {problem.family} label of this gradient; the nearest is taken"
    if len(found.errors) > 1:
        fits = found.residuals <= torch.maximum(found.floors, 2 * found.residuals[0])
        rivals = int((fits & ((found.labels - label).abs().sum(1) > DISTINCT)).sum())
        if rivals:
            return Outcome.AMBIGUOUS, f"{rivals + 1} scalars with different labels fit the gradient within its noise"
    if bar > BLURRED:
        return Outcome.AMBIGUOUS, f"a range of scalars fits the gradient within its noise; the label may be off by {bar:.2g} (L1)"
    return Outcome.COMPLETED, ""


def _candidates(problem: ScalarProblem, errors: Tensor, residuals: Tensor, floors: Tensor, spreads: Tensor) -> Candidates:
    labels, shifted = problem.labels(torch.cat([errors, errors * spreads.clamp_max(0.5).exp()])).chunk(2)
    bars = (shifted - labels).abs().sum(1)
    return Candidates(errors=errors, labels=labels, residuals=residuals, floors=floors, spreads=spreads, error_bars=bars)


def _sizes(problem: ScalarProblem) -> Tensor:
    """|s| from its largest, 1/τ, down to `SMALLEST`: (3 POINTS,).

    Logits grow as 1/s and the softmax turns when they change by about one: where their range is between `GENTLE` and
    `SATURATED` the steps are even in 1/s, elsewhere even in log s.
    """
    spread = max(float(problem.pull.max() - problem.pull.min()), 1e-300)
    gentle, saturated = (min(max(limit / spread, 1.0), 1 / SMALLEST) for limit in (GENTLE, SATURATED))
    options: dict[str, Any] = {"dtype": torch.float64, "device": problem.pull.device}
    inverse = [
        torch.logspace(0, math.log10(gentle), POINTS, **options),
        torch.linspace(gentle, saturated, POINTS, **options),
        torch.logspace(math.log10(saturated), -math.log10(SMALLEST), POINTS, **options),
    ]
    return 1 / (problem.temperature * torch.cat(inverse))


def _fitting(problem: ScalarProblem, errors: Tensor, values: Tensor) -> Tensor:
    """A few of the grid's guesses that fit within the noise as they are: where there is a range of them, it shows."""
    guesses = errors[values <= 1e-6 * problem.ratios.square().sum()]
    if len(guesses) < 3:  # no range, but the neighbours of a sharp minimum
        return guesses[:0]
    distances = _residual(problem, guesses)[0].norm(dim=1)
    guesses = guesses[distances <= _noise_floors(problem, guesses, problem.labels(guesses))]
    return guesses[:: max(1, len(guesses) // POLISHED)]


def _is_local_minimum(values: Tensor) -> Tensor:
    """Lower than both neighbours, and by more than rounding than one of them: a plateau counts at its edge alone."""
    padded = torch.nn.functional.pad(values, (1, 1), value=torch.inf)
    left, right = padded[:, :-2], padded[:, 2:]
    return (values <= left) & (values <= right) & (values < (1 - 1e-6) * torch.maximum(left, right))


def _distance(problem: ScalarProblem, errors: Tensor) -> Tensor:
    """‖R‖² at each guess of s, for the grid: (n,) -> (n,)."""
    shape = _shape(problem, problem.probabilities(errors), (problem.temperature * errors)[:, None])
    rest = shape.scatter_(1, _largest(shape, problem.free), 0)
    squares = rest.square().sum(1)
    if problem.family == "smoothing":
        squares = squares - rest.sum(1).square() / (rest.shape[1] - 1)
    return squares


def _largest(shape: Tensor, count: int) -> Tensor:
    """Indices of each row's largest entries: (n, count)."""
    return shape.argmax(1, keepdim=True) if count == 1 else shape.topk(count, dim=1).indices


def _shape(problem: ScalarProblem, probabilities: Tensor, scale: Tensor) -> Tensor:
    """ŷ/(|s| τ): (n, C)."""
    return torch.addcmul(probabilities / scale.abs(), problem.ratios, scale.sign(), value=-1)


def _residual(problem: ScalarProblem, errors: Tensor) -> tuple[Tensor, Tensor]:
    """R = ŷ/(|s| τ) without the entries that the family leaves free, and dR/d log|s|: (n, C) each.

    Smoothing leaves the largest entry free and wants the rest equal; one-hot wants the rest zero; mixup leaves two free
    and wants the rest zero.
    """
    scale = (problem.temperature * errors)[:, None]
    probabilities = problem.probabilities(errors)
    shape = _shape(problem, probabilities, scale)
    free = _largest(shape, problem.free)
    growth = problem.pull / scale
    mean = (probabilities * growth).sum(1, keepdim=True)
    change = (mean - 1 - growth).mul_(probabilities).div_(scale.abs())
    return _off_family(shape, free, problem), _off_family(change, free, problem)


def _off_family(entries: Tensor, free: Tensor, problem: ScalarProblem) -> Tensor:
    entries = entries.scatter_(1, free, 0)
    if problem.family == "smoothing":
        entries = (entries - entries.sum(1, keepdim=True) / (entries.shape[1] - problem.free)).scatter_(1, free, 0)
    return entries


def _polished(problem: ScalarProblem, errors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gauss-Newton in log|s| from every start at once, until none moves: (n,) s, residuals and slopes ‖dR/d log|s|‖."""
    best, lowest, best_slope = errors, torch.full_like(errors, torch.inf), torch.zeros_like(errors)
    settled = False
    for _ in range(POLISHINGS):
        residual, change = _residual(problem, errors)
        value, steepness = residual.norm(dim=1), change.norm(dim=1)
        better = value < lowest
        best, lowest = torch.where(better, errors, best), torch.where(better, value, lowest)
        best_slope = torch.where(better, steepness, best_slope)
        if settled:
            break
        move = ((residual * change).sum(1) / -steepness.square().clamp_min(1e-300)).clamp(-0.05, 0.05)
        settled = float(move.abs().max()) < SETTLED
        errors = errors * move.exp()
        errors = errors.sign() * errors.abs().clamp(0.1 * SMALLEST / problem.temperature, 1 / problem.temperature)
    return best, lowest, best_slope


def _noise_floors(problem: ScalarProblem, errors: Tensor, labels: Tensor) -> Tensor:
    """‖R‖ that a true s keeps: the client's rounding of logits, p and y, entry by entry, and what is not of rank one: (n,)."""
    logits = problem.pull / errors[:, None] + problem.bias
    sizes = problem.probabilities(errors) * (2 + 4 * logits.abs().amax(1, keepdim=True)) + labels.abs()
    spread = sizes.scatter(1, _largest(labels, problem.free), 0).norm(dim=1) * problem.precision
    others = problem.ratios.scatter(0, problem.ratios.abs().argmax(), 0).norm()
    return spread / (problem.temperature * errors).abs() + problem.noise * others
