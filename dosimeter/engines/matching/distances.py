"""How far a guessed update is from the client's: the distances that gradient matching minimises."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


class Distance(ABC):
    """Compares updates layer by layer; `weights` (L,) gives each layer its say, None gives all the same."""

    @property
    def joint(self) -> bool:
        """Whether the update counts as one long vector, weights as squares of factors on both sides, so that layers may lie end to end."""
        return False

    @abstractmethod
    def __call__(
        self, guess: Sequence[Tensor], target: Sequence[Tensor], weights: Tensor | None = None, sizes: Tensor | None = None
    ) -> Tensor:
        """Two lists of L tensors of equal shapes -> a scalar that is 0 where they agree; `sizes` (L,) are ‖g*‖² where they are known."""

    def scale(self, target: Sequence[Tensor]) -> float:
        """The distance of a guess that says nothing; what counts as near is measured against it."""
        return 1.0


@dataclass(frozen=True)
class SquaredError(Distance):
    """Σ ‖g − g*‖² (Zhu et al., "Deep Leakage from Gradients", NeurIPS 2019, Eq. 1), or that over ‖g*‖²."""

    relative: bool = False
    weight: float = 1.0

    @property
    def joint(self) -> bool:
        return True

    def __call__(
        self, guess: Sequence[Tensor], target: Sequence[Tensor], weights: Tensor | None = None, sizes: Tensor | None = None
    ) -> Tensor:
        error = self.weight * _total([(g - t).square().sum() for g, t in zip(guess, target)], weights)
        if not self.relative:
            return error
        size = _total(_sizes(target, sizes), weights)
        return error / size.clamp_min(_tiny(size))

    def scale(self, target: Sequence[Tensor]) -> float:
        return self.weight if self.relative else self.weight * float(_total(_sizes(target, None), None))


@dataclass(frozen=True)
class AbsoluteError(Distance):
    """Σ ‖g − g*‖₁ over ‖g*‖₁: up to constants the negative logarithm of a Laplace distribution's density."""

    def __call__(
        self, guess: Sequence[Tensor], target: Sequence[Tensor], weights: Tensor | None = None, sizes: Tensor | None = None
    ) -> Tensor:
        size = _total([t.abs().sum() for t in target], weights)
        return _total([(g - t).abs().sum() for g, t in zip(guess, target)], weights) / size.clamp_min(_tiny(size))


@dataclass(frozen=True)
class SquaredAndAbsolute(Distance):
    """Σ ‖g − g*‖² + α ‖g − g*‖₁ (Deng et al., "TAG: Gradient Attack on Transformer-based Language Models", 2021)."""

    absolute: float = 0.01  # α

    def __call__(
        self, guess: Sequence[Tensor], target: Sequence[Tensor], weights: Tensor | None = None, sizes: Tensor | None = None
    ) -> Tensor:
        differences = [g - t for g, t in zip(guess, target)]
        return _total([d.square().sum() + self.absolute * d.abs().sum() for d in differences], weights)

    def scale(self, target: Sequence[Tensor]) -> float:
        return float(sum(t.square().sum() + self.absolute * t.abs().sum() for t in target))


@dataclass(frozen=True)
class Cosine(Distance):
    """1 − ⟨g, g*⟩ / (‖g‖ ‖g*‖) over the whole update (Geiping et al., NeurIPS 2020, Eq. 4), or its sum over layers."""

    per_layer: bool = False

    @property
    def joint(self) -> bool:
        return not self.per_layer

    def __call__(
        self, guess: Sequence[Tensor], target: Sequence[Tensor], weights: Tensor | None = None, sizes: Tensor | None = None
    ) -> Tensor:
        agreement = [(g * t).sum() for g, t in zip(guess, target)]
        guess_norm = [g.square().sum() for g in guess]
        target_norm = _sizes(target, sizes)
        if self.per_layer:
            return _total([1 - a / _root(g * t) for a, g, t in zip(agreement, guess_norm, target_norm)], weights)
        return 1 - _total(agreement, weights) / _root(_total(guess_norm, weights) * _total(target_norm, weights))


@dataclass(frozen=True)
class GaussianKernel(Distance):
    """Σ 1 − exp(−‖g − g*‖² / (n σ²)) with σ² the variance of the layer's own update.

    Wang et al., "SAPAG: A Self-Adaptive Privacy Attack From Gradients", 2020. Departure: the squared error is averaged
    over the layer's n entries. Its sum against one entry's variance is so large that the exponential vanishes at any
    start, and with it the gradient.
    """

    width: float = 1.0  # multiplies σ²

    def __call__(
        self, guess: Sequence[Tensor], target: Sequence[Tensor], weights: Tensor | None = None, sizes: Tensor | None = None
    ) -> Tensor:
        kernels = [
            1 - torch.exp(-(g - t).square().mean() / (self.width * t.var(correction=0)).clamp_min(_tiny(t))) for g, t in zip(guess, target)
        ]
        return _total(kernels, weights)

    def scale(self, target: Sequence[Tensor]) -> float:
        return float(len(target))


def _sizes(target: Sequence[Tensor], known: Tensor | None) -> Sequence[Tensor]:
    return [t.square().sum() for t in target] if known is None else known.unbind()


def _total(terms: Sequence[Tensor], weights: Tensor | None) -> Tensor:
    """Σ w_i t_i by plain additions, which a compiler fuses into the sums themselves; a stack of scalars it would write out first."""
    weighted = terms if weights is None else [weight * term for weight, term in zip(weights.unbind(), terms)]
    return sum(weighted[1:], start=weighted[0])


def _root(squared: Tensor) -> Tensor:
    """A square root whose derivative stays finite at 0."""
    return squared.clamp_min(_tiny(squared)).sqrt()


def _tiny(like: Tensor) -> float:
    return torch.finfo(like.dtype).tiny
