"""Other batches with the same update, built from the batch itself: what they do not share with it, no certificate can honestly claim.

Only the campaign builds them, since it has the batch. Each is checked by the update that it gives.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Generator, Tensor, nn

import dosimeter as dm

SINGLE_PRECISION = 1e-6  # relative, within which two machines give the same update
TRIES = 6  # directions
FREE = 6  # dimensions in which a direction is drawn
INSIDE = 0.9  # of the way to the border of the linear region, or of the data range


def split_copies(model: nn.Module, batch: dm.Batch, sample: int, distance: float) -> dm.Batch | None:
    """The batch with two copies of a sample moved apart, by at least this relative distance; None where none is found.

    Within a linear region, and along directions that no logit sees, two copies and two samples around them have the same gradient. Outside
    of it the gradients differ by the square of a small step, which single precision hides. Copies under the two labels of two classes have
    parallel gradients, so that steps in the inverse ratio cancel.
    """
    exact, inputs = copy.deepcopy(model).double(), batch.inputs.double()
    centre, label = inputs[sample], int(batch.targets[sample])
    odds = exact(centre[None])[0].softmax(0).detach()
    copies = [
        other
        for other in range(len(inputs))
        if other != sample and torch.equal(inputs[other], centre) and (int(batch.targets[other]) == label or len(odds) == 2)
    ]
    if not copies:
        return None
    other = int(batch.targets[copies[0]])
    ratio = -1.0 if other == label else float(odds[other] / odds[label])  # of the copy's step to the sample's
    wanted = dm.observe(exact, dm.Batch(inputs, batch.targets)).update
    rng, least = Generator().manual_seed(sample), distance * float(centre.norm())
    steps = [step / max(1.0, abs(ratio)) for step in _unseen_directions(exact, centre, rng)]
    steps += [step for step in _small_steps(centre, 1.01 * least, rng) if float(_range(centre, step.flatten())) >= max(1.0, abs(ratio))]
    for step in steps:
        moved = inputs.clone()
        moved[sample], moved[copies[0]] = centre + step, centre + ratio * step
        if float(step.norm()) > least and _same(dm.observe(exact, dm.Batch(moved, batch.targets)).update, wanted):
            return dm.Batch(moved, batch.targets)
    return None


def _small_steps(inputs: Tensor, size: float, rng: Generator) -> list[Tensor]:
    """Steps of this size, in pixels that lie between the ends of the data range."""
    room = torch.minimum(inputs, 1 - inputs).clamp_min(0)
    drawn = [torch.randn(inputs.shape, generator=rng, dtype=torch.float64).sign() * room for _ in range(TRIES)]
    return [size / float(step.norm()) * step for step in drawn if bool(step.any())]


def _unseen_directions(model: nn.Module, inputs: Tensor, rng: Generator) -> list[Tensor]:
    """Steps from the input that stay in its linear region and in the data range both ways, and change no logit."""

    def values(sample: Tensor) -> tuple[Tensor, Tensor]:
        kept: list[Tensor] = []
        hooks = [
            module.register_forward_hook(lambda *call: kept.append(call[2])) for module in model.modules() if isinstance(module, nn.Linear)
        ]
        logits = model(sample[None])[0]
        for hook in hooks:
            hook.remove()
        return torch.cat([value.flatten() for value in kept[:-1]]), logits

    before, logits = (value.detach() for value in values(inputs))
    slopes, seen = (jacobian.flatten(1) for jacobian in torch.autograd.functional.jacobian(values, inputs))
    room = torch.minimum(before.abs(), (before - 6).abs())  # to the kinks of ReLU and ReLU6
    order = (room / slopes.norm(dim=1).clamp_min(1e-12)).argsort()
    found = []
    near = max(inputs.numel() - len(logits) - FREE, 0)
    for count in (near, near // 2, near // 4, 0):
        fixed = torch.cat([seen, slopes[order[:count]]])
        basis = torch.linalg.svd(fixed, full_matrices=True)[2][torch.linalg.matrix_rank(fixed) :]  # (free, d)
        for _ in range(TRIES if len(basis) else 0):
            step = torch.randn(len(basis), generator=rng, dtype=torch.float64) @ basis
            kinks = (room / (slopes @ step).abs().clamp_min(1e-12))[order[count:]].tolist()
            most = min([*kinks, float(_range(inputs, step))])
            found.append((INSIDE * most * step).reshape(inputs.shape))
    return sorted(found, key=lambda step: -float(step.norm()))


def _range(inputs: Tensor, step: Tensor) -> Tensor:
    """How far the input may go along a step, both ways, until a pixel leaves [0, 1]."""
    pixels = inputs.flatten()
    return (torch.minimum(pixels, 1 - pixels).clamp_min(0) / step.abs().clamp_min(1e-12)).min()


def _same(update: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> bool:
    return all(float((update[name] - wanted[name]).norm()) <= SINGLE_PRECISION * float(wanted[name].norm()) for name in wanted)
