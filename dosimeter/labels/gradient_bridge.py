"""Gradient Bridge (GDBR): labels from a hidden layer's gradient, the head withheld."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from dosimeter.head import find_head
from dosimeter.interfaces import LabelRecovery
from dosimeter.labels.auxiliary import Source, reference_at
from dosimeter.labels.batch_size import declared_or_inferred
from dosimeter.labels.counting import counted, nearest_counts, whole_number_confidence
from dosimeter.labels.layer_chain import Link, chain_to
from dosimeter.labels.shares import class_shares
from dosimeter.registry import LABELS
from dosimeter.types import Exposure, LabelEstimate, Refused


@LABELS.register("gradient_bridge")
@dataclass(frozen=True, kw_only=True)
class GradientBridge(LabelRecovery):
    """Counts classes from the gradient of one hidden layer, bridged through the linear layers behind it to the logits.

    Zhang's thesis, Chapter 4 (GDBR): Theorems 3 and 4, Eqs. (4.14)-(4.21), the products of Eqs. (4.14) and (4.17) read
    as divisions, as the theorems need. `layer` names the hidden layer, by default the shared one nearest to the head;
    it and all behind it must be linear (the first may be a convolution with 1x1 output) with ReLUs between.
    Departures: where the layer has a bias and its gradient is shared, that is the mean gradient at z itself, and it is
    divided by how often auxiliary samples activate the unit; the equations of each further layer weigh every unit by
    that rate, so that dead ones drop out. `as_published=True` restores the thesis, which ignores biases, takes every
    unit for active and gives dead ones the mean activation. Dummies are uniform pixels under the public normalisation
    (the thesis: standard normal inputs, on the same scale once images are normalised). Counts are completed to the
    batch size; the losses of Table 3.1 are allowed for in the last step.
    `details`: logit_gradient (C,), the mean gradient at the logits.
    """

    layer: str | None = None
    source: Source = "available"
    as_published: bool = False

    def __call__(self, exposure: Exposure, rng: Generator) -> LabelEstimate:
        head, public = find_head(exposure), exposure.public
        if head.classes < 2:
            raise Refused("gradient_bridge needs at least two logits; this model has one")
        first, *behind = self._shared_stack(exposure, chain_to(exposure, head.name))
        activations = reference_at(exposure, behind[0].name, self.source, rng).features.double()  # (n, N)
        gradient = self._first_gradient(exposure, first, activations)  # (N,) mean ∂ℓ/∂a
        for link in behind:
            weight = link.weight.double()
            alive = torch.ones_like(gradient) if self.as_published else _rate(activations)
            gradient = _output_gradient(weight, gradient, alive)  # (N',) mean ∂ℓ/∂z
            if link is not behind[-1]:
                activations = (activations @ weight.T + (0 if link.bias is None else link.bias.double())).relu()
                gradient = gradient if self.as_published else _where_active(gradient, activations)
        shares = class_shares(public.loss, head, activations, gradient, self.name)
        size, message = declared_or_inferred(public.batch_size, shares, None, self.name)
        counts = nearest_counts(size * shares, size)
        confidence = whole_number_confidence(size * shares, counts)
        return counted(counts, scores=size * shares, confidence=confidence, message=message, details={"logit_gradient": gradient})

    def _shared_stack(self, exposure: Exposure, chain: list[Link]) -> list[Link]:
        """From the hidden layer that the client shares to the head."""
        hidden = [link.name for link in chain[:-1]]
        shared = [name for name in hidden if f"{name}.weight" in exposure.update]
        if self.layer is not None and self.layer not in shared:
            raise Refused(f"gradient_bridge.layer: expected one of the shared layers {shared} on the way to the head, got {self.layer!r}")
        if not shared:
            raise Refused(
                f"gradient_bridge needs the gradient of a linear layer that ReLUs and linear layers join to the head {chain[-1].name!r}; "
                + (f"the client withholds {', '.join(hidden)}" if hidden else "nothing of the kind stands before it")
            )
        return chain[hidden.index(self.layer or shared[-1]) :]

    def _first_gradient(self, exposure: Exposure, first: Link, activations: Tensor) -> Tensor:
        """The mean ∂ℓ/∂a of the shared layer (Eq. 4.17)."""
        weight_gradient = exposure.update[f"{first.name}.weight"].flatten(1).double()
        bias_gradient = exposure.update.get(f"{first.name}.bias")
        if bias_gradient is not None and not self.as_published:
            return _where_active(bias_gradient.double(), activations)
        products = (weight_gradient * first.weight.double()).sum(1)  # ∇z ⊙ (z − b)
        mean = activations.mean(0)
        if self.as_published:
            mean = torch.where(mean == 0, mean[mean != 0].mean(), mean)
        return torch.where(mean == 0, 0, products / mean)


def _rate(activations: Tensor) -> Tensor:
    """How often each unit is active: (N,)."""
    return (activations > 0).double().mean(0)


def _where_active(gradient: Tensor, activations: Tensor) -> Tensor:
    """The mean gradient behind a ReLU from the one before it, which the inactive samples' zeros dilute."""
    rate = _rate(activations)
    return torch.where(rate == 0, 0, gradient / rate)


def _output_gradient(weight: Tensor, input_gradient: Tensor, trust: Tensor) -> Tensor:
    """Solve Wᵀ ∇z = ∇x by least squares with each equation weighed by `trust` (M,) (Lemma 2, Eqs. 4.15-4.19): (N,)."""
    weighed = weight * trust  # (N, M)
    normal = weighed @ weight.T
    inverse = torch.linalg.pinv(normal, rtol=1e-12, hermitian=True)
    return inverse @ (weighed @ input_gradient)
