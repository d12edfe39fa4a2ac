"""Training losses, each with its value and its gradient at the logits in closed form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax, logsigmoid, softmax

from dosimeter.config import describe
from dosimeter.files import LARGEST_CLASS_ID
from dosimeter.interfaces import Loss, TargetKind
from dosimeter.memory import require_memory
from dosimeter.options import Fraction, NonNegativeFloat, PositiveFloat
from dosimeter.registry import LOSSES
from dosimeter.types import Refused

Smoothing = Literal["pytorch", "thesis"]


def as_distribution(targets: Tensor, classes: int, dtype: torch.dtype) -> Tensor:
    """Class ids (B,) as one-hot rows; soft labels (B, C) as they are: (B, C)."""
    if targets.ndim == 2:
        return targets.to(dtype)
    if classes > LARGEST_CLASS_ID:
        require_memory(9 * classes * len(targets), f"a row of {classes} classes for each sample")
    return (targets[:, None] == torch.arange(classes, device=targets.device)).to(dtype)  # under vmap too, unlike one_hot


@LOSSES.register("cross_entropy")
@dataclass(frozen=True, kw_only=True)
class CrossEntropy(Loss):
    """Softmax cross-entropy with label smoothing and temperature, for hard or soft targets.

    Thesis Eq. (3.12), with temperature τ. The gradient at the logits is (softmax(z / τ) − y) / τ (Table 3.1).
    `convention` is how smoothing ε changes a label: PyTorch's (1 − ε)·y + ε/C (Szegedy et al., CVPR 2016),
    or the thesis's (ch. 3), with 1 − ε for the label and ε/(C − 1) for each other class.
    """

    shift_invariant: ClassVar[bool] = True

    smoothing: Fraction = 0.0
    convention: Smoothing = "pytorch"
    temperature: PositiveFloat = 1.0

    def per_sample(self, logits: Tensor, targets: Tensor) -> Tensor:
        wanted = self.smooth_targets(targets, logits.shape[1], logits.dtype)
        return -(wanted * log_softmax(logits / self.temperature, 1)).sum(1)

    def logit_gradient(self, logits: Tensor, targets: Tensor) -> Tensor:
        wanted = self.smooth_targets(targets, logits.shape[1], logits.dtype)
        total = wanted.sum(1, keepdim=True)  # 1 unless a caller optimises over free label mass
        return (softmax(logits / self.temperature, 1) * total - wanted) / self.temperature

    def steepest(self, classes: int) -> float:
        return 2 / self.temperature  # of two distributions

    def smooth_targets(self, targets: Tensor, classes: int, dtype: torch.dtype) -> Tensor:
        """The smoothed targets: (B, C)."""
        wanted = as_distribution(targets, classes, dtype)
        if self.convention == "pytorch":
            return (1 - self.smoothing) * wanted + self.smoothing / classes
        return (1 - self.smoothing) * wanted + self.smoothing / (classes - 1) * (1 - wanted)


@LOSSES.register("focal")
@dataclass(frozen=True, kw_only=True)
class Focal(Loss):
    """Cross-entropy that weighs easy samples less: −α_t (1 − p_t)^γ log p_t for class t.

    Lin et al., "Focal Loss for Dense Object Detection", ICCV 2017, in the multi-class form of thesis Eq. (3.4).
    The gradient is thesis Theorem 1 (Eq. 3.5) with temperature: Σ_t y_t Φ(α_t, p_t, γ)(p_j − δ_tj) / τ. `alpha` is one number, or one a
    class.
    """

    shift_invariant: ClassVar[bool] = True

    gamma: NonNegativeFloat = 2.0
    alpha: PositiveFloat | tuple[PositiveFloat, ...] = 1.0
    temperature: PositiveFloat = 1.0

    def per_sample(self, logits: Tensor, targets: Tensor) -> Tensor:
        wanted = as_distribution(targets, logits.shape[1], logits.dtype)
        log_p = log_softmax(logits / self.temperature, 1)
        return -(self.class_weights(logits) * wanted * (1 - log_p.exp()) ** self.gamma * log_p).sum(1)

    def logit_gradient(self, logits: Tensor, targets: Tensor) -> Tensor:
        wanted = as_distribution(targets, logits.shape[1], logits.dtype)
        weight = wanted * self.weight(logits)  # (B, C): y_t Φ_t
        p = softmax(logits / self.temperature, 1)
        return (p * weight.sum(1, keepdim=True) - weight) / self.temperature

    def weight(self, logits: Tensor) -> Tensor:
        """Φ(α_t, p, γ) = α_t (1 − p)^γ (1 − γ p log p / (1 − p)) of every class (Eq. 3.5): (B, C)."""
        log_p = log_softmax(logits / self.temperature, 1)
        p = log_p.exp()
        rest = -torch.expm1(log_p)  # 1 − p without cancellation
        ratio = torch.where(rest > 0, p * log_p / rest.clamp_min(torch.finfo(p.dtype).tiny), -torch.ones_like(p))
        return self.class_weights(logits) * rest**self.gamma * (1 - self.gamma * ratio)

    def class_weights(self, logits: Tensor) -> Tensor:
        """α_t of every class of the logits (B, C): (C,)."""
        classes = logits.shape[1]
        if not isinstance(self.alpha, tuple):
            return logits.new_full((classes,), self.alpha)
        if len(self.alpha) != classes:
            raise ValueError(f"loss.alpha: expected one number, or one for each of {classes} classes, got {len(self.alpha)}")
        return logits.new_tensor(self.alpha)


@LOSSES.register("binary_cross_entropy")
@dataclass(frozen=True, kw_only=True)
class BinaryCrossEntropy(Loss):
    """Binary cross-entropy with one sigmoid a class; also for a binary classifier with a single logit.

    Thesis Table 3.1: the gradient at each logit is sigmoid(z) − y, divided by the number of logits
    where `over_classes` is "mean", PyTorch's default reduction. Class ids become one-hot targets,
    or stay 0/1 where the model has one logit.
    """

    over_classes: Literal["mean", "sum"] = "mean"

    def per_sample(self, logits: Tensor, targets: Tensor) -> Tensor:
        wanted = _binary_targets(targets, logits)
        losses = -(wanted * logsigmoid(logits) + (1 - wanted) * logsigmoid(-logits))
        return losses.mean(1) if self.over_classes == "mean" else losses.sum(1)

    def logit_gradient(self, logits: Tensor, targets: Tensor) -> Tensor:
        difference = torch.sigmoid(logits) - _binary_targets(targets, logits)
        return difference / logits.shape[1] if self.over_classes == "mean" else difference

    def steepest(self, classes: int) -> float:
        return 1.0 if self.over_classes == "mean" else float(classes)

    def target_kind(self) -> TargetKind:
        return "labels"


@LOSSES.register("squared_error")
@dataclass(frozen=True, kw_only=True)
class SquaredError(Loss):
    """The squared distance between outputs and targets, for regressions.

    Ours, with the conventions of PyTorch's MSELoss: the gradient at each output is 2 (z − t), divided by the number of outputs where
    `over_outputs` is "mean", and by the batch size where `over_batch` is: PyTorch's reductions.
    """

    takes_closings: ClassVar[bool] = True

    over_outputs: Literal["mean", "sum"] = "mean"
    over_batch: Literal["mean", "sum"] = "mean"

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        value = super().__call__(logits, targets)
        return value if self.over_batch == "mean" else value * len(logits)

    def per_sample(self, logits: Tensor, targets: Tensor) -> Tensor:
        losses = (logits - targets.to(logits).reshape(logits.shape)).square().flatten(1)
        return losses.mean(1) if self.over_outputs == "mean" else losses.sum(1)

    def logit_gradient(self, logits: Tensor, targets: Tensor) -> Tensor:
        difference = 2 * (logits - targets.to(logits).reshape(logits.shape))
        return difference / logits[0].numel() if self.over_outputs == "mean" else difference

    def target_kind(self) -> TargetKind:
        return "numbers"


@LOSSES.register("token_cross_entropy")
@dataclass(frozen=True, kw_only=True)
class TokenCrossEntropy(Loss):
    """Softmax cross-entropy at every position of a text, as language models are trained: (B, T, V) logits, (B, T) token ids.

    Radford et al., "Language Models are Unsupervised Multitask Learners", 2019 (next token), and Devlin et al., "BERT", NAACL 2019
    (masked tokens). The mean runs over all positions whose target is not `ignore_index`, as in PyTorch's CrossEntropyLoss.
    With `shift` the target of a position is the next position's, as in Transformers.
    """

    shift_invariant: ClassVar[bool] = True

    ignore_index: int = -100
    shift: bool = False

    def per_sample(self, logits: Tensor, targets: Tensor) -> Tensor:
        """(B,) such that their mean is the mean over all positions that count."""
        logits, targets = self._aligned(logits, targets)
        counted = targets != self.ignore_index  # (B, T)
        own = log_softmax(logits, -1).gather(-1, torch.where(counted, targets, 0)[..., None].long())[..., 0]
        return -(own * counted).sum(1) * len(logits) / counted.sum().clamp_min(1)

    def logit_gradient(self, logits: Tensor, targets: Tensor) -> Tensor:
        """(B, T, V)"""
        aligned, wanted = self._aligned(logits, targets)
        counted = wanted != self.ignore_index
        one_hot = nn.functional.one_hot(torch.where(counted, wanted, 0).long(), aligned.shape[-1]).to(logits)
        slopes = (softmax(aligned, -1) - one_hot) * counted[..., None] * len(logits) / counted.sum().clamp_min(1)
        return nn.functional.pad(slopes, (0, 0, 0, logits.shape[1] - slopes.shape[1]))

    def _aligned(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return (logits[:, :-1], targets[:, 1:]) if self.shift else (logits, targets)


@dataclass(frozen=True, kw_only=True)
class OwnLoss(Loss):
    """A loss of the client's own: a module or any function of outputs and targets. No closed form of its gradient is known.

    Ours: the attacks replay the function itself.
    """

    name: ClassVar[str] = "own loss"
    takes_closings: ClassVar[bool] = True

    function: Any
    targets: TargetKind = "numbers"
    shape: tuple[int, ...] | None = None  # of one sample's target; none: the output's
    whole: Any = None  # an `OutputForm` where the function takes all that the model returns; none: it takes the logits

    def target_kind(self) -> TargetKind:
        return self.targets

    def target_shape(self, output: tuple[int, ...]) -> tuple[int, ...]:
        return output if self.shape is None else self.shape

    def said(self) -> str:
        """With what keeps a loss of PyTorch from its closed form here."""
        function = self.function
        if not isinstance(function, nn.Module):
            return "a function of its own"
        settings = {
            "weights": getattr(function, "weight", None) is not None,
            "positive weights": getattr(function, "pos_weight", None) is not None,
            f"reduction {getattr(function, 'reduction', '')!r}": getattr(function, "reduction", "mean") != "mean",
        }
        holding = [words for words, holds in settings.items() if holds]
        if isinstance(function, nn.CrossEntropyLoss) and not holding:
            holding = ["targets that it ignores"]
        return f"{type(function).__name__} with {' and '.join(holding)}" if holding else type(function).__name__

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        if isinstance(self.function, nn.CrossEntropyLoss) and _classes_last(logits, targets):
            logits = logits.transpose(1, 2)  # (B, V, T), as PyTorch takes it
            targets = targets.transpose(1, 2) if targets.ndim == 3 else targets
        try:
            value = self.function(logits if self.whole is None else self.whole.split(logits), targets)
        except (RuntimeError, Refused):
            raise
        except Exception as error:  # the client's function may fail in any way
            line = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise RuntimeError(
                f"loss: {describe(self.function)} fails on outputs {tuple(logits.shape)} and targets {tuple(targets.shape)}: {line}"
            ) from error
        if not isinstance(value, Tensor) or value.numel() != 1:
            got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise RuntimeError(f'loss: expected one number for the batch, got {got}; reduction="mean" gives one')
        return value.reshape(())

    def slopes(self, logits: Tensor, targets: Tensor, closing: Callable[[Tensor], Tensor]) -> Tensor:
        """The gradient of the loss of all samples together at their logits (n, C), by autograd: a sample's own up to a positive factor.

        `closing` makes the model's outputs of the logits.
        """
        at = logits.detach().requires_grad_()
        with torch.enable_grad():
            return torch.autograd.grad(self(closing(at), targets), at)[0]

    def per_sample(self, logits: Tensor, targets: Tensor) -> Tensor:
        return torch.stack([self(logits[i : i + 1], targets[i : i + 1]) for i in range(len(logits))])

    def logit_gradient(self, logits: Tensor, targets: Tensor) -> Tensor:
        raise Refused(
            f"no closed form of the gradient of the client's own loss ({describe(self.function)}) is known, which this method needs"
        )


def _classes_last(logits: Tensor, targets: Tensor) -> bool:
    """Whether logits are (B, T, V), and targets (B, T) or (B, T, V): PyTorch's cross-entropy takes the classes as the second side."""
    if logits.ndim != 3 or targets.shape[:2] != logits.shape[:2]:
        return False
    return targets.ndim == 3 or targets.shape[1:] != logits.shape[2:]


def loss_of(loss: Any, positions: bool = False, *, grid: bool = False, targets: Tensor | None = None) -> Loss:
    """The loss by name, as an object, or from any module or function of outputs and targets; cross-entropy where none is given.

    A plain loss of PyTorch is the loss of the same name here, whose gradient is known in closed form. With `positions` the model
    has an output at each position of a text, with `grid` at each place of a grid. `targets` tell what a loss of the client's own aims at.
    """
    if loss is None or (positions and loss == CrossEntropy()) or (positions and loss == "cross_entropy"):
        return TokenCrossEntropy() if positions else OwnLoss(function=nn.CrossEntropyLoss(), targets="classes") if grid else CrossEntropy()
    if grid and loss in ("cross_entropy", CrossEntropy()):
        return OwnLoss(function=nn.CrossEntropyLoss(), targets="classes")
    if isinstance(loss, (str, Loss)):
        return LOSSES.resolve(loss)
    if not callable(loss):
        raise TypeError(f"loss: expected the name of a loss, a Loss, a module or a function of outputs and targets, got {loss!r}")
    return (None if grid else _closed_form(loss, positions, targets)) or _own_loss(loss, targets)


def _own_loss(loss: Any, targets: Tensor | None) -> OwnLoss:
    aim = _aim_of(loss, targets)
    return OwnLoss(function=loss, targets=aim, shape=tuple(targets.shape[1:]) if targets is not None and aim == "numbers" else None)


def _closed_form(loss: Any, positions: bool, targets: Tensor | None) -> Loss | None:
    """The loss here that equals a plain loss of PyTorch; None where none does."""
    if isinstance(loss, nn.MSELoss) and loss.reduction == "sum":
        return SquaredError(over_outputs="sum", over_batch="sum")
    if getattr(loss, "reduction", "") != "mean" or getattr(loss, "weight", None) is not None:
        return None
    if isinstance(loss, nn.CrossEntropyLoss) and positions and loss.label_smoothing == 0:
        return TokenCrossEntropy(ignore_index=loss.ignore_index)
    if isinstance(loss, nn.CrossEntropyLoss) and not positions:
        ignored = targets is not None and not targets.is_floating_point() and bool((targets == loss.ignore_index).any())
        return None if ignored else CrossEntropy(smoothing=loss.label_smoothing)
    if isinstance(loss, nn.BCEWithLogitsLoss) and loss.pos_weight is None:
        return BinaryCrossEntropy()
    return SquaredError() if isinstance(loss, nn.MSELoss) else None


def _aim_of(loss: Any, targets: Tensor | None) -> TargetKind:
    """What a loss of the client's own aims at, by its type and by the targets' numbers."""
    if isinstance(loss, (nn.CrossEntropyLoss, nn.NLLLoss)) or (targets is not None and not targets.is_floating_point()):
        return "classes"
    return "labels" if isinstance(loss, (nn.BCEWithLogitsLoss, nn.BCELoss, nn.MultiLabelSoftMarginLoss)) else "numbers"


def _binary_targets(targets: Tensor, logits: Tensor) -> Tensor:
    if logits.shape[1] == 1 and targets.ndim == 1:
        return targets[:, None].to(logits.dtype)
    return as_distribution(targets, logits.shape[1], logits.dtype)
