"""The equations of an exposure's head: what its loss, its training and its defenses mean for the subspace method."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Generator, Tensor
from torch.nn.functional import one_hot

from dosimeter.client.losses import CrossEntropy
from dosimeter.client.training import FedSGD, sends_mean_gradient
from dosimeter.engines.subspace.certificate import PAIR_FREEDOM
from dosimeter.engines.subspace.distortion import distortion_of, missing_noise, unmodelled
from dosimeter.engines.subspace.equations import Equations, build_equations, mean_coordinates
from dosimeter.engines.subspace.search import search_from_extreme_rows
from dosimeter.engines.subspace.separate import Effort, separate, spare_equations
from dosimeter.engines.subspace.smoothing import estimate_smoothing, with_smoothing
from dosimeter.engines.subspace.spectrum import factor, follows_rounding_of, rounding_unit
from dosimeter.engines.subspace.verdict import BatchFacts, Separation
from dosimeter.engines.weight_rounding import rounding_of_weights
from dosimeter.interfaces import Defense, Exposure, Public
from dosimeter.network.head import Head
from dosimeter.types import LabelEstimate, Refused

Targets = Literal["any", "declared", "smoothed", "mixed"]


def separate_head(
    exposure: Exposure,
    head: Head,
    labels: LabelEstimate | None,
    rng: Generator,
    *,
    method: str,
    attempts: int,
    starts: int,
    targets: Targets = "any",
) -> Separation:
    """Take an exposure's head gradient apart, with labels known, partly known or unknown.

    `targets` says what the samples aim at. "declared": the labels, as the loss and the defenses soften them. "smoothed": labels
    smoothed by an undeclared strength. "mixed": blends of two classes. "any": whichever of these certifies most samples; each is tried
    only if the ones before leave half of the gradient uncertified.
    """
    public = exposure.public
    gradient = _as_double(head.weight_gradient)
    assert gradient is not None
    bias_gradient = None if scaled_by_layer(public) else _as_double(head.bias_gradient)
    equations = _equations(exposure, head, gradient, bias_gradient, rng, method=method)
    problem = _Problem(
        equations=equations,
        gradient=gradient,
        bias_gradient=bias_gradient,
        labels=labels,
        facts=BatchFacts(batch_size=public.batch_size, free_scale=may_be_scaled(public), non_negative=head.non_negative),
        effort=Effort(attempts=attempts, starts=starts),
        rng=rng,
    )
    if any(defense.pairs_labels for defense in public.defenses):
        targets = "mixed"
    if targets == "any" and distortion_of(gradient, public) is not None:
        targets = "declared"  # a distorted gradient fits any kind of target
    result = _separate_any_targets(problem) if targets == "any" else problem.separate(targets)
    if doubt := doubt_of(equations, gradient, public):
        result = replace(result, certified=torch.zeros_like(result.certified), doubt=doubt)
    return result


def doubt_of(equations: Equations, gradient: Tensor, public: Public) -> str:
    """Why the update (C, H) is no proof, whatever fits it: what is declared forbids one, or the update refutes what is declared."""
    if not sends_mean_gradient(public):
        return f"the update sums gradients of {public.training.name}'s local steps"
    if changing := unmodelled(gradient, public):
        return f"{changing} changes the gradient's entries in a way that is not modelled"
    if equations.spectrum.crowded:
        return f"the gradient has more dimensions than the {public.batch_size} samples declared, and no independent noise explains them"
    if isinstance(public.training, FedSGD) and follows_rounding_of(equations.weight, gradient, equations.spectrum):
        return "the update is rounded as the weights are: it is a difference of weights, and may sum several steps"
    return missing_noise(gradient, public)


def find_sure_samples(exposure: Exposure, head: Head, rng: Generator, *, method: str) -> tuple[Tensor, Tensor]:
    """Features (n, H) and labels (n,) of the samples that extreme rows lead to.

    Where the head is confident these are most samples, and they take about a second. Each solves its equations up to the noise, but
    none is certified.
    """
    gradient, bias_gradient = _as_double(head.weight_gradient), _as_double(head.bias_gradient)
    assert gradient is not None
    equations = _equations(exposure, head, gradient, bias_gradient, rng, method=method)
    found = search_from_extreme_rows(equations, non_negative=head.non_negative)
    return found.t @ equations.basis, found.labels


@dataclass(frozen=True, kw_only=True)
class _Problem:
    equations: Equations
    gradient: Tensor  # (C, H)
    bias_gradient: Tensor | None  # (C,)
    labels: LabelEstimate | None
    facts: BatchFacts
    effort: Effort
    rng: Generator

    def separate(
        self, targets: Targets, *, quick: bool = False, known: Separation | None = None, begun: Separation | None = None
    ) -> Separation:
        """The samples under one assumption about their targets. `begun` is a result under the same one."""
        equations, counts = self.equations, None
        if targets == "smoothed":
            equations = with_smoothing(equations, self.estimate_smoothing())
        if targets == "mixed":
            equations = replace(equations, blends=True)
        elif self.labels is not None:
            equations, counts = _apply_labels(equations, self.labels)
        effort = replace(self.effort, quick=quick)
        result = separate(
            equations, self.gradient, self.bias_gradient, self.facts, self.rng, effort=effort, counts=counts, known=known, begun=begun
        )
        return _add_soft_targets(equations, result)

    def estimate_smoothing(self) -> float:
        """The strength that explains the gradient best; the declared one where the rank leaves no equations to tell."""
        if not 0 < self.equations.rank < self.equations.classes - 1:
            return 1 - self.equations.share
        return estimate_smoothing(self.equations, mean_coordinates(self.equations, self.gradient, self.bias_gradient))


def _separate_any_targets(problem: _Problem) -> Separation:
    """The declared targets if they explain the gradient, else blends, else smoothing, else whichever certifies most samples."""
    declared = problem.separate("declared", quick=True)
    if declared.complete:
        return declared
    if problem.labels is not None or spare_equations(problem.equations) <= PAIR_FREEDOM:
        return problem.separate("declared", begun=declared)
    half = declared.rank / 2
    if _count_certified(declared) >= half:
        declared = problem.separate("declared", begun=declared)
        if declared.complete:
            return declared
    mixed = problem.separate("mixed", known=declared)
    if _count_certified(mixed) >= half:
        return max(declared, mixed, key=_count_certified)
    smoothed = problem.separate("smoothed", quick=True)
    if _count_certified(smoothed) >= half:
        return problem.separate("smoothed", begun=smoothed)
    return max(problem.separate("declared", begun=declared), mixed, smoothed, key=_count_certified)


def _count_certified(result: Separation) -> int:
    return int(result.certified.sum())


def _apply_labels(equations: Equations, labels: LabelEstimate) -> tuple[Equations, Tensor]:
    """The equations for given labels, and how often each label occurs. Soft labels become the equations' targets."""
    if labels.soft is None:
        return equations, labels.counts
    sums = labels.soft.sum(1)
    if bool(((sums - 1).abs() > 1e-3).any()):
        raise ValueError(f"labels: each soft label must sum to 1, got sums of {float(sums.min()):.3g} to {float(sums.max()):.3g}")
    rows, counts = labels.soft.to(equations.weight).unique(dim=0, return_counts=True)
    return replace(equations, targets=rows), counts


