"""Soft labels of a single sample, from one scalar."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Generator, Tensor

from dosimeter.head import Head, find_head
from dosimeter.interfaces import LabelRecovery
from dosimeter.labels.idlg import against_the_others
from dosimeter.labels.scalar_search import Candidates, Family, ScalarProblem, grid_search, published_search
from dosimeter.losses import CrossEntropy
from dosimeter.registry import LABELS
from dosimeter.types import Exposure, Knowledge, LabelEstimate, Outcome, Refused

DISTINCT = 1e-2  # labels further apart than this (L1) are different answers
UNEXPLAINED = 1e-2  # relative distance from the family beyond which the answer is none
CERTAIN = 1e-3  # error bar of a certified label


@LABELS.register("soft_scalar")
@dataclass(frozen=True, kw_only=True)
class SoftScalar(LabelRecovery):
    """Recovers the soft label of a single sample by a search over one scalar, without any bias.

    "Towards Eliminating Hard Label Constraints in Gradient Inversion Attacks", ICLR 2024: Eqs. (2)-(5). The gradient of
    one sample is (p − y) fᵀ, so that each of its rows is the feature times an unknown scalar, and the label a function of
    that scalar; the label's `family` (smoothing, mixup or one_hot) tells the right one.
    `search="published"`: L-BFGS from ±1 on 1000 × the variance of Eq. (5), then a particle swarm (500 × 40) over windows
    that widen to the paper's bound of 100 (the paper does not give the others); guesses are tried one at a time.
    Departures of `search="grid"`, the default: all guesses of a logarithmic grid in one batch, polished by Gauss-Newton;
    the distance from the family is taken relative to the scalar, since the variance also vanishes where the softmax
    saturates; mixup and one-hot want the other entries to be zero and not only equal; ratios of rows come from whole
    rows, not one coordinate; non-negative features give the scalar's sign; labels with negative entries are dropped.
    `soft` is the label that the loss aimed at, smoothing included. Where several scalars, or a range, fit within the
    gradient's noise, the outcome is ambiguous and says so; `certified` where the noise cannot change the label by 1e-3.
    `details`: scalar (λ_r), features (1, H), error_bar (L1).
    """

    needs = frozenset({Knowledge.HEAD_GRADIENT, Knowledge.SINGLE_SAMPLE, Knowledge.SOFTMAX_LOSS})

    family: Family = "smoothing"
    search: Literal["grid", "published"] = "grid"

    def __call__(self, exposure: Exposure, rng: Generator) -> LabelEstimate:
        head, loss = find_head(exposure), exposure.public.loss
        assert head.weight_gradient is not None
        if not isinstance(loss, CrossEntropy):
            raise Refused(f"soft_scalar solves the gradient of cross-entropy, (p − y)/τ; the client trains with {loss.name}")
        if head.classes < 3:
            raise Refused(f"soft_scalar needs at least 3 classes to compare, got {head.classes}")
        gradient = head.weight_gradient.double()
        row = int(gradient.sum(1).abs().argmax())
        if not bool(gradient[row].any()):
            return _nothing_to_read(head)
        problem = _problem(head, gradient, row, loss.temperature, self.family)
        if self.search == "grid":
            found = grid_search(problem)
        else:
            largest = gradient[row].abs().argmax()
            found = published_search(problem, gradient[:, largest] / gradient[row, largest], rng)
        return _estimate(found, problem, gradient, head)


def _problem(head: Head, gradient: Tensor, row: int, temperature: float, family: Family) -> ScalarProblem:
    chosen = gradient[row]  # (H,) g_r
    ratios = gradient @ chosen / chosen.square().sum()  # (C,) g_i / g_r
    off_rank_one = (gradient - ratios[:, None] * chosen).norm() / gradient.norm()
    bias = torch.zeros_like(ratios) if head.bias is None else head.bias.double()
    return ScalarProblem(
        row=chosen,
        ratios=ratios,
        pull=head.weight.double() @ chosen,
        bias=bias,
        temperature=temperature,
        family=family,
        precision=torch.finfo(head.weight.dtype).eps,
        noise=float(off_rank_one),
        sign=int(chosen.sum().sign()) if head.non_negative else 0,
    )


def _estimate(found: Candidates, problem: ScalarProblem, gradient: Tensor, head: Head) -> LabelEstimate:
    label, bar = found.labels[0], float(found.error_bars[0])
    fits = found.residuals <= torch.maximum(found.floors, 2 * found.residuals[0])
    rivals = int((fits & ((found.labels - label).abs().sum(1) > DISTINCT)).sum())
    outcome, message = Outcome.COMPLETED, ""
    if float(found.residuals[0]) > UNEXPLAINED:
        outcome, message = Outcome.PARTIAL, f"no scalar makes a {problem.family} label of this gradient; the nearest is taken"
        if problem.family == "one_hot":  # the softmax saturates; the sign rule still names the label, though no feature
            label = torch.zeros_like(label).index_fill(0, against_the_others(gradient).argmax(), 1)
            message = "the prediction is the label to rounding: the row that points against the others names it, the scalar is unknown"
    elif rivals:
        outcome, message = Outcome.AMBIGUOUS, f"{rivals + 1} scalars with different labels fit the gradient within its noise"
    elif bar > DISTINCT:
        outcome, message = (
            Outcome.AMBIGUOUS,
            f"a range of scalars fits the gradient within its noise; the label may be off by {bar:.2g} (L1)",
        )
    features = problem.row[None] / found.errors[0]
    winner = label.argmax()
    assert head.weight_gradient is not None
    return LabelEstimate(
        counts=torch.zeros_like(label, dtype=torch.long).index_fill(0, winner, 1),
        labels=winner[None],
        soft=label[None].to(head.weight_gradient.dtype),
        scores=label,
        certified=outcome is Outcome.COMPLETED and bar < CERTAIN,
        outcome=outcome,
        message=message,
        details={"scalar": 1 / found.errors[0], "features": features, "error_bar": found.error_bars[0]},
    )


def _nothing_to_read(head: Head) -> LabelEstimate:
    """A gradient of zero: the prediction is the label, and neither shows."""
    assert head.weight_gradient is not None
    counts = torch.zeros(head.classes, dtype=torch.long, device=head.weight.device)
    counts[0] = 1
    return LabelEstimate(
        counts=counts,
        labels=torch.zeros(1, dtype=torch.long, device=counts.device),
        outcome=Outcome.SINGULAR,
        message="the head's gradient is zero: the model predicts the label exactly, and nothing tells which it is",
    )
