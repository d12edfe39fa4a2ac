"""An exposure's head as a separation problem: what the loss, the training and the defenses mean for the equations."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Generator, Tensor
from torch.nn.functional import one_hot

from dosimeter.client.losses import CrossEntropy
from dosimeter.client.training import sends_one_gradient
from dosimeter.engines.subspace.certificate import PAIR_FREEDOM
from dosimeter.engines.subspace.distortion import distortion_of
from dosimeter.engines.subspace.equations import Equations, build_equations, mean_coordinates
from dosimeter.engines.subspace.search import from_extremes
from dosimeter.engines.subspace.separate import determined, separate
from dosimeter.engines.subspace.smoothing import estimate_smoothing, with_smoothing
from dosimeter.engines.subspace.spectrum import factor, rounding_unit
from dosimeter.engines.subspace.verdict import Separation
from dosimeter.interfaces import Exposure, Public
from dosimeter.network.head import Head
from dosimeter.types import LabelEstimate, Refused

Targets = Literal["any", "declared", "smoothed", "mixed"]
SCALE_KEPT = frozenset({"gaussian_noise", "laplace_noise", "pruning", "quantisation", "low_rank", "bias_withheld", "bias_free_head"})


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

    `targets` says what the samples aim at: labels as the loss and the defenses `declared` have them, `smoothed` by a strength
    that nobody declares, `mixed` in pairs; `any`, whichever of these certifies most, the later ones tried only where those
    before leave half of the gradient uncertified.
    """
    public = exposure.public
    gradient = _in_double(head.weight_gradient)
    assert gradient is not None
    bias_gradient = None if scaled_by_layer(public) else _in_double(head.bias_gradient)
    equations = _equations(exposure, head, gradient, bias_gradient, rng, method=method)
    problem = _Problem(
        equations=equations,
        gradient=gradient,
        bias_gradient=bias_gradient,
        labels=labels,
        options={
            "batch_size": public.batch_size,
            "free_scale": may_be_scaled(public),
            "non_negative": head.non_negative,
            "rng": rng,
            "attempts": attempts,
            "starts": starts,
        },
    )
    if any(defense.name == "mixup" for defense in public.defenses):
        targets = "mixed"
    if targets == "any" and distortion_of(gradient, public) is not None:
        targets = "declared"  # what is spoilt looks like any target
    result = _whichever(problem) if targets == "any" else problem.separated(targets)
    if not sends_one_gradient(public.training):
        result = replace(result, certified=torch.zeros_like(result.certified))
    return result


def sure_samples(exposure: Exposure, head: Head, rng: Generator, *, method: str) -> tuple[Tensor, Tensor]:
    """Features (n, H) and labels (n,) of the samples that extreme rows lead to: in a second most of them, where the head is sure.

    Each solves its equations to the noise, which is no certificate.
    """
    gradient, bias_gradient = _in_double(head.weight_gradient), _in_double(head.bias_gradient)
    assert gradient is not None
    equations = _equations(exposure, head, gradient, bias_gradient, rng, method=method)
    found = from_extremes(equations, non_negative=head.non_negative)
    return found.t @ equations.basis, found.labels


@dataclass(frozen=True, kw_only=True)
class _Problem:
    equations: Equations
    gradient: Tensor  # (C, H)
    bias_gradient: Tensor | None  # (C,)
    labels: LabelEstimate | None
    options: dict[str, Any]  # of `separate`

    def separated(self, targets: Targets, **options: Any) -> Separation:
        """What one assumption about the targets leads to."""
        equations, counts = self.equations, None
        if targets == "smoothed":
            equations = with_smoothing(equations, self.smoothing())
        if targets == "mixed":
            equations = replace(equations, blends=True)
        elif self.labels is not None:
            equations, counts = _labelled(equations, self.labels)
        result = separate(equations, self.gradient, self.bias_gradient, counts=counts, **self.options, **options)
        return _with_targets(equations, result)

    def smoothing(self) -> float:
        if not 0 < self.equations.rank < self.equations.classes - 1:
            return 1 - self.equations.share
        return estimate_smoothing(self.equations, mean_coordinates(self.equations, self.gradient, self.bias_gradient))


