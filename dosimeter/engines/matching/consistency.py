"""Group consistency: restarts that agree on the gradient are pulled towards what they agree on."""

from __future__ import annotations

import dataclasses

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from dosimeter.engines.matching.guess import Guess
from dosimeter.engines.matching.paths import Evaluation
from dosimeter.metrics.registration import register


def with_consistency(evaluation: Evaluation, guess: Guess, variables: Tensor, weight: float, *, registered: bool = False) -> Evaluation:
    """Add weight × the mean squared difference to the consensus, which is held still, and its gradient."""
    inputs, _ = guess.unpack(variables)  # (R, B, *shape)
    away = inputs - consensus(inputs, guess.targets, registered=registered)
    size = inputs[0].numel()
    penalty = away.flatten(1).square().sum(1) / size
    return dataclasses.replace(
        evaluation, objective=evaluation.objective + weight * penalty, inputs=evaluation.inputs + 2 * weight / size * away
    )


def consensus(inputs: Tensor, targets: Tensor | None, *, registered: bool = False) -> Tensor:
    """The mean over restarts of what is the same sample, in each restart's own order: (R, B, *shape).

    Yin et al., CVPR 2021, Eq. (11): with `registered`, each restart's picture is first laid over the plain mean. Departures: shifts and
    mirroring in place of optical flow. The mean is over samples; where a label occurs more than once, the restarts may have found its
    samples in another order, so they are first paired with those of the first restart, at the least squared difference.
    """
    order = torch.stack([_order(inputs[r], inputs[0], targets) for r in range(len(inputs))])  # (R, B): own slot of each common one
    rows = torch.arange(len(inputs), device=inputs.device)[:, None]
    common = inputs[rows, order]  # (R, B, *shape), in the first restart's order
    mean = common.mean(0)
    if registered and inputs.ndim == 5:
        mean = torch.stack([register(samples, mean) for samples in common]).mean(0)
    return mean[order.argsort(1)]


def _order(samples: Tensor, reference: Tensor, targets: Tensor | None) -> Tensor:
    """For each sample of `reference`, the slot in `samples` that is closest among those of its label: (B,)."""
    straight = torch.arange(len(samples), device=samples.device)
    if targets is not None and (targets.ndim == 2 or len(targets.unique()) == len(targets)):
        return straight
    cost = torch.cdist(reference.flatten(1), samples.flatten(1)).square()
    if targets is not None:
        cost = cost.masked_fill(targets[:, None] != targets[None, :], float(cost.max()) * len(samples) + 1)
    return torch.as_tensor(linear_sum_assignment(cost.cpu().numpy())[1], device=samples.device)
