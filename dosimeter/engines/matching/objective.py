"""What is minimised: the distance between the client's update and the replayed one, plus the priors."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dosimeter.client.gradients import eager_gradient, functional_gradient
from dosimeter.client.training import FedSGD, Replayable
from dosimeter.engines.matching.recipe import Recipe
from dosimeter.engines.matching.second_order import lighten
from dosimeter.interfaces import Exposure
from dosimeter.network.copies import deep_copy
from dosimeter.network.probing import InputWatch, copied_buffers
from dosimeter.types import Update

Buffers = dict[str, Tensor]


@dataclass(frozen=True)
class Terms:
    """What changes from step to step. All are tensors of fixed shapes, so that a compiled form can take them."""

    matching: Tensor  # () 1 where the update is matched, 0 before that
    priors: Tensor  # (P,) the weight of each prior
    layers: Tensor | None = None  # (L,) the say of each layer, None: all the same
    masks: tuple[Tensor, ...] | None = None  # per layer, 1 where an entry is seen by both sides


class Objective:
    """The objective of one guessed batch: a pure function of its inputs and label logits.

    The objective owns a copy of the model, in the mode in which the server sent it. Buffers are copied before every forward pass.
    """

    def __init__(self, exposure: Exposure, recipe: Recipe, targets: Tensor | None) -> None:
        self.public, self.recipe = exposure.public, recipe
        self.targets = targets  # (B,) or (B, C); None where the labels are optimised
        self.model = deep_copy(exposure.model)
        lighten(self.model, grouped_only=True)
        self.trainable: Update = {name: p.detach() for name, p in self.model.named_parameters() if p.requires_grad}
        self.names = tuple(name for name in self.trainable if name in exposure.update)
        self.target = {name: exposure.update[name].detach() for name in self.names}
        self.end_to_end = self.channels_last = False
        self.lengths: dict[str, Tensor] = {}  # how many entries a layer has, on the device; where layers lie end to end
        self.sizes = {name: _wide(target).square().sum() for name, target in self.target.items()}
        self._watch_for(recipe)
        if self.replayable:
            self.model.requires_grad_(False)

    def _watch_for(self, recipe: Recipe) -> None:
        """Watch the modules whose inputs the recipe's priors read."""
        self.watched = sorted({name for prior in recipe.priors for name in prior.modules_to_watch(self.model)})
        self.watch = InputWatch(copy.deepcopy(self.model), self.watched) if self.watched else None

    @property
    def replayable(self) -> bool:
        return isinstance(self.public.training, Replayable)

    def under(self, recipe: Recipe) -> Objective:
        """The objective of another recipe on the same update, with the same copy of the model."""
        other = copy.copy(self)
        other.recipe = recipe
        other._watch_for(recipe)
        return other

    def rearrange(self, *, end_to_end: bool = False, channels_last: bool = False) -> Objective:
        """The same objective with layers whose second derivatives are cheapest in a functional form. Values stay the same.

        `end_to_end` compares all layers as one vector, where the distance allows it: on a GPU, one kernel for each layer is slow.
        `channels_last` stores the convolutions' weights in the order that is fastest on GPUs.
        """
        other = copy.copy(self)
        other.model = copy.deepcopy(self.model)
        lighten(other.model, grouped_only=False)
        other.watch = InputWatch(copy.deepcopy(other.model), self.watched) if self.watched else None
        if end_to_end and self.recipe.distance.joint:
            other.end_to_end = True
            other.lengths = {name: torch.tensor(target.numel(), device=target.device) for name, target in self.target.items()}
        if channels_last:
            other.channels_last = True
            other.model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
            other.trainable = {name: _channels_last(p) for name, p in self.trainable.items()}
            other.target = {name: _channels_last(t) for name, t in self.target.items()}
        return other

    def buffers(self) -> Buffers:
        return copied_buffers(self.model)

    def __call__(
        self, inputs: Tensor, logits: Tensor | None, buffers: Buffers, names: Sequence[str], terms: Terms, functional: bool
    ) -> tuple[Tensor, Tensor]:
        """(B, *shape) inputs and (B, C) label logits -> the objective with its priors, and the distance alone."""
        targets = self.targets if logits is None else self.soft_targets(logits)
        assert targets is not None
        update = self.replay(inputs, targets, buffers, names, functional)
        distance = (self._distance_end_to_end if self.end_to_end else self._distance)(update, names, terms)
        total = terms.matching * distance
        if self.recipe.priors:
            seen = self.watch(self.trainable, buffers, inputs) if self.watch else {}
            penalties = torch.stack([_wide(prior(inputs, seen)) for prior in self.recipe.priors])
            total = total + (terms.priors * penalties).sum()
        return total, distance

    def _distance(self, update: Update, names: Sequence[str], terms: Terms) -> Tensor:
        guess = [_wide(update[name]) for name in names]
        target = [_wide(self.target[name]) for name in names]
        sizes = None if terms.masks is not None else torch.stack([self.sizes[name] for name in names])
        if terms.masks is not None:
            guess = [g * mask for g, mask in zip(guess, terms.masks)]
            target = [t * mask for t, mask in zip(target, terms.masks)]
        return self.recipe.distance(guess, target, terms.layers, sizes)

    def _distance_end_to_end(self, update: Update, names: Sequence[str], terms: Terms) -> Tensor:
        """The distance over one vector. A layer's weight w becomes a factor √w on its entries in guess and target, a mask one of 0 or 1."""
        guess, target = (_wide(self._lay_end_to_end([side[name] for name in names])) for side in (update, self.target))
        sizes = torch.stack([self.sizes[name] for name in names])
        factors = None if terms.masks is None else self._lay_end_to_end(terms.masks)
        if terms.layers is not None:
            sizes = terms.layers * sizes
            lengths = torch.stack([self.lengths[name] for name in names])
            roots = terms.layers.sqrt().repeat_interleave(lengths, output_size=len(guess))
            factors = roots if factors is None else roots * factors
        if factors is not None:
            guess, target = guess * factors, target * factors
        return self.recipe.distance([guess], [target], None, None if terms.masks is not None else sizes.sum()[None])

    def _lay_end_to_end(self, tensors: Sequence[Tensor]) -> Tensor:
        """All layers in one vector, each in its order in memory, which saves most copies."""
        return torch.cat([(t.permute(0, 2, 3, 1) if self.channels_last and t.ndim == 4 else t).reshape(-1) for t in tensors])

    def soft_targets(self, logits: Tensor) -> Tensor:
        """What is optimised as targets (B, *output): a distribution over classes, one probability a label, or the numbers themselves."""
        kind = self.public.loss.target_kind()
        if kind == "numbers":
            return logits
        several = self.public.classes > 1
        last = logits.ndim <= 2 or self.public.blank is not None or logits.shape[1] != self.public.classes
        classes = -1 if last else 1
        return logits.softmax(classes) if kind == "classes" and several else logits.sigmoid()

    def replay(self, inputs: Tensor, targets: Tensor, buffers: Buffers, names: Sequence[str], functional: bool) -> Update:
        """The client's training on a guess. FedSGD differentiates only the matched layers; local steps move them all."""
        training, loss = self.public.training, self.public.loss
        with torch.autocast(inputs.device.type, torch.bfloat16, enabled=self.recipe.precision == "bf16"):
            if not isinstance(training, Replayable):
                return training(self.model, inputs.clone(), targets, loss, create_graph=True)  # a model may write into its input
            wanted = names if isinstance(training, FedSGD) else self.trainable
            parameters = {name: self.trainable[name] for name in wanted}
            if functional:
                return training.replay(functional_gradient(self.model, loss), parameters, dict(buffers), inputs, targets)
            leaves = {name: p.detach().requires_grad_() for name, p in parameters.items()}
            return training.replay(eager_gradient(self.model, loss, create_graph=True), leaves, buffers, inputs, targets)


def _wide(tensor: Tensor) -> Tensor:
    """In single precision at least. In half precision, sums over a whole update overflow and cancel."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _channels_last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor
