"""Soft labels of a single sample, from one scalar."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Generator

from dosimeter.client.losses import CrossEntropy
from dosimeter.engines.counting.counts import nothing_to_read
from dosimeter.engines.premises import premises_of
from dosimeter.engines.scalar.problem import Candidates, Family, ScalarProblem, on_host, scalar_problem
from dosimeter.engines.scalar.search import solve
from dosimeter.engines.scalar.swarm_search import FLIGHTS, SCALES, SWARM, Optimiser, PublishedSearch, Target, published_search
from dosimeter.engines.scalar.verdict import verdict
from dosimeter.interfaces import Exposure, LabelRecovery, Public
from dosimeter.labels.idlg import against_the_others
from dosimeter.network.head import Head, find_head
from dosimeter.options import OptionError, PositiveInt
from dosimeter.registry import LABELS
from dosimeter.types import Knowledge, LabelEstimate, Refused


@LABELS.register("soft_scalar")
@dataclass(frozen=True, kw_only=True)
class SoftScalar(LabelRecovery):
    """Recovers the soft label of a single sample by a search over one scalar, without any bias.

    Wang et al., "Towards Eliminating Hard Label Constraints in Gradient Inversion Attacks", ICLR 2024: Eqs. (2)-(5). In one sample's
    gradient (p − y) fᵀ each row is the feature times a scalar, which fixes the label; the right one is of the `family`.
    `search="published"`: L-BFGS, then a particle swarm, with the released code's constants. `optimiser` takes one of them alone, or Adam;
    `target` takes a loss of Appendix C in place of the variance; `particles=200, flights=30` is the paper's swarm.
    Departures of `search="grid"`: a shared bias gradient gives the scalar (`use_bias`), else a grid and Gauss-Newton. The distance from
    the family is relative to the scalar. Mixup and one-hot want zeros.
    `soft` is what the loss aimed at. `certified` holds for unchanged gradients of that family. `details`: scalar (λ_r), features (1,
    H), error_bar (L1).
    """

    needs = frozenset({Knowledge.HEAD_GRADIENT, Knowledge.SINGLE_SAMPLE, Knowledge.SOFTMAX_LOSS})

    family: Family = "smoothing"
    search: Literal["grid", "published"] = "grid"
    use_bias: bool = True
    optimiser: Optimiser = "lbfgs_and_swarm"  # of the published search, like the options below
    target: Target = "variance"
    particles: PositiveInt = SWARM
    flights: PositiveInt = FLIGHTS

    def __post_init__(self) -> None:
        super().__post_init__()
        plain = PublishedSearch()
        changed = [name for name in ("optimiser", "target", "particles", "flights") if getattr(self, name) != getattr(plain, name)]
        if changed and self.search != "published":
            raise OptionError(changed[0], f"expected only beside search = 'published', got search = {self.search!r}")

    def __call__(self, exposure: Exposure, rng: Generator) -> LabelEstimate:
        head, loss = find_head(exposure), exposure.public.loss
        assert head.weight_gradient is not None
        if not isinstance(loss, CrossEntropy):
            raise Refused(f"soft_scalar solves the gradient of cross-entropy, (p − y)/τ; the client trains with {loss.said()}")
        if head.classes < 3:
            raise Refused(f"soft_scalar needs at least 3 classes to compare, got {head.classes}")
        if not bool(head.weight_gradient.any()):
            return nothing_to_read(head.weight_gradient, 1)
        if self.search == "published":
            row = int(np.abs(on_host(head.weight_gradient).sum(1)).argmax())
            settings = PublishedSearch(optimiser=self.optimiser, target=self.target, particles=self.particles, flights=self.flights)
            found = _estimate(*_search_as_published(head, loss.temperature, self.family, row, rng, settings), head, exposure.public)
            unit = SCALES[self.family]  # the released code's λ is the unit times the scalar
            return replace(found, details={**found.details, "row": torch.tensor(row), "published_unit": torch.tensor(unit)})
        return _estimate(*solve(head, loss.temperature, self.family, self.use_bias), head, exposure.public)


def _search_as_published(
    head: Head, temperature: float, family: Family, row: int, rng: Generator, settings: PublishedSearch
) -> tuple[ScalarProblem, Candidates]:
    assert head.weight_gradient is not None
    gradient = on_host(head.weight_gradient)
    problem = scalar_problem(head, gradient, temperature, family, row)
    largest = np.abs(gradient[row]).argmax()
    pull = on_host(head.weight) @ gradient[row].astype(np.float64)
    return problem, published_search(problem, pull, gradient[:, largest] / np.float64(gradient[row, largest]), rng, settings)


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
