"""The gradient that one input has by itself at a first layer's biases, computed for every label as the client computes it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dosimeter.engines.cancelling_labels import MOST_SAMPLES, every_label, labels_can_cancel, relative_change
from dosimeter.engines.matching.differentiable import twice_differentiable
from dosimeter.engines.sample_share import mixes_samples, share_of_one_sample
from dosimeter.interfaces import Exposure
from dosimeter.network.probing import copied_buffers, forward

SAME_GRADIENT = 2e-5  # relative difference up to which a gradient is the input's own; single precision gives 1e-6, mixtures some 1e-3
SAMPLES_APART = 0.05  # relative distance of two samples, from which on their mixture is neither
LEAST_CHANGE = 0.01  # of the derivative at the logits: with less, two samples of one label pass for one of twice the share
NOISE_REACH = 3.0  # standard deviations that the noise in a sum may exceed its own size by
BLUR_REACH = 0.5  # of the relative error of an input, whose direction is random, that shows in its gradient
LIKELY = 3e-4  # the chance, over all labels, from which on a mixture may pass for a sample


@dataclass(frozen=True, kw_only=True)
class Response:
    """What a model makes of one input, in float64."""

    inputs: Tensor  # (d,)
    rows: Tensor  # (m,) the chosen rows
    logits: Tensor  # (1, C)
    slopes: Tensor  # (C, m) the logits' derivatives at the biases of the rows


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A gradient at some rows beside the gradients that one input has there by itself, in the r directions that these can have."""

    seen: Tensor  # (r,)
    expected: Tensor  # (labels, r) of a sample that is the whole batch
    sizes: Tensor  # (r,) how much a derivative of ordinary size at the logits gives in each direction, descending
    tolerance: float  # the distance that rounding and noise explain
    change: float  # of the derivative at the logits from one input to another, relative
    possible: bool  # nothing but the size and direction can refute a single sample

    def explains(self, share: float, spread: float = 0.0) -> bool:
        """Whether one sample has this gradient, under any label, where a sample enters the update with this share, known up to `spread`.

        A mixture of samples fails. The sum of their weights is not the weight that the model gives the mixture. So the weight alone
        refutes it, even for two classes, where the weights of all rows are proportional. Two copies of a sample fail too: two alike
        samples of one label have the gradient of two copies of their mean, but for the square of what tells them apart.
        """
        tolerance = self.tolerance + spread * float(self.seen.norm())
        fits = bool(((share * self.expected - self.seen).norm(dim=1) <= tolerance).any())
        return self.possible and fits and len(self.expected) * self._luck(share, 0) <= LIKELY

    def shares(self) -> list[Share]:
        """The shares with which one sample has this gradient, one for each label that fits.

        Two samples of one label have twice the gradient of their mean, but for the square of the change from one to the other.
        """
        if not self.possible or self.change < LEAST_CHANGE:
            return []
        lengths = self.expected.square().sum(1).clamp_min(torch.finfo(self.expected.dtype).tiny)
        values = (self.expected @ self.seen) / lengths  # (labels,)
        off = (values[:, None] * self.expected - self.seen).norm(dim=1)
        fits = (values > 0) & (off <= self.tolerance)
        spread = self.tolerance / float(self.seen.norm())
        return [Share(value=value, spread=spread, luck=int((values > 0).sum()) * self._luck(value, 1)) for value in values[fits].tolist()]

    def _luck(self, share: float, known: int) -> float:
        """The chance that a mixture comes this near to one label's gradient, in all directions but the first `known`.

        A mixture's derivative at the logits may have any size. Beyond its size, it differs from a sample's as the derivatives of two
        inputs differ.
        """
        spread = torch.ones_like(self.sizes)
        spread[1:] = self.change
        return float((2 * self.tolerance / (share * self.sizes * spread).clamp_min(self.tolerance))[known:].clamp_max(1).prod())


@dataclass(frozen=True, kw_only=True)
class Share:
    """A share of one sample in the update that explains a gradient."""

    value: float
    spread: float  # relative uncertainty
    luck: float  # the chance, over all labels, that a mixture has the direction of a sample's gradient


