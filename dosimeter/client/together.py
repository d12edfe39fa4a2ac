"""Several clients of one model that train side by side: their weights lie in one stack, and each step is one pass for all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from dosimeter.client.gradients import Gradient, eager_gradient, leaves
from dosimeter.client.training import FedAvg, FedSGD
from dosimeter.interfaces import Loss, Training
from dosimeter.network.probing import activation_bytes, copied_buffers, forward
from dosimeter.randomness import global_seed
from dosimeter.types import Batch, Refused, Update

STACK_BYTES = 2**28  # of all clients that train side by side
TENSORS_HELD = 8  # of the model's size for each client: weights, gradient, an optimiser's two means, and what a step makes of them
WORTH_STACKING_BYTES = 2**20  # of a mini-batch's activations on a CPU: beyond, convolutions take the time, and stacked ones are slower
PASSES_HELD = 3  # of a mini-batch's activations for each client, those of the backward pass included
TOLERANCE = 1e-4  # of a gradient's largest entry: rounding, where clients share a pass
ROLE = "simulated client"


def train_each(training: Training, model: nn.Module, samples: Batch, chosen: Tensor, loss: Loss, seeds: Sequence[int]) -> Iterator[Update]:
    """The updates of K clients of the samples at `chosen` (K, B), in stacks (k, ...) of as many as train together, in order.

    Each client has a seed of its own, for its order and for what its model draws. Clients train one by one where the model, its loss or
    the training has no form for several at once. The updates are the same to rounding, which local steps may amplify.
    """
    at_once = clients_at_once(training, model, samples, chosen, loss)
    for first in range(0, len(chosen), at_once):
        part = slice(first, first + at_once)
        if at_once > 1:
            yield _side_by_side(training, model, samples, chosen[part], loss, seeds[part])
            continue
        own = chosen[first]
        with global_seed(seeds[first], ROLE):
            update = training(model, samples.inputs[own], samples.targets[own], loss)
        yield {name: change[None] for name, change in update.items()}


def clients_at_once(training: Training, model: nn.Module, samples: Batch, chosen: Tensor, loss: Loss) -> int:
    """How many clients train together, by memory; 1 where they cannot, or where that is no faster."""
    if not isinstance(samples.inputs, Tensor) or len(chosen) < 2 or not _has_stacked_form(training):
        return 1
    passed = (training.mini_batch if isinstance(training, FedAvg) else None) or chosen.shape[1]
    activations = min(passed, chosen.shape[1]) * activation_bytes(model, samples.inputs[:1])
    if activations > WORTH_STACKING_BYTES and not samples.inputs.is_cuda:
        return 1
    held = TENSORS_HELD * sum(parameter.nbytes for parameter in model.parameters()) + PASSES_HELD * activations
    fitting = min(len(chosen), STACK_BYTES // held)
    return int(fitting) if fitting > 1 and _agrees(training, model, samples, chosen[:2, :passed], loss) else 1


def _has_stacked_form(training: Training) -> bool:
    if isinstance(training, FedAvg):
        try:
            training.step()
        except Refused:
            return False
        return training.max_norm is None and training.autocast is None
    return isinstance(training, FedSGD)


def _agrees(training: Training, model: nn.Module, samples: Batch, chosen: Tensor, loss: Loss) -> bool:
    """Whether two clients' first gradients are the same together as alone. A model that draws random numbers has no such pass."""
    two = {name: torch.stack([parameter.detach(), 1.01 * parameter.detach()]) for name, parameter in leaves(model).items()}
    places = torch.arange(chosen.shape[1], device=chosen.device)[:, None].expand(-1, 2)
    alone = eager_gradient(model, loss, create_graph=False)
    try:
        together = _stacked_gradient(model, samples, chosen, loss)(two, {}, places, places)
        for client, own in enumerate(chosen):
            at = {name: weight[client] for name, weight in two.items()}
            with torch.random.fork_rng(devices=[]):
                slopes = alone(at, copied_buffers(model), samples.inputs[own], samples.targets[own])
            for name, slope in slopes.items():
                if bool((together[name][client] - slope).abs().max() > TOLERANCE * slope.abs().max()):
                    return False
                if isinstance(training, FedAvg) and training.decays and not bool(slope.any()):
                    return False  # an optimiser leaves out what the loss does not reach
    except Exception:  # tracing fails in as many ways as there are models
        return False
    return True


def _side_by_side(training: Training, model: nn.Module, samples: Batch, chosen: Tensor, loss: Loss, seeds: Sequence[int]) -> Update:
    assert isinstance(training, FedAvg | FedSGD)
    clients, size = chosen.shape
    weights = {name: parameter.detach().expand(clients, *parameter.shape) for name, parameter in leaves(model).items()}
    gradient = _stacked_gradient(model, samples, chosen, loss)
    if isinstance(training, FedSGD):
        places = torch.arange(size, device=chosen.device)[:, None].expand(-1, clients)
        return training.replay(gradient, weights, {}, places, places)
    orders = []
    for seed in seeds:
        with global_seed(seed, ROLE):
            orders.append(training.visits(size))
    places = torch.stack([order for order, _ in orders], 1).to(chosen.device)  # (samples in the order of all steps, clients)
    return training.replay_on(gradient, weights, {}, places, places, orders[0][1], size)


def _stacked_gradient(model: nn.Module, samples: Batch, chosen: Tensor, loss: Loss) -> Gradient:
    """The gradients of all clients at their own weights (k, ...), each of its own mini-batch: the samples at these places (b, k)."""
    buffers, clients = copied_buffers(model), torch.arange(len(chosen), device=chosen.device)

    def value(weights: Update, inputs: Tensor, targets: Tensor) -> Tensor:
        return loss(forward(model, (weights, buffers), inputs), targets)

    each = vmap(grad(value))

    def gradient(weights: Update, _: dict[str, Tensor], places: Tensor, __: Tensor) -> Update:
        own = chosen[clients[:, None], places.T]  # (k, b)
        return each(weights, samples.inputs[own], samples.targets[own])

    return gradient
