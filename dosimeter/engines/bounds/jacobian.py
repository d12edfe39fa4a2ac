"""How the update that a client sends answers to a change of one of its samples."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import grad, jvp, vjp, vmap

from dosimeter.client.gradients import functional_gradient, per_sample_gradients
from dosimeter.client.training import Replayable
from dosimeter.interfaces import Client, Mechanism
from dosimeter.network.copies import deep_copy
from dosimeter.network.probing import copied_buffers, forward
from dosimeter.options import first_line
from dosimeter.types import Refused, Update

VALUES_AT_ONCE = 2**26  # of per-sample gradients held in memory at one time
ENTRIES_AT_ONCE = 2**24  # of updates pushed forward, with what each local step holds beside them
LARGEST_MISFIT = 1e-6  # relative, in float64; rounding stays far below


class Jacobian:
    """J = ∂(update / noise) / ∂(one sample's input), as products with vectors. The matrix itself is never formed.

    The other samples of the batch and all labels stay as they are: an attacker who knows them does no worse than one who does not.
    """

    def __init__(self, mechanism: Mechanism) -> None:
        self.mechanism = mechanism
        self.separable = mechanism.client.training.sample_term({}) is not None and _is_mean_over_samples(mechanism.client)
        self.replayed = isinstance(mechanism.client.training, Replayable)

    def normal(self, sample: int, points: Tensor, directions: Tensor) -> Tensor:
        """Jᵀ J v for the sample with each of the inputs `points` (n, *shape), and v in `directions` (n, *shape).

        JᵀJ is the Fisher information of the noisy update about that input.
        """
        if self.separable:
            try:
                return self._normal_together(sample, points, directions)
            except (RuntimeError, NotImplementedError):  # an operation of the model that cannot be batched or pushed forward
                self.separable = False
        return torch.stack([self._normal_of_one(sample, x, v) for x, v in zip(points, directions)])

    def sent(self, sample: int, points: Tensor) -> Tensor:
        """The update with each of `points` (n, *shape) as the sample, in units of its noise: (n, entries)."""
        update = self._own_part(sample) if self.separable else partial(self.update, sample)
        return torch.stack([_flat(update(point)).detach() for point in points])

    @property
    def entries(self) -> int:
        """Of the model's update."""
        return sum(p.numel() for p in self.mechanism.client.model.parameters() if p.requires_grad)

    def columns(self, sample: int, point: Tensor, directions: Tensor) -> Tensor:
        """J v for v in `directions` (n, *shape), every layer in one row: (n, entries)."""
        return self.pushed(sample, point.expand(len(directions), *point.shape), directions)

    def pushed(self, sample: int, points: Tensor, directions: Tensor) -> Tensor:
        """J v with each of `points` (n, *shape) as the sample, for its own v of `directions` (n, *shape): (n, entries)."""
        points, directions = points.detach(), directions.to(points)
        if self.separable:
            try:
                return self._pushed_together(self._own_part(sample), points, directions)
            except (RuntimeError, NotImplementedError):  # an operation of the model that cannot be batched or pushed forward
                self.separable = False
        if self.replayed:
            try:
                return self._pushed_together(self._replay(sample), points, directions)
            except (RuntimeError, NotImplementedError):
                self.replayed = False
        return torch.stack([_flat(self.forward(sample, point, direction)) for point, direction in zip(points, directions)])

    def _pushed_together(self, sent: Callable[[Tensor], Update], points: Tensor, directions: Tensor) -> Tensor:
        size = max(1, ENTRIES_AT_ONCE // max(1, self.entries))
        return vmap(lambda point, direction: _flat(jvp(sent, (point,), (direction,))[1]), chunk_size=size)(points, directions).detach()

    def _normal_together(self, sample: int, points: Tensor, directions: Tensor) -> Tensor:
        """All inputs in one pass, where the update is a mean of terms of single samples."""
        sent = self._own_part(sample)

        def product(point: Tensor, direction: Tensor) -> Tensor:
            pushed = jvp(sent, (point,), (direction,))[1]
            return vjp(sent, point)[1](pushed)[0]

        size = max(1, VALUES_AT_ONCE // max(1, self.entries))
        pieces = zip(points.split(size), directions.to(points).split(size))
        return torch.cat([vmap(product)(*piece) for piece in pieces]).detach()

    def _own_part(self, sample: int) -> Callable[[Tensor], Update]:
        """What is sent as a pure function of one sample's input, where the update is a mean of terms of single samples."""
        client = self.mechanism.client
        inputs, target = client.batch.inputs, client.batch.targets[sample]
        parameters = {name: p.detach() for name, p in client.model.named_parameters() if p.requires_grad}
        buffers, count = copied_buffers(client.model), len(inputs)

        def loss(parameters: Update, point: Tensor) -> Tensor:
            return client.loss(forward(client.model, (parameters, buffers), point[None]), target[None])

        def term(point: Tensor) -> Update:
            own = client.training.sample_term(grad(loss)(parameters, point)) or {}
            return {name: change / count for name, change in own.items()}

        whole = client.training(client.model, inputs, client.batch.targets, client.loss)
        own = term(inputs[sample])
        others = {name: change - own[name] for name, change in whole.items()}

        def sent(point: Tensor) -> Update:
            return self._sent({name: others[name] + change for name, change in term(point).items()})

        return sent

    def _replay(self, sample: int) -> Callable[[Tensor], Update]:
        """What is sent as a pure function of one sample's input, where the training is made of gradients of the whole batch."""
        client = self.mechanism.client
        training, gradient, inputs = client.training, functional_gradient(client.model, client.loss), client.batch.inputs
        assert isinstance(training, Replayable)
        parameters = {name: p.detach() for name, p in client.model.named_parameters() if p.requires_grad}

        def sent(point: Tensor) -> Update:
            together = torch.cat((inputs[:sample], point[None], inputs[sample + 1 :]))
            return self._sent(training.replay(gradient, parameters, copied_buffers(client.model), together, client.batch.targets))

        return sent

    def _normal_of_one(self, sample: int, point: Tensor, direction: Tensor) -> Tensor:
        pushed = self.forward(sample, point, direction)
        point = point.detach().clone().requires_grad_()
        update = self.update(sample, point)
        return _gradient(list(update.values()), point, [pushed[name] for name in update], create_graph=False).detach()

    def update(self, sample: int, point: Tensor) -> Update:
        """The layers that are sent, in units of their noise, as a differentiable function of one sample's input (*shape)."""
        client = self.mechanism.client
        inputs = torch.cat((client.batch.inputs[:sample], point[None], client.batch.inputs[sample + 1 :]))
        update = client.training(client.model, inputs, client.batch.targets, client.loss, create_graph=True)
        return self._sent(update)

    def forward(self, sample: int, point: Tensor, direction: Tensor) -> Update:
        """J v for v of the input's shape, layer by layer."""
        point = point.detach()
        try:
            with forward_ad.dual_level():
                update = self.update(sample, forward_ad.make_dual(point, direction.to(point)))
                pushed = {name: forward_ad.unpack_dual(change).tangent for name, change in update.items()}
            return {name: torch.zeros_like(update[name]) if change is None else change.detach() for name, change in pushed.items()}
        except NotImplementedError:
            return self.forward_by_two_backward_passes(sample, point, direction.to(point))

    def forward_by_two_backward_passes(self, sample: int, point: Tensor, direction: Tensor) -> Update:
        """J v as the derivative of u ↦ vᵀ Jᵀ u, for layers without a rule for forward differentiation."""
        point = point.detach().clone().requires_grad_()
        update = self.update(sample, point)
        dual = {name: torch.zeros_like(change, requires_grad=True) for name, change in update.items()}
        pulled = _gradient(list(update.values()), point, list(dual.values()), create_graph=True)
        pushed = torch.autograd.grad(pulled, list(dual.values()), direction, allow_unused=True, materialize_grads=True)
        return dict(zip(dual, pushed))

    def _sent(self, update: Update) -> Update:
        """What leaves the client, in units of its noise."""
        for transform in self.mechanism.transforms:
            update = transform(update)
        return {name: update[name] / floor for name, floor in self.mechanism.floors.items()}


def _is_mean_over_samples(client: Client) -> bool:
    """Whether the update of the batch is the mean of the samples' own terms: no model joins samples, no loss sums or weighs them."""
    norms = [module for module in client.model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    if any(norm.training or norm.running_mean is None for norm in norms):
        return False
    whole = client.training(deep_copy(client.model), client.batch.inputs, client.batch.targets, client.loss)
    try:
        own = per_sample_gradients(deep_copy(client.model), client.batch.inputs, client.batch.targets, client.loss, wanted_by="a ceiling")
    except (RuntimeError, NotImplementedError):
        return False
    count = len(client.batch.inputs)
    terms = [client.training.sample_term({name: rows[place] for name, rows in own.items()}) or {} for place in range(count)]
    missed = [float((whole[name] - sum(term[name] for term in terms) / count).norm()) for name in whole]
    return math.hypot(*missed) <= LARGEST_MISFIT * math.hypot(*(float(change.norm()) for change in whole.values()))


def _flat(update: Update) -> Tensor:
    return torch.cat([change.flatten() for change in update.values()]) if update else torch.zeros(1)


def _gradient(outputs: list[Tensor], point: Tensor, dual: list[Tensor], *, create_graph: bool) -> Tensor:
    reached = [(output, weight) for output, weight in zip(outputs, dual) if output.requires_grad]
    if not reached:
        return torch.zeros_like(point)
    try:
        (pulled,) = torch.autograd.grad(
            [output for output, _ in reached],
            point,
            [weight for _, weight in reached],
            create_graph=create_graph,
            allow_unused=True,
            materialize_grads=True,
        )
    except (NotImplementedError, RuntimeError) as error:
        raise Refused(f"the update cannot be differentiated by the inputs: {first_line(error)}") from error
    return pulled
