"""How the update that a client sends answers to a change of one of its samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd import forward_ad

from dosimeter.interfaces import Client
from dosimeter.types import Refused, Update


@dataclass(frozen=True, kw_only=True)
class SampleJacobian:
    """J = ∂(update / noise) / ∂(one sample's input), as products with vectors. The matrix itself is never formed.

    The other samples of the batch and all labels stay as they are: an attacker who knows them does no worse than one who does not.
    `deviations` holds the standard deviation of the noise in each layer's entries. A layer that is absent from it was not sent.
    `transform` is what the client does to the update before the noise; it must be continuous.
    """

    client: Client
    sample: int
    deviations: Mapping[str, float]
    transform: Callable[[Update], Update] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.client.batch.inputs.shape[1:])

    def at(self, point: Tensor) -> SampleJacobian:
        """The same sample with the input `point` (*shape) in place of its own."""
        inputs = self.client.batch.inputs.clone()
        inputs[self.sample] = point
        batch = type(self.client.batch)(inputs, self.client.batch.targets)
        return SampleJacobian(
            client=type(self.client)(**{**vars(self.client), "batch": batch}),
            sample=self.sample,
            deviations=self.deviations,
            transform=self.transform,
        )

    def update(self, point: Tensor) -> dict[str, Tensor]:
        """The layers that are sent, in units of their noise, as a differentiable function of the sample's input (*shape)."""
        client = self.client
        inputs = torch.cat((client.batch.inputs[: self.sample], point[None], client.batch.inputs[self.sample + 1 :]))
        update = client.training(client.model, inputs, client.batch.targets, client.loss, create_graph=True)
        if self.transform is not None:
            update = self.transform(update)
        return {name: update[name] / deviation for name, deviation in self.deviations.items() if name in update}

    def forward(self, direction: Tensor) -> dict[str, Tensor]:
        """J v for v of the input's shape, layer by layer."""
        point = self.client.batch.inputs[self.sample].detach()
        try:
            with forward_ad.dual_level():
                update = self.update(forward_ad.make_dual(point, direction.to(point)))
                pushed = {name: forward_ad.unpack_dual(change).tangent for name, change in update.items()}
            return {name: torch.zeros_like(update[name]) if change is None else change.detach() for name, change in pushed.items()}
        except NotImplementedError:
            return self._forward_by_two_backward_passes(point, direction.to(point))

    def _forward_by_two_backward_passes(self, point: Tensor, direction: Tensor) -> dict[str, Tensor]:
        """J v as the derivative of u ↦ vᵀ Jᵀ u, for layers without a rule for forward differentiation."""
        point = point.requires_grad_()
        update = self.update(point)
        dual = {name: torch.zeros_like(change, requires_grad=True) for name, change in update.items()}
        pulled = _gradient(list(update.values()), point, list(dual.values()), create_graph=True)
        pushed = torch.autograd.grad(pulled, list(dual.values()), direction, allow_unused=True, materialize_grads=True)
        return dict(zip(dual, pushed))

    def normal(self, direction: Tensor) -> Tensor:
        """Jᵀ J v, of the input's shape: the Fisher information's product with v."""
        pushed = self.forward(direction)
        point = self.client.batch.inputs[self.sample].detach().clone().requires_grad_()
        update = self.update(point)
        return _gradient(list(update.values()), point, [pushed[name] for name in update], create_graph=False).detach()


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
        reason = str(error).strip().splitlines()[0]
        raise Refused(f"the update cannot be differentiated by the inputs: {reason}") from error
    return pulled
