"""Soft labels of a single sample, from one scalar."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Generator

from dosimeter.client.losses import CrossEntropy
from dosimeter.engines.counting.counts import nothing_to_read
from dosimeter.engines.premises import premises_of
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

    Wang et al., "Towards Eliminating Hard Label Constraints in Gradient Inversion Attacks", ICLR 2024: Eqs. (2)-(5). In one sample's
    gradient (p − y) fᵀ each row is the feature times a scalar, which fixes the label; the right one is of the `family`.
    `search="published"`: L-BFGS, then a particle swarm, with the released code's constants.
    Departures of `search="grid"`: a shared bias gradient gives the scalar (`use_bias`), else a grid and Gauss-Newton. The distance from
    the family is relative to the scalar. Mixup and one-hot want zeros.
    `soft` is what the loss aimed at. `certified` holds for unchanged gradients of that family. `details`: scalar (λ_r), features (1,
    H), error_bar (L1).
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
            found = _search_as_published(head, loss.temperature, self.family, rng)
        else:
            found = solve(head, loss.temperature, self.family, self.use_bias)
        return _estimate(*found, head, exposure.public)


def _search_as_published(head: Head, temperature: float, family: Family, rng: Generator) -> tuple[ScalarProblem, Candidates]:
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
        premises=premises_of(public) if judged.label_certified else (),
        outcome=judged.outcome,
        message=message,
        details={
            "scalar": label.new_tensor(1 / error),
            "features": torch.from_numpy(problem.row / error)[None].to(gradient.device),
            "error_bar": label.new_tensor(error_bar),
        },
    )
