"""The gradient that one input has by itself at a first layer's biases, computed for every label as the client computes it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dosimeter.engines.matching.differentiable import twice_differentiable
from dosimeter.engines.sample_share import mixes_samples, share_of_one_sample
from dosimeter.interfaces import Exposure
from dosimeter.network.probing import copied_buffers, forward

SAME_GRADIENT = 2e-5  # relative difference up to which a gradient is the input's own; single precision gives 1e-6, mixtures some 1e-3
LEAST_CHANGE = 0.01  # relative, of the derivative at the logits from one input to another: with less, inputs cannot be told apart by it
CONSTANT_CHANGE = 2e-3  # likewise: with less, samples whose labels cancel add no weight that shows
LABELS_CANCEL = 1e-4  # distance from a mean of labels up to which a prediction is one
INDEPENDENT = 0.01  # of the largest singular value: from here on a direction counts


@dataclass(frozen=True, kw_only=True)
class Response:
    """What a model makes of one input, in float64."""

    inputs: Tensor  # (d,)
    rows: Tensor  # (m,) the chosen rows
    logits: Tensor  # (1, C)
    slopes: Tensor  # (C, m) the logits' derivatives at the biases of the rows


class OwnGradients:
    """Computes ∂ℓ(x, y)/∂b = Jᵀ ∂ℓ/∂z of an input x under every label y. J is the derivative of the logits z at the biases b.

    `soft` (n, C) are labels that the batch is known to hold. They are tried beside the hard labels.
    """

    def __init__(self, exposure: Exposure, biases: list[str], soft: Tensor | None = None) -> None:
        public = exposure.public
        self.model, self.loss, self.shape, self.biases = exposure.model, public.loss, public.input_shape, biases
        self.share = share_of_one_sample(public)
        hard = torch.eye(public.classes, dtype=torch.float64) if public.classes > 1 else torch.tensor([[0.0], [1.0]], dtype=torch.float64)
        self.labels = hard if soft is None else torch.cat([hard, soft.double().cpu()])

    def respond(self, inputs: Tensor, rows: Tensor) -> Response:
        """The response of the model to one input (d,) at the biases of the rows (m,)."""
        with torch.enable_grad(), twice_differentiable():
            logits, biases = self._forward(inputs)
            direction = torch.zeros_like(logits, requires_grad=True)
            along = torch.autograd.grad(logits, biases, direction, create_graph=True, materialize_grads=True)  # Jᵀ direction
            columns = [torch.autograd.grad(entry, direction, retain_graph=True)[0][0] for entry in torch.cat(along)[rows]]
        return Response(inputs=inputs, rows=rows, logits=logits.detach().double(), slopes=torch.stack(columns, 1).double())

    def explain(self, response: Response, gradient: Tensor) -> bool:
        """Whether one sample with this response has this gradient (m,), under any label.

        A mixture of samples fails. The sum of their weights is not the weight that the model gives the mixture. So the weight alone
        refutes it, even for two classes, where the weights of all rows are proportional. Two copies of a sample fail too: two alike
        samples of one label have the gradient of two copies of their mean, but for the square of what tells them apart.
        """
        if self.share is None or self._others_cancel(response):
            return False
        expected = self.share * self._errors(response.logits) @ response.slopes  # (labels, m)
        return bool(((expected - gradient).norm(dim=1) <= SAME_GRADIENT * gradient.norm()).any())

    def count_independent(self, response: Response) -> int:
        """How many rows weigh the derivative at the logits in linearly independent ways: at most C − 1 for a softmax loss.

        None counts where the model predicts nearly the same for all inputs. Then all samples of a label have the same shares in every row.
        """
        if self._change(response) < LEAST_CHANGE:
            return 0
        slopes = response.slopes - response.slopes.mean(0) if self.loss.shift_invariant else response.slopes
        sizes = torch.linalg.svdvals(slopes / slopes.norm(dim=0).clamp_min(torch.finfo(slopes.dtype).tiny))
        return int((sizes > INDEPENDENT * sizes.max()).sum())

    def _errors(self, logits: Tensor) -> Tensor:
        """The derivative of the loss at the logits (1, C) under every label: (labels, C)."""
        labels = self.labels.to(logits)
        return self.loss.logit_gradient(logits.expand(len(labels), -1), labels)

    def _change(self, response: Response) -> float:
        """By how much the derivative at the logits differs from that of an empty input, relative to it."""
        with torch.no_grad():
            logits = self._forward(torch.zeros_like(response.inputs))[0].double()
        here, there = self._errors(response.logits)[0], self._errors(logits)[0]
        return float((here - there).norm() / here.norm().clamp_min(torch.finfo(here.dtype).tiny))

    def _others_cancel(self, response: Response) -> bool:
        """Whether other samples can share all rows with one sample and add no weight to them.

        Where the model predicts the same p for all inputs, k samples add Σ (p − y_i). This is zero if p is the mean of their labels: for
        p = 1/C, one sample of each class. A mixture of these and one more then has the weight of one sample.
        """
        change = self._change(response)
        if change >= CONSTANT_CHANGE:
            return False
        assert self.share is not None
        predictions = self._errors(response.logits) + self.labels.to(response.logits)  # (labels, C): all p, if the error is p − y
        if bool((predictions - predictions[0]).abs().max() > LABELS_CANCEL):
            return True
        counts = torch.arange(1, round(1 / self.share), device=predictions.device)[:, None]  # of other samples
        sums = counts * predictions[0]
        off = ((sums - sums.round()).abs() / counts).amax(1)
        return bool((off <= LABELS_CANCEL + change).any())

    def _forward(self, inputs: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The logits of one input (1, C), and the biases that they depend on."""
        parameters = {name: parameter.detach() for name, parameter in self.model.named_parameters()}
        parameters |= {name: parameters[name].clone().requires_grad_() for name in self.biases}
        sample = inputs.reshape(1, *self.shape).to(parameters[self.biases[0]])
        logits = forward(self.model, (parameters, copied_buffers(self.model)), sample)
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
