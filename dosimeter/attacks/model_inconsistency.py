"""Model inconsistency: one client gets the model, all others a dead copy, so that the sum of their updates is the one client's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Generator, Tensor, nn

from dosimeter.attacks.inverting_gradients import InvertingGradients
from dosimeter.client.training import MeanOfClients
from dosimeter.interfaces import ActiveAttack, Exposure
from dosimeter.labels.idlg import IDLG
from dosimeter.network.copies import deep_copy
from dosimeter.network.input_shape import find_head_name, find_input_shape
from dosimeter.network.per_client import PerClient, silence
from dosimeter.options import NonNegativeInt, PositiveFloat, PositiveInt
from dosimeter.randomness import generator
from dosimeter.registry import ATTACKS
from dosimeter.types import Knowledge, LabelEstimate, Reconstruction, Refused

PROBES = 8


@ATTACKS.register("model_inconsistency")
@dataclass(frozen=True, kw_only=True)
class ModelInconsistency(ActiveAttack):
    """Sends every client but one a dead model, so that secure aggregation shows the one client's update alone.

    Pasquini, Francati & Ateniese, "Eluding Secure Aggregation in Federated Learning via Model Inconsistency", CCS 2022: gradient
    suppression, from memory of the paper. A layer with zero weights and negative biases kills the ReLU behind it. So a dead model's
    features are zero, whatever the input, and its update is zero but for the bias of the last layer. The mean of N samples' updates,
    times N over the target client's samples, is then the target's own update, without that bias.
    The target client's model is unchanged: `inspect` cannot see anything there. It can at the others, whose outputs do not depend on the
    input.
    Departures: where one dead layer does not kill the features, as in residual networks, all layers before the last are dead. What the
    update then shows is read by `inverting_gradients`, with labels by `idlg` for a single sample. Without secure aggregation there is
    nothing to elude.
    """

    needs: ClassVar[frozenset[Knowledge]] = frozenset({Knowledge.TAMPERED_MODEL, Knowledge.BATCH_SIZE})

    target: NonNegativeInt = 0  # the client, by its number
    input_shape: tuple[PositiveInt, ...] | None = None
    steps: PositiveInt = 2400
    restarts: PositiveInt = 1
    seconds: PositiveFloat | None = None

    def tamper(self, model: nn.Module) -> PerClient:
        shape = self.input_shape or find_input_shape(model)
        head = find_head_name(model, shape)
        named = [name for name, module in model.named_modules() if next(module.parameters(recurse=False), None) is not None]
        before = [name for name in named if name != head]
        for silenced in (before[-1:], before):
            if silenced and _is_dead(silence(model, tuple(silenced)), head, shape):
                return PerClient(deep_copy(model), self.target, tuple(silenced)).train(model.training)
        raise Refused("model_inconsistency kills the features by ReLUs; this model's features stay alive with dead layers before them")

    def isolate(self, exposure: Exposure) -> Exposure:
        """What the target client sent, without the last layer's bias."""
        model, training, size = exposure.model, exposure.public.training, exposure.public.batch_size
        if not isinstance(model, PerClient):
            raise Refused("model_inconsistency needs clients that were sent models of their own: observe its tamper(model)")
        if not isinstance(training, MeanOfClients):
            raise Refused("model_inconsistency eludes secure aggregation, and this client is alone: its update is seen as it is")
        if self.target >= training.clients:
            raise Refused(f"model_inconsistency.target: expected a client in 0..{training.clients - 1}, got {self.target}")
        assert size is not None  # in `needs`
        own = training.sizes[self.target] if training.sizes else len(torch.arange(size).tensor_split(training.clients)[self.target])
        head = find_head_name(model, exposure.public.input_shape)
        update = {name: size / own * change for name, change in exposure.update.items() if name != f"{head}.bias"}
        defenses = tuple(one for one in exposure.public.defenses if one.name != "secure_aggregation")
        public = replace(exposure.public, batch_size=own, training=training.each, defenses=defenses)
        return replace(exposure, update=update, public=public)

    def __call__(self, exposure: Exposure, labels: LabelEstimate | None, rng: Generator) -> Reconstruction:
        alone = self.isolate(exposure)
        own = alone.public.batch_size
        if own != 1 and (labels is None or len(labels.labels) != own):
            raise Refused(
                f"model_inconsistency matches the target's {own} samples and needs their labels: the aggregate shows a single one's"
            )
        known = IDLG()(alone, rng) if own == 1 else labels
        found = InvertingGradients(steps=self.steps, restarts=self.restarts, seconds=self.seconds)(alone, known, rng)
        note = f"client {self.target}'s update of {own} samples stood alone in the aggregate"
        return replace(found, message="; ".join(part for part in (note, found.message) if part))


def _is_dead(model: nn.Module, head: str, shape: tuple[int, ...]) -> bool:
    """Whether the model sends no gradient but that of the head's bias, on inputs of noise."""
    model = deep_copy(model)
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    first = next(iter(parameters.values()))
    probes = torch.randn(PROBES, *shape, generator=generator(0, "inconsistency probes")).to(first)
    with torch.random.fork_rng(), torch.enable_grad():
        outputs = model(probes)
        gradients = torch.autograd.grad(outputs[:, 0].sum(), list(parameters.values()), allow_unused=True)
    bias = f"{head}.bias" if head else "bias"
    alive = [name for name, gradient in zip(parameters, gradients) if isinstance(gradient, Tensor) and bool(gradient.any())]
    return set(alive) <= {bias}
