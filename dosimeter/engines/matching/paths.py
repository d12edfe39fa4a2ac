"""How the objective and its gradient are evaluated: by plain eager double backward, or in a functional form."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import grad, vmap

from dosimeter.engines.matching.objective import Buffers, Objective, Terms


@dataclass(frozen=True)
class Evaluation:
    """The objective of R restarts, and its gradient."""

    objective: Tensor  # (R,)
    distance: Tensor  # (R,)
    inputs: Tensor  # (R, B, *shape) the gradient at the inputs
    logits: Tensor | None  # (R, B, C) the gradient at the label logits


class Evaluator(ABC):
    """Evaluates the objective and its gradient for all restarts."""

    one_layer_set: bool = False  # True: wants the same layers at every step, and weights that switch them off
    note: str = ""  # what the caller should know of this evaluator

    def __init__(self, objective: Objective) -> None:
        self.objective, self.name = objective, type(self).__name__.lower()

    @abstractmethod
    def __call__(self, inputs: Tensor, logits: Tensor | None, names: Sequence[str], terms: Terms) -> Evaluation: ...


class Eager(Evaluator):
    """Double backward by autograd, one restart after the other."""

    def __call__(self, inputs: Tensor, logits: Tensor | None, names: Sequence[str], terms: Terms) -> Evaluation:
        evaluations = [self._one(inputs[r], None if logits is None else logits[r], names, terms) for r in range(len(inputs))]
        objective, distance, slope, label_slope = zip(*evaluations)
        together = None if logits is None else torch.stack([s for s in label_slope if s is not None])
        return Evaluation(torch.stack(objective), torch.stack(distance), torch.stack(slope), together)

    def _one(
        self, inputs: Tensor, logits: Tensor | None, names: Sequence[str], terms: Terms
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        inputs = inputs.detach().requires_grad_()
        logits = None if logits is None else logits.detach().requires_grad_()
        with torch.enable_grad():
            total, distance = self.objective(inputs, logits, self.objective.buffers(), names, terms, functional=False)
            variables = [inputs] if logits is None else [inputs, logits]
            slopes = torch.autograd.grad(total, variables, allow_unused=True, materialize_grads=True)
        return total.detach(), distance.detach(), slopes[0], None if logits is None else slopes[1]


class Functional(Evaluator):
    """`grad(distance(grad(loss)))`, all restarts in one forward pass."""

    def __call__(self, inputs: Tensor, logits: Tensor | None, names: Sequence[str], terms: Terms) -> Evaluation:
        return self.evaluate(inputs, logits, self._buffers(len(inputs)), tuple(names), terms)

    def evaluate(self, inputs: Tensor, logits: Tensor | None, buffers: Buffers, names: tuple[str, ...], terms: Terms) -> Evaluation:
        def one(guess: Tensor, guessed_logits: Tensor | None, own_buffers: Buffers) -> tuple[Tensor, Tensor]:
            return self.objective(guess, guessed_logits, own_buffers, names, terms, functional=True)

        def total(guess: Tensor, guessed_logits: Tensor | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            if len(guess) == 1:
                alone = None if guessed_logits is None else guessed_logits[0]
                objective, distance = one(guess[0], alone, {name: buffer[0] for name, buffer in buffers.items()})
                return objective, (objective[None], distance[None])
            label_dimension = None if guessed_logits is None else 0
            together = vmap(one, in_dims=(0, label_dimension, 0), randomness="different")
            objective, distance = together(guess, guessed_logits, buffers)
            return objective.sum(), (objective, distance)

        if logits is None:
            slope, (objective, distance) = grad(lambda guess: total(guess, None), has_aux=True)(inputs)
            return Evaluation(objective, distance, slope, None)
        (slope, label_slope), (objective, distance) = grad(total, argnums=(0, 1), has_aux=True)(inputs, logits)
        return Evaluation(objective, distance, slope, label_slope)

    def _buffers(self, restarts: int) -> Buffers:
        return {name: buffer.expand(restarts, *buffer.shape) for name, buffer in self.objective.buffers().items()}
