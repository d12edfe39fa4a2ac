"""Gradient Bridge (GDBR): labels from a hidden layer's gradient, the head withheld."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor

from dosimeter.engines.counting.auxiliary import Source, reference_at
from dosimeter.engines.counting.counts import nothing_to_read
from dosimeter.engines.counting.shares import class_shares, counts_of
from dosimeter.engines.needs import why_not_sent
from dosimeter.interfaces import Defense, Exposure, LabelRecovery
from dosimeter.network.head import find_head
from dosimeter.network.linear_stack import StackedLayer, find_linear_stack
from dosimeter.registry import LABELS
from dosimeter.types import LabelEstimate, Outcome, Refused


@LABELS.register("gradient_bridge")
@dataclass(frozen=True, kw_only=True)
class GradientBridge(LabelRecovery):
    """Counts classes from one hidden layer's gradient, carried through the linear layers behind it to the logits.

    Zhang's thesis, Chapter 4 (GDBR): Theorems 3 and 4, Eqs. (4.13)-(4.21). The products of Eqs. (4.14) and (4.17) are read as
    divisions, as the theorems need. From `layer` (by default the last shared one) to the head, layers are linear with ReLUs between,
    the first maybe a 1x1-output convolution.
    Departures: a shared bias gradient is the gradient at z, else ∇W v with x·v ≈ 1 on auxiliary samples. Gradients are divided by how
    often a unit is active, which weighs the equations. `as_published=True` restores the thesis. Dummies are uniform pixels. Counts sum
    to the batch size.
    `details`: logit_gradient (C,), the mean gradient at the logits.
    """

    layer: str | None = None
    source: Source = "available"
    as_published: bool = False

    def __call__(self, exposure: Exposure, rng: Generator) -> LabelEstimate:
        head, public = find_head(exposure), exposure.public
        if head.classes < 2:
            raise Refused("gradient_bridge needs at least two logits; this model has one")
        first, *behind = self._shared_stack(exposure, find_linear_stack(exposure, head.name))
        if not bool(exposure.update[f"{first.name}.weight"].any()):
            return nothing_to_read(head.weight, public.batch_size, f"the gradient of {first.name!r}")
        activations = reference_at(exposure, behind[0].name, self.source, rng).features.double()  # (n, N)
        gradient = self._first_gradient(exposure, first, activations, rng)  # (N,) mean ∂ℓ/∂a
        for link in behind:
            weight = link.weight.double()
            alive = torch.ones_like(gradient) if self.as_published else _rate(activations)
            gradient = _output_gradient(weight, gradient, alive)  # (N',) mean ∂ℓ/∂z
            if link is not behind[-1]:
                activations = (activations @ weight.T + (0 if link.bias is None else link.bias.double())).relu()
                gradient = gradient if self.as_published else _where_active(gradient, activations)
        shares = class_shares(public.loss, head, activations, gradient, self.name)
        estimate = counts_of(shares, None, public, self.name, details={"logit_gradient": gradient})
        if head.classes <= head.features:
            return estimate
        undetermined = f"{head.classes} classes on {head.features} features: the gradient at the logits is not determined"
        return replace(estimate, outcome=Outcome.SINGULAR, message=f"{estimate.message} {undetermined}".strip())

    def counter(self, defense: Defense) -> str:
        return f"{self.name} does without the head" if defense.hides_head else super().counter(defense)

    def _shared_stack(self, exposure: Exposure, chain: list[StackedLayer]) -> list[StackedLayer]:
        """From the hidden layer that the client shares to the head."""
        hidden = [link.name for link in chain[:-1]]
        shared = [name for name in hidden if f"{name}.weight" in exposure.update]
        if self.layer is not None and self.layer not in shared:
            raise Refused(f"gradient_bridge.layer: expected one of the shared layers {shared} on the way to the head, got {self.layer!r}")
        if not shared:
            raise Refused(
                f"gradient_bridge needs the gradient of a linear layer that ReLUs and linear layers join to the head {chain[-1].name!r}; "
                + (", ".join(why_not_sent(exposure, f"{n}.weight", n) for n in hidden) or "nothing of the kind stands before it")
            )
        return chain[hidden.index(self.layer or shared[-1]) :]

    def _first_gradient(self, exposure: Exposure, first: StackedLayer, activations: Tensor, rng: Generator) -> Tensor:
        """The mean ∂ℓ/∂a of the shared layer (Eq. 4.17)."""
        weight_gradient = exposure.update[f"{first.name}.weight"].flatten(1).double()
        bias_gradient = exposure.update.get(f"{first.name}.bias")
        if self.as_published:
            mean = activations.mean(0)
            mean = torch.where(mean == 0, mean[mean != 0].mean(), mean)
            return (weight_gradient * first.weight.double()).sum(1) / mean  # diag(∇W Wᵀ) ⊘ a
        if bias_gradient is not None and bool((bias_gradient != 0).eq(weight_gradient.ne(0).any(1)).all()):
            return _where_active(bias_gradient.double(), activations)
        inputs = first.rows_of(reference_at(exposure, first.name, self.source, rng).features).double()  # (n, M)
        if bias_gradient is not None:  # some of its entries were pruned, which leaves their rows to tell them
            pruned = _from_kept_entries(weight_gradient, inputs.mean(0))
            return _where_active(torch.where(bias_gradient == 0, pruned, bias_gradient.double()), activations)
        return _where_active(weight_gradient @ _constant_direction(inputs), activations)


def _constant_direction(inputs: Tensor) -> Tensor:
    """The v with x·v nearest to 1 on the server's samples, so that ∇W v = mean ∇z (x·v) stands in for the gradient of a bias: (M,).

    Ridge regression; the ridge is the one with the least leave-one-out error.
    """
    values, vectors = torch.linalg.eigh(inputs @ inputs.T)  # (n,), (n, n)
    ones = vectors.T @ torch.ones(len(inputs), dtype=inputs.dtype, device=inputs.device)
    ridges = values.max() * torch.logspace(-8, 0, 17, dtype=inputs.dtype, device=inputs.device)  # (r,)
    shrunk = 1 / (values.clamp_min(0) + ridges[:, None])  # (r, n)
    duals = (shrunk * ones) @ vectors.T  # (r, n)
    left_out = duals / (shrunk @ vectors.square().T)  # residual of each sample when it is left out
    best = left_out.square().mean(1).argmin()
    return inputs.T @ duals[best]


def _from_kept_entries(weight_gradient: Tensor, mean_input: Tensor) -> Tensor:
    """The mean ∂ℓ/∂z of each row of ∇W ≈ ∇z xᵀ by least squares over the entries that are not zero: (N,); 0 for empty rows."""
    kept = (weight_gradient != 0).to(weight_gradient)
    norms = kept @ mean_input.square()
    return torch.where(norms > 0, weight_gradient @ mean_input / norms.clamp_min(torch.finfo(norms.dtype).tiny), 0)


def _rate(activations: Tensor) -> Tensor:
    """How often each unit is active: (N,)."""
    return (activations > 0).double().mean(0)


def _where_active(gradient: Tensor, activations: Tensor) -> Tensor:
    """The mean gradient behind a ReLU from the one before it, which the inactive samples' zeros dilute."""
    rate = _rate(activations)
    return torch.where(rate == 0, 0, gradient / rate)


def _output_gradient(weight: Tensor, input_gradient: Tensor, trust: Tensor) -> Tensor:
    """Solve Wᵀ ∇z = ∇x by least squares with each equation weighed by `trust` (M,) (Lemma 2, Eqs. 4.15-4.19): (N,).

    With more outputs than inputs the shortest of the many solutions is taken.
    """
    weighed = weight * trust.sqrt()  # (N, M)
    right = trust.sqrt() * input_gradient
    if weight.shape[0] <= weight.shape[1]:
        return torch.linalg.pinv(weighed @ weighed.T, rtol=1e-12, hermitian=True) @ (weighed @ right)
    return weighed @ (torch.linalg.pinv(weighed.T @ weighed, rtol=1e-12, hermitian=True) @ right)