class OwnGradients:
    """Computes ∂ℓ(x, y)/∂b = Jᵀ ∂ℓ/∂z of an input x under every label y. J is the derivative of the logits z at the biases b.

    `soft` (n, C) are labels that the batch is known to hold. They are tried beside the hard labels.
    """

    def __init__(self, exposure: Exposure, biases: list[str], soft: Tensor | None = None) -> None:
        public = exposure.public
        self.model, self.loss, self.shape, self.biases = exposure.model, public.loss, public.input_shape, biases
        self.share = share_of_one_sample(public, exposure.update, biases)
        self.most_samples = public.batch_size or MOST_SAMPLES
        hard = every_label(public.classes)
        self.labels = hard if soft is None else torch.cat([hard, soft.double().cpu()])

    def respond(self, inputs: Tensor, rows: Tensor) -> Response:
        """The response of the model to one input (d,) at the biases of the rows (m,)."""
        with torch.enable_grad(), twice_differentiable():
            logits, biases = self._forward(inputs)
            direction = torch.zeros_like(logits, requires_grad=True)
            along = torch.autograd.grad(logits, biases, direction, create_graph=True, materialize_grads=True)  # Jᵀ direction
            columns = [torch.autograd.grad(entry, direction, retain_graph=True)[0][0] for entry in torch.cat(along)[rows]]
        return Response(inputs=inputs, rows=rows, logits=logits.detach().double(), slopes=torch.stack(columns, 1).double())

    def compare(self, response: Response, gradient: Tensor, noise: float = 0.0, blur: float = 0.0) -> Comparison:
        """Holds the gradient (m,) of rows against that of one sample with this response, under every label.

        `noise` is the standard deviation of what was added to an entry, `blur` the relative error of the input. Noise that no sample's
        gradient can have, outside the span of the slopes, does not count.
        """
        slopes = response.slopes - response.slopes.mean(0) if self.loss.shift_invariant else response.slopes
        left, sizes, right = torch.linalg.svd(slopes, full_matrices=False)
        kept = sizes > SAME_GRADIENT * sizes.max()
        left, sizes, right = left[:, kept], sizes[kept], right[kept]  # (C, r), (r,), (r, m)
        errors, seen, norm = self.errors(response.logits), right @ gradient, float(gradient.norm())
        outside = float((gradient - right.T @ seen).norm())
        free, rounding = len(gradient) - len(sizes), (SAME_GRADIENT + BLUR_REACH * blur) * norm
        return Comparison(
            seen=seen,
            expected=errors @ left * sizes,
            sizes=sizes * float(errors.norm(dim=1).mean()),
            tolerance=rounding + (math.sqrt(len(sizes)) + NOISE_REACH) * noise,
            change=min(self._change(response), 1.0),
            possible=outside <= rounding + (math.sqrt(free) + NOISE_REACH) * noise and not self._others_cancel(response),
        )

    def luck_of_agreement(self, response: Response, distance: float) -> float:
        """The chance that all these rows show one mixture of two samples, to within this relative distance.

        Row l mixes them in the ratio s_l · ∂ℓ/∂z_1 : s_l · ∂ℓ/∂z_2, with slopes s_l. So all rows have one ratio only if the derivatives at
        the logits are parallel, in every direction that the slopes span. With two classes they always are, and where the model predicts
        nearly the same for all inputs.
        """
        change = min(self._change(response), 1.0)
        slopes = response.slopes - response.slopes.mean(0) if self.loss.shift_invariant else response.slopes
        sizes = torch.linalg.svdvals(slopes / slopes.norm(dim=0).clamp_min(torch.finfo(slopes.dtype).tiny))
        if float(sizes[0]) == 0:
            return 1.0  # neurons that all classes weigh alike get their gradient from later steps, by whatever mixture
        apart = SAMPLES_APART * change * sizes[1:] / sizes[0]  # of the rows' quotients, by two samples that differ in one direction
        return float((2 * distance / apart.clamp_min(distance)).clamp_max(1).prod())

    def errors(self, logits: Tensor) -> Tensor:
        """The derivative of the loss at the logits (1, C) under every label: (labels, C)."""
        labels = self.labels.to(logits)
        return self.loss.logit_gradient(logits.expand(len(labels), -1), labels)

    def _change(self, response: Response) -> float:
        """By how much the derivative at the logits differs from that of an empty input, relative to it."""
        return relative_change(self.errors(response.logits), self._errors_of_nothing(response))

    def _others_cancel(self, response: Response) -> bool:
        errors = self.errors(response.logits)
        return labels_can_cancel(errors, self._errors_of_nothing(response), self.labels, self.most_samples)

    def _errors_of_nothing(self, response: Response) -> Tensor:
        """The derivative at the logits of an empty input: (labels, C)."""
        with torch.no_grad():
            return self.errors(self._forward(torch.zeros_like(response.inputs))[0].double())

    def _forward(self, inputs: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The logits of one input (1, C), and the biases that they depend on."""
        parameters = {name: parameter.detach() for name, parameter in self.model.named_parameters()}
        parameters |= {name: parameters[name].clone().requires_grad_() for name in self.biases}
        sample = inputs.reshape(1, *self.shape).to(parameters[self.biases[0]])
        logits = forward(self.model, (parameters, copied_buffers(self.model)), sample).reshape(1, -1)
        return logits, [parameters[name] for name in self.biases]

    def is_possible(self) -> bool:
        """Whether each sample's gradient depends on that sample alone, and can be computed."""
        if mixes_samples(self.model):
            return False
        try:
            self.respond(torch.zeros(self.shape), torch.zeros(1, dtype=torch.int64))
        except (RuntimeError, NotImplementedError, ValueError):
            return False
        return True