def _add_soft_targets(equations: Equations, found: Separation) -> Separation:
    """The separation with the soft targets that the loss aimed at, where these are not classes."""
    if equations.targets is not None:
        rows = equations.targets[found.labels]
        return replace(found, labels=rows.argmax(1), soft=equations.share * rows + equations.even)
    if found.soft is None and equations.share < 1:
        return replace(found, soft=equations.share * one_hot(found.labels, equations.classes) + equations.even)
    return found


def _equations(exposure: Exposure, head: Head, gradient: Tensor, bias_gradient: Tensor | None, rng: Generator, *, method: str) -> Equations:
    """The head's equations. Only a loss whose gradient at the logits is (softmax − target) up to a factor has them."""
    loss = exposure.public.loss
    if not isinstance(loss, CrossEntropy):
        raise Refused(f"{method} solves the gradient of cross-entropy, (p − y)/τ; the client trains with {loss.said()}")
    smoothing = loss.smoothing
    if loss.convention == "thesis":  # 1 − ε for the label and ε/(C − 1) for the others: PyTorch's smoothing with another ε
        smoothing = loss.smoothing * head.classes / max(head.classes - 1, 1)
    weight = _as_double(head.weight)
    assert weight is not None
    assert head.weight_gradient is not None
    return build_equations(
        factor(
            gradient,
            rounding_unit(head.weight_gradient),
            rng,
            at_most=exposure.public.batch_size,
            other=rounding_of_weights(head.weight, head.weight_gradient, exposure.public),
        ),
        weight,
        _as_double(head.bias),
        bias_gradient=bias_gradient,
        smoothing=smoothing,
        temperature=loss.temperature,
        model_unit=head.precision,
    )


def may_be_scaled(public: Public) -> bool:
    """Whether a defense in force, or a temperature, may have multiplied the gradient by a number that the server does not know."""
    return any(defense.scaling() != "none" for defense in public.defenses)


def scaled_by_layer(public: Public) -> bool:
    """Whether weight and bias gradient may have been scaled apart, so that they cannot be used together."""
    return any(defense.scaling() == "layers" for defense in public.defenses)


def counter_of(method: str, defense: Defense) -> str:
    """What the subspace method does by itself about a defense that distorts nothing, "" where it does nothing."""
    if defense.scaling() in ("update", "layers"):
        return f"{method} is free of the gradient's scale"
    return f"{method} takes samples of two labels apart" if defense.pairs_labels else ""


def _as_double(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().to(torch.float64)
