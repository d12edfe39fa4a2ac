"""Soft labels of a single sample, from one scalar."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Generator

from dosimeter.client.losses import CrossEntropy
from dosimeter.engines.counting.counts import nothing_to_read
from dosimeter.engines.scalar.problem import Candidates, Family, ScalarProblem, on_host, scalar_problem
from dosimeter.engines.scalar.search import solve
from dosimeter.engines.scalar.swarm_search import published_search
from dosimeter.engines.scalar.verdict import verdict
from dosimeter.interfaces import Exposure, LabelRecovery, Public
from dosimeter.labels.idlg import against_the_others
from dosimeter.network.head import Head, find_head
from dosimeter.registry import LABELS
from dosimeter.types import Knowledge, LabelEstimate, Refused


@LABELS.register("soft_scalar")
@dataclass(frozen=True, kw_only=True)
class SoftScalar(LabelRecovery):
    """Recovers the soft label of a single sample by a search over one scalar, without any bias.

    "Towards Eliminating Hard Label Constraints in Gradient Inversion Attacks", ICLR 2024: Eqs. (2)-(5). The gradient of
    one sample is (p − y) fᵀ, so that each of its rows is the feature times an unknown scalar, and the label a function of
    that scalar; the label's `family` (smoothing, mixup or one_hot) tells the right one.
    `search="published"`: L-BFGS from ±1 on 1000 × the variance of Eq. (5), then a particle swarm (500 × 40) over windows
    ever further out, with the constants of the released code; guesses are tried one at a time.
    Departures of `search="grid"`, the default: where the head's bias gradient is shared and agrees with the rows it is
    p − y itself, so that the scalar is read off and the family only checked (`use_bias=False`: the weight alone, as in the
    paper); else all guesses of a grid in one batch, polished by Gauss-Newton;
    the distance from the family is taken relative to the scalar, since the variance also vanishes where the softmax
    saturates; mixup and one-hot want the other entries to be zero and not only equal; ratios of rows come from whole
    rows, not one coordinate; non-negative features give the scalar's sign; labels with negative entries are dropped.
    `soft` is the label that the loss aimed at, smoothing included. Where several scalars, or a range, fit within the
    gradient's noise, the outcome is ambiguous and says so; `certified` where the noise cannot change the label by 1e-3. The
    certificate holds if the label is of the family and the gradient as the training made it: a declared defense that changes
    values leaves none, and scaling that nobody declares cannot be seen without the bias, nor by a head that predicts all
    classes alike. Without the bias smoothing and mixup need 5 rows that stand out of the noise to be certified, one_hot 4:
    fewer leave nothing to check the family by.
    `details`: scalar (λ_r), features (1, H), error_bar (L1).
    """

    needs = frozenset({Knowledge.HEAD_GRADIENT, Knowledge.SINGLE_SAMPLE, Knowledge.SOFTMAX_LOSS})

    family: Family = "smoothing"
    search: Literal["grid", "published"] = "grid"
    use_bias: bool = True

    def __call__(self, exposure: Exposure, rng: Generator) -> LabelEstimate:
        head, loss = find_head(exposure), exposure.public.loss
        assert head.weight_gradient is not None
        if not isinstance(loss, CrossEntropy):
            raise Refused(f"soft_scalar solves the gradient of cross-entropy, (p − y)/τ; the client trains with {loss.name}")
        if head.classes < 3:
            raise Refused(f"soft_scalar needs at least 3 classes to compare, got {head.classes}")
        if not bool(head.weight_gradient.any()):
            return nothing_to_read(head.weight_gradient, 1)
        if self.search == "published":
            found = _published(head, loss.temperature, self.family, rng)
        else:
            found = solve(head, loss.temperature, self.family, self.use_bias)
        return _estimate(*found, head, exposure.public)


def _published(head: Head, temperature: float, family: Family, rng: Generator) -> tuple[ScalarProblem, Candidates]:
    assert head.weight_gradient is not None
    gradient = on_host(head.weight_gradient)
    row = int(np.abs(gradient.sum(1)).argmax())
    problem = scalar_problem(head, gradient, temperature, family, row)
    largest = np.abs(gradient[row]).argmax()
    return problem, published_search(problem, gradient[:, largest] / np.float64(gradient[row, largest]), rng)


def _estimate(problem: ScalarProblem, found: Candidates, head: Head, public: Public) -> LabelEstimate:
    gradient = head.weight_gradient
    assert gradient is not None
    label = torch.from_numpy(found.labels[0]).to(gradient.device)
    judged = verdict(found, problem, public)
    message = judged.message
    if not judged.explained and problem.family == "one_hot" and not found.read:
        # Where the softmax saturates, signs still name the label, though no feature.
        against = against_the_others(gradient)
        label = torch.zeros_like(label).index_fill(0, against.argmax(), 1)
        message = "no scalar makes a one-hot label of this gradient; the one row that points against the others names the class"
        if int((against > 0).sum()) > 1:
            message = f"no one-hot label fits: {int((against > 0).sum())} rows point against the others, the longest of which is taken"
        message = "; ".join(filter(None, (judged.doubt, message)))
    winner, error, error_bar = label.argmax(), float(found.errors[0]), float(found.error_bars[0])
    return LabelEstimate(
        counts=torch.zeros_like(label, dtype=torch.long).index_fill_(0, winner, 1),
        labels=winner[None],
        soft=label[None].to(gradient.dtype),
        scores=label,
        certified=judged.label_certified,
        outcome=judged.outcome,
        message=message,
        details={
            "scalar": label.new_tensor(1 / error),
            "features": torch.from_numpy(problem.row / error)[None].to(gradient.device),
            "error_bar": label.new_tensor(error_bar),
        },
    )
