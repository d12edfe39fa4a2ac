"""RGLA: the logits of a batch by gradient descent, and the features from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Generator, Tensor
from torch.nn.functional import cross_entropy, one_hot

from dosimeter.client.losses import CrossEntropy
from dosimeter.features.quotient import quotient_features
from dosimeter.interfaces import Exposure, FeatureRecovery
from dosimeter.network.head import Head, find_head
from dosimeter.network.probing import output_of
from dosimeter.options import NonNegativeFloat, PositiveFloat, PositiveInt
from dosimeter.progress import advance
from dosimeter.registry import FEATURES
from dosimeter.types import FeatureEstimate, Knowledge, LabelEstimate, Outcome, Refused

MOST_SQUARED = 2048  # classes up to which a matrix (C, C) is held

Initialisation = Literal["normal", "uniform", "zeros", "ones", "natural", "fgla"]


@FEATURES.register("rgla")
@dataclass(frozen=True, kw_only=True)
class RGLA(FeatureRecovery):
    """Finds the batch's logits by 20,000 steps of Adam on three equations, and reads the features off them.

    "RGLA: Reverse Gradient Leakage Attack using Inverted Cross-Entropy Loss Function": Algorithm 1, Eqs. (3)-(7), Propositions 1 and 2;
    `initialisation` has the six of Table 7. The objective, with D = (softmax(ŷ) − y)/B, is
        weight_term ‖∇W Wᵀ − Dᵀ(ŷ − b)‖² + bias_term ‖∇b − Dᵀ1‖² + loss_term (loss(ŷ) − estimate)².
    `detached=True` is the released code's: no derivative of D, hence none of the second term, plain cross-entropy, and a `decay` of the
    step every 1,000 steps. `form="released"` is its whole loop: detached, plain cross-entropy, and the squared loss term of weight 1.
    Departures: features follow the labels, not the true logits. Clipping is not undone with a known norm. Non-positive log arguments in
    Proposition 2 are dropped, as in the released code.
    """

    needs = frozenset({Knowledge.HEAD_GRADIENT, Knowledge.BIAS_GRADIENT, Knowledge.LABELS, Knowledge.SOFTMAX_LOSS})
    quick: ClassVar[dict[str, Any]] = {"steps": 2000, "learning_rate": 0.01}

    steps: PositiveInt = 20_000
    learning_rate: PositiveFloat = 1e-3
    weight_term: NonNegativeFloat = 10_000.0  # α₁
    bias_term: NonNegativeFloat = 1.0  # α₂
    loss_term: NonNegativeFloat = 100.0  # α₃
    initialisation: Initialisation = "normal"
    detached: bool = False
    form: Literal["chosen", "released"] = "chosen"  # released: in place of `detached` and `loss_term`
    decay: PositiveFloat = 0.95

    def __call__(self, exposure: Exposure, labels: LabelEstimate | None, rng: Generator) -> FeatureEstimate:
        head = find_head(exposure)
        assert labels is not None
        assert head.weight_gradient is not None
        assert head.bias_gradient is not None
        loss = exposure.public.loss
        if not isinstance(loss, CrossEntropy) or loss.smoothing > 0 or loss.temperature != 1 or labels.soft is not None:
            raise Refused("rgla inverts plain cross-entropy with hard labels; subspace allows for smoothing and temperature")
        ids = labels.labels.to(head.weight.device)
        problem = LogitProblem.of(head, ids)
        logits = self.descend(problem, _initial_logits(self.initialisation, problem, head, exposure, ids, rng))
        return _estimate(logits, problem, head)

    def descend(self, problem: LogitProblem, start: Tensor) -> Tensor:
        """The logits (B, C) that the steps of Algorithm 1 lead to."""
        logits = start.clone().requires_grad_()
        optimizer = torch.optim.Adam([logits], lr=self.learning_rate)
        for step in range(self.steps):
            optimizer.zero_grad(set_to_none=True)
            self.objective(logits, problem).backward()
            optimizer.step()
            if (self.detached or self.form == "released") and (step + 1) % 1000 == 0:
                optimizer.param_groups[0]["lr"] *= self.decay
            advance(step + 1, self.steps, "steps")
        return logits.detach()

    def objective(self, logits: Tensor, problem: LogitProblem) -> Tensor:
        """Eq. (7)."""
        error = problem.error(logits)  # (B, C)
        released = self.form == "released"
        fixed = error.detach() if self.detached or released else error
        weight_term = problem.weight_misfit(fixed, logits - problem.bias)  # Proposition 1, Eq. (4)
        bias_term = (problem.bias_gradient - fixed.sum(0)).square().sum()  # Eq. (3)
        loss = cross_entropy(logits, problem.labels)
        squared = (loss - problem.expected_loss).square()  # Eq. (6)
        if released:  # D is read off the loss's own gradient, which stays and is added to
            return self.weight_term * weight_term + self.bias_term * bias_term + squared + loss
        loss_term = loss if self.detached else squared
        return self.weight_term * weight_term + self.bias_term * bias_term + self.loss_term * loss_term


@dataclass(frozen=True, kw_only=True)
class LogitProblem:
    """The known sides of the three equations."""

    labels: Tensor  # (B,)
    weight_gradient: Tensor  # (C, H)
    weight: Tensor  # (C, H)
    product: Tensor | None  # (C, C) ∇W Wᵀ, where the classes are few
    size: Tensor  # () ‖∇W Wᵀ‖²
    bias: Tensor  # (C,)
    bias_gradient: Tensor  # (C,)
    expected_loss: Tensor  # ()

    @classmethod
    def of(cls, head: Head, labels: Tensor) -> LogitProblem:
        assert head.weight_gradient is not None
        assert head.bias_gradient is not None
        assert head.bias is not None
        few = head.classes <= MOST_SQUARED
        kind = torch.promote_types(torch.promote_types(head.weight.dtype, head.weight_gradient.dtype), torch.float32)
        kind = kind if few else torch.float64  # the terms cancel
        gradient, weight = head.weight_gradient.to(kind), head.weight.to(kind)
        return cls(
            labels=labels,
            weight_gradient=gradient,
            weight=weight,
            product=gradient @ weight.T if few else None,
            size=((gradient.T @ gradient) * (weight.T @ weight)).sum(),
            bias=head.bias.to(kind),
            bias_gradient=head.bias_gradient.to(kind),
            expected_loss=_expected_loss(head.bias_gradient.to(kind), labels),
        )

    def weight_misfit(self, error: Tensor, logits: Tensor) -> Tensor:
        """‖∇W Wᵀ − Dᵀŷ‖², from D (B, C) and ŷ (B, C).

        Where C² entries are many, the square is taken term by term: ‖∇W Wᵀ‖² − 2 ⟨D ∇W, ŷ W⟩ + ⟨D Dᵀ, ŷ ŷᵀ⟩.
        """
        if self.product is not None:
            return (self.product - error.T @ logits).square().sum()
        across = ((error @ self.weight_gradient) * (logits @ self.weight)).sum()
        return self.size - 2 * across + ((error @ error.T) * (logits @ logits.T)).sum()

    def error(self, logits: Tensor) -> Tensor:
        """D = (softmax(ŷ) − y)/B, the gradient of the mean loss at the logits: (B, C)."""
        return (torch.softmax(logits, 1) - one_hot(self.labels, logits.shape[1])) / len(logits)

    def features(self, logits: Tensor) -> Tensor:
        """Eq. (5), f = D⁺ᵀ ∇W, in double precision: (B, H)."""
        return torch.linalg.pinv(self.error(logits.double()).T) @ self.weight_gradient.double()


def _expected_loss(bias_gradient: Tensor, labels: Tensor) -> Tensor:
    """Proposition 2: −(1/B) Σ ln(∇b_y + λ_y/B)."""
    counts = torch.bincount(labels, minlength=len(bias_gradient))
    arguments = bias_gradient[labels] + counts[labels] / len(labels)
    return -arguments[arguments > 0].log().sum() / len(labels)


def _initial_logits(kind: Initialisation, problem: LogitProblem, head: Head, exposure: Exposure, labels: Tensor, rng: Generator) -> Tensor:
    """The six starting points of Table 7: (B, C)."""
    shape, like = (len(labels), head.classes), problem.weight
    match kind:
        case "normal":
            return torch.randn(shape, generator=rng, dtype=like.dtype, device=like.device)
        case "uniform":
            return torch.rand(shape, generator=rng, dtype=like.dtype, device=like.device)
        case "zeros":
            return like.new_zeros(shape)
        case "ones":
            return like.new_ones(shape)
        case "natural":
            return _auxiliary_logits(exposure, len(labels), rng).to(like)
        case "fgla":
            assert head.weight_gradient is not None
            features = quotient_features(head.weight_gradient, problem.bias_gradient, labels)
            return head.logits(features).to(like)


def _auxiliary_logits(exposure: Exposure, size: int, rng: Generator) -> Tensor:
    """The model's logits of auxiliary images: (B, C)."""
    if exposure.auxiliary is None:
        raise Refused("rgla: initialisation 'natural' needs auxiliary data; observe(..., auxiliary=dm.Batch(...)) grants it")
    inputs = exposure.auxiliary.inputs
    chosen = torch.randint(len(inputs), (size,), generator=rng, device=rng.device).to(inputs.device)
    return output_of(exposure.model, inputs[chosen])