def _whichever(problem: _Problem) -> Separation:
    """The declared targets where they explain the gradient; else blends, then smoothing, then whichever certifies most."""
    declared = problem.separated("declared", quick=True)
    if declared.complete:
        return declared
    if problem.labels is not None or determined(problem.equations) <= PAIR_FREEDOM:
        return problem.separated("declared")
    half = declared.rank / 2
    if _certified(declared) >= half:
        declared = problem.separated("declared")
        if declared.complete:
            return declared
    mixed = problem.separated("mixed", known=declared)
    if _certified(mixed) >= half:
        return max(declared, mixed, key=_certified)
    smoothed = problem.separated("smoothed", quick=True)
    if _certified(smoothed) >= half:
        return problem.separated("smoothed")
    return max(problem.separated("declared"), mixed, smoothed, key=_certified)


def _certified(result: Separation) -> int:
    return int(result.certified.sum())


def _labelled(equations: Equations, labels: LabelEstimate) -> tuple[Equations, Tensor]:
    """The equations with the labels that are given, and how often each occurs; soft ones are targets as they are."""
    if labels.soft is None:
        return equations, labels.counts
    sums = labels.soft.sum(1)
    if bool(((sums - 1).abs() > 1e-3).any()):
        raise ValueError(f"labels: each soft label must sum to 1, got sums of {float(sums.min()):.3g} to {float(sums.max()):.3g}")
    rows, counts = labels.soft.to(equations.weight).unique(dim=0, return_counts=True)
    return replace(equations, targets=rows), counts


def _with_targets(equations: Equations, found: Separation) -> Separation:
    """What the loss aimed at, where that is not simply a class."""
    if equations.targets is not None:
        rows = equations.targets[found.labels]
        return replace(found, labels=rows.argmax(1), soft=equations.share * rows + equations.even)
    if found.soft is None and equations.share < 1:
        return replace(found, soft=equations.share * one_hot(found.labels, equations.classes) + equations.even)
    return found


def _equations(exposure: Exposure, head: Head, gradient: Tensor, bias_gradient: Tensor | None, rng: Generator, *, method: str) -> Equations:
    """The head's equations; refuses losses whose gradient at the logits is not (softmax − target) up to a factor."""
    loss = exposure.public.loss
    if not isinstance(loss, CrossEntropy):
        raise Refused(f"{method} solves the gradient of cross-entropy, (p − y)/τ; the client trains with {loss.name}")
    smoothing = loss.smoothing
    if loss.convention == "thesis":  # 1 − ε for the label, ε/(C − 1) for the others, is PyTorch's with another ε
        smoothing = loss.smoothing * head.classes / max(head.classes - 1, 1)
    weight = _in_double(head.weight)
    assert weight is not None
    assert head.weight_gradient is not None
    return build_equations(
        factor(gradient, rounding_unit(head.weight_gradient), rng, at_most=exposure.public.batch_size),
        weight,
        _in_double(head.bias),
        bias_gradient=bias_gradient,
        smoothing=smoothing,
        temperature=loss.temperature,
        model_unit=head.precision,
    )


def may_be_scaled(public: Public) -> bool:
    """Whether a defense in force, or a temperature, may have multiplied the gradient by a number that the server does not know."""
    return any(defense.name not in SCALE_KEPT for defense in public.defenses)


def scaled_by_layer(public: Public) -> bool:
    """Whether weight and bias gradient may have been scaled apart, so that they cannot be used together."""
    return any(getattr(defense, "mode", None) == "layer" for defense in public.defenses)


def _in_double(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().to(torch.float64)
