"""What the scalar's candidates prove: whether the best one fits, whether it alone does, and whether the protocol allows a proof."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dosimeter.client.training import FedSGD, sends_one_gradient
from dosimeter.engines.scalar.problem import Candidates, ScalarProblem
from dosimeter.interfaces import Defense, Public
from dosimeter.types import Outcome

LARGEST_ERROR_BAR = 1e-3  # of what is certified: of a label in L1, of a feature relative
DISTINCT = 1e-3  # labels further apart than this (L1) are different answers
BLURRED = 1e-2  # error of the label (L1) from which on a range of scalars fits
UNEXPLAINED = 1e-2  # distance from the family beyond which no scalar fits, where the noise is unknown
NOISE_FACTOR = 10.0  # times the noise's residual: up to there a scalar fits
VISIBLE_ROW = 100.0  # times the noise's residual: a row of that size can check a scalar
RANK_ONE = 16.0  # units of rounding: a gradient further from rank one is not one sample's, or not of one step
SPARE_EQUATIONS = 2  # beyond the one that finds the scalar: with fewer, a label of another family fits by chance


@dataclass(frozen=True, kw_only=True)
class ScalarVerdict:
    """What is known of the best candidate."""

    outcome: Outcome
    message: str
    explained: bool  # a label of the family fits the gradient
    doubt: str  # why nothing is certified, "" where nothing forbids it; part of the message
    label_certified: bool
    feature_certified: bool


def verdict(found: Candidates, problem: ScalarProblem, public: Public) -> ScalarVerdict:
    """Judge the best candidate: does it fit, does no other, and is the update one sample's gradient by the protocol?"""
    explained = _best_fits(found)
    outcome, message = (Outcome.PARTIAL, _message_of_misfit(found, problem)) if not explained else _uniqueness(found)
    doubt = doubt_of(public) or _refutation(found, problem, public)
    if doubt:
        outcome = Outcome.PARTIAL
    elif outcome is Outcome.COMPLETED and not found.read and _spare_equations(found, problem) < SPARE_EQUATIONS:
        doubt = f"too few rows of the gradient stand out of its noise to certify a {problem.family} label by, without the bias"
    sure = outcome is Outcome.COMPLETED and not doubt
    return ScalarVerdict(
        outcome=outcome,
        message="; ".join(filter(None, (doubt, message))),
        explained=explained,
        doubt=doubt,
        label_certified=sure and bool(found.error_bars[0] < LARGEST_ERROR_BAR),
        feature_certified=sure and bool(found.spreads[0] < LARGEST_ERROR_BAR),
    )


def doubt_of(public: Public) -> str:
    """Why the update may not be the gradient (p − y) fᵀ of one sample; "" where nothing declared speaks against it.

    A scaled or pruned gradient equals another label's gradient. Without the bias they cannot be told apart. With it, a scaled label
    still looks like a smoothed one where the head predicts all classes alike.
    """
    changing = ", ".join(defense.name for defense in public.defenses if _changes_values(defense))
    if changing:
        return f"a guess only: {changing} changes the gradient's values, and the label that fits them is then another"
    if not sends_one_gradient(public.training):
        return f"a guess only: the update sums gradients of {public.training.name}'s local steps, which is not (p − y) fᵀ"
    return ""


def _refutation(found: Candidates, problem: ScalarProblem, public: Public) -> str:
    """Why the gradient itself shows that it is not (p − y) fᵀ of a label y; "" where it does not.

    Local steps that nobody declared sum gradients of different features, and a second sample adds its own. Neither sum has rank one, nor
    rows that are multiples of the bias gradient. Steps with one feature sum to a label with negative entries.
    A declared difference of weights is rounded as the weights are, so that its distance from rank one tells nothing.
    """
    rounding = RANK_ONE * problem.precision
    if isinstance(public.training, FedSGD) and problem.noise > rounding:
        return "a guess only: the gradient has not rank one to its rounding, so it is not one gradient of one sample"
    if isinstance(public.training, FedSGD) and found.read and found.spreads[0] - problem.noise - problem.precision > rounding:
        return "a guess only: the rows are no multiples of the bias gradient to rounding, so the two are not one gradient of one sample"
    if float(found.labels[0].min()) < -NOISE_FACTOR * max(float(found.error_bars[0]), problem.precision):
        return f"a guess only: the label that fits has an entry of {float(found.labels[0].min()):.2g}"
    return ""


def _changes_values(defense: Defense) -> bool:
    """Whether the gradient of what the client trains on is sent with other values; defenses of data and model change what it is of."""
    return defense.side in ("training", "update") and (defense.distorts() or defense.scaling() != "none")


def _best_fits(found: Candidates) -> bool:
    residual, floor = float(found.residuals[0]), float(found.floors[0])
    return residual <= (UNEXPLAINED if np.isnan(floor) else NOISE_FACTOR * floor)


def _message_of_misfit(found: Candidates, problem: ScalarProblem) -> str:
    if found.read:
        return f"the bias tells the feature, but the label is no {problem.family} one: was the gradient scaled?"
    return f"no scalar makes a {problem.family} label of this gradient; the nearest is taken"


def _spare_equations(found: Candidates, problem: ScalarProblem) -> int:
    """How many of the family's zeros or equal entries are left to check the scalar.

    Rows of noise check nothing. A confident head's gradient may be two opposite rows, which fit any label.
    """
    visible = int((np.abs(problem.ratios) > VISIBLE_ROW * found.floors[0]).sum())
    return visible - problem.free - (2 if problem.family == "smoothing" else 1)


def _uniqueness(found: Candidates) -> tuple[Outcome, str]:
    if len(found.errors) > 1:
        fits = found.residuals <= np.maximum(NOISE_FACTOR * found.floors, 2 * found.residuals[0])
        rivals = int((fits & (np.abs(found.labels - found.labels[0]).sum(1) > DISTINCT)).sum())
        if rivals:
            return Outcome.AMBIGUOUS, f"{rivals + 1} scalars with different labels fit the gradient within its noise"
    blur = float(found.blurs[0])
    if blur > BLURRED:
        return Outcome.AMBIGUOUS, f"a range of scalars fits the gradient within its noise; the label may be off by {blur:.2g} (L1)"
    return Outcome.COMPLETED, ""