def _estimate(logits: Tensor, problem: LogitProblem, head: Head) -> FeatureEstimate:
    """The features of the logits, with the part of the gradient that they leave unexplained."""
    assert head.weight_gradient is not None
    target = head.weight_gradient.double()
    finite = bool(torch.isfinite(logits).all())
    features = problem.features(logits) if finite else target.new_full((len(logits), target.shape[1]), torch.nan)
    unexplained = torch.linalg.matrix_norm(target - _gradient_of(head, features, problem.labels)) / torch.linalg.matrix_norm(target)
    dtype = torch.promote_types(head.weight_gradient.dtype, torch.float32)
    return FeatureEstimate(
        features=features.to(dtype),
        labels=problem.labels,
        residual=unexplained.to(dtype).expand(len(logits)),
        certified=torch.zeros(len(logits), dtype=torch.bool, device=logits.device),
        batch_size=len(logits),
        outcome=Outcome.COMPLETED if finite else Outcome.DIVERGED,
        message="" if finite else "the logits left the finite numbers; a smaller learning_rate may help",
    )


def _gradient_of(head: Head, features: Tensor, labels: Tensor) -> Tensor:
    """The weight gradient of a batch with these features and labels: (C, H)."""
    error = torch.softmax(head.logits(features), 1) - one_hot(labels, head.classes)
    return error.T @ features / len(labels)
