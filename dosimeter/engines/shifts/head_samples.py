"""Samples out of their mixtures by the head's features: the rest of the model carries the right mixture to a feature that is proved.

A sample's map is c M, with M the B mixtures and c unknown. The model behind the layer carries it to the head's input f. The head's own
gradient gives f with a certificate (engines/subspace). So there are as many equations as features for B unknowns. Gauss-Newton solves
them. It begins at the corners of the polytope of all mixtures that nowhere fall below the activation's least value (`floors`). Where
batch norm in train mode ties the samples together, all are solved for at once (`head_batches`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from dosimeter.engines.shifts.convolutions import ConvolutionLayer
from dosimeter.engines.shifts.floors import find_corners, find_floor
from dosimeter.engines.shifts.head_batches import HeadSamples, JointProblem, unmix_batch
from dosimeter.engines.shifts.layout import NoLayout
from dosimeter.engines.subspace.problem import separate_head
from dosimeter.interfaces import Exposure
from dosimeter.linear_fit import linear_fit
from dosimeter.network.head import find_head
from dosimeter.network.tail import Tail, find_tail
from dosimeter.randomness import generator
from dosimeter.types import Refused

LARGEST_RESIDUAL = 1e-3  # of a feature, relative; what is left of it also widens the error bar
STEPS = 15  # of Gauss-Newton
STEP = 1e-6  # of the differences that stand for derivatives, relative
ERROR_SLACK = 8.0


def unmix_by_head(exposure: Exposure, layer: ConvolutionLayer, mixtures: Tensor, seed: int = 0) -> HeadSamples:
    """(B, H·W, in) mixtures -> the samples whose features are the head's; refuses where the head or the tail does not tell all of them."""
    samples = len(mixtures)
    proved = _proved_features(exposure, samples, seed)
    if proved is None:
        raise _untold(f"the head's gradient does not prove {samples} features")
    features, bars = proved
    tail = _tail(exposure, layer, samples)
    if tail is None:
        raise _untold("a shortcut leads past the layer")
    scale = mixtures.flatten(1).norm(dim=1, keepdim=True)  # (B, 1)
    mixtures = mixtures / scale[:, :, None]
    floor = find_floor(exposure, layer)
    corners = find_corners(mixtures.flatten(1), floor.value, np.random.default_rng(seed))
    found = None
    if _keeps_samples_apart(tail, layer, mixtures):
        problem = _Problem(tail=tail, layer=layer, mixtures=mixtures)
        found = None if corners is None else _one_by_one(problem, features, bars, corners.coefficients)
    elif not floor.hard:
        raise _untold("batch norm in train mode ties the samples together, and the activation has no least value that maps come down to")
    elif corners is not None and len(corners.samples) == samples:
        found = unmix_batch(JointProblem(tail=tail, mixtures=_grid(mixtures, layer)), features, bars, corners.samples, floor)
    if found is None:
        raise _untold("no mixture of the maps leads to them")
    return HeadSamples(mixing=found.mixing / scale.T, errors=found.errors)


def _untold(reason: str) -> NoLayout:
    return NoLayout(f"the layer's inputs can be negative, and the head's samples do not tell its samples apart: {reason}")


def _one_by_one(problem: _Problem, features: Tensor, bars: Tensor, starts: Tensor) -> HeadSamples | None:
    """Each start goes to its nearest feature, then to its second nearest, and so on."""
    samples = len(features)
    found: dict[int, tuple[float, Tensor]] = {}
    similar = torch.cdist(problem.features(starts), features)
    for turn in range(samples):
        wanted = similar.argsort(1)[:, turn]
        missing = torch.tensor([int(feature) not in found for feature in wanted])
        if not bool(missing.any()):
            continue
        wanted = wanted[missing]
        ends, residual = problem.solve(starts[missing], features[wanted])
        for end, feature, off in zip(ends, wanted.tolist(), residual.tolist()):
            if off < LARGEST_RESIDUAL and off < found.get(feature, (torch.inf, end))[0]:
                found[feature] = off, end
        if len(found) == samples:
            break
    if len(found) < samples:
        return None
    mixing = torch.stack([found[index][1] for index in range(samples)])
    return HeadSamples(mixing=mixing, errors=problem.errors(mixing, features, bars))


@dataclass(frozen=True, kw_only=True)
class _Problem:
    """The features of mixtures, as a function of their coefficients c (m, B). The tail always runs as many samples as it has probes."""

    tail: Tail
    layer: ConvolutionLayer
    mixtures: Tensor  # (B, H·W, in)

    def features(self, coefficients: Tensor) -> Tensor:
        """(m, B) -> (m, H)"""
        room = len(self.tail.probes)
        padded = torch.cat([coefficients, coefficients[:1].expand(-len(coefficients) % room, -1)])
        parts = [self.tail(_grid(torch.einsum("mb,bqc->mqc", part, self.mixtures), self.layer)) for part in padded.split(room)]
        return torch.cat(parts)[: len(coefficients)]

    def slopes(self, coefficients: Tensor) -> Tensor:
        """The features' derivatives: (m, H, B)."""
        step = STEP * coefficients.norm(dim=1, keepdim=True)
        columns = []
        for unknown in torch.eye(coefficients.shape[1]).to(coefficients):
            ahead, behind = self.features(coefficients + step * unknown), self.features(coefficients - step * unknown)
            columns.append((ahead - behind) / (2 * step))
        return torch.stack(columns, -1)

    def solve(self, starts: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """Gauss-Newton with halved steps where the residual would grow: (m, B), and the relative residuals (m,)."""
        here, size = starts, wanted.norm(dim=1)
        off = wanted - self.features(here)
        for _ in range(STEPS):
            step = linear_fit(self.slopes(here), off[:, :, None])[:, :, 0]
            before = off.norm(dim=1)
            length, trial = torch.ones_like(before), wanted - self.features(here + step)
            for _ in range(3):
                if bool((trial.norm(dim=1) <= before).all()):
                    break
                length = torch.where(trial.norm(dim=1) > before, length / 3, length)
                trial = wanted - self.features(here + length[:, None] * step)
            better = trial.norm(dim=1) <= before
            here = torch.where(better[:, None], here + length[:, None] * step, here)
            off = torch.where(better[:, None], trial, off)
            if bool(((off.norm(dim=1) / size < 1e-7) | (before - off.norm(dim=1) < 1e-9 * size)).all()):
                break
        return here, off.norm(dim=1) / size

    def errors(self, coefficients: Tensor, wanted: Tensor, bars: Tensor) -> Tensor:
        """The relative error of each map that follows from what is left of its feature, and from the feature's own error bar: (B,).

        A fit in B unknowns leaves little of a feature's error, and takes the rest of it into the map.
        """
        slopes, off = self.slopes(coefficients), (wanted - self.features(coefficients)).norm(dim=1)
        flat = self.mixtures.flatten(1)
        triangle = torch.linalg.qr(flat.T, mode="r").R  # (B, B): a map's norm is that of triangle c
        spread = torch.linalg.matrix_norm(triangle @ torch.linalg.pinv(slopes), 2)  # (m,)
        missed = torch.hypot(ERROR_SLACK * off, bars.to(off) * wanted.norm(dim=1))
        return missed * spread / (coefficients @ flat).norm(dim=1)


def _proved_features(exposure: Exposure, samples: int, seed: int) -> tuple[Tensor, Tensor] | None:
    """The head's features (B, H) and their error bars (B,), where every sample is certified, else None.

    The layer's spectrum has told the number of samples, which the head takes as declared. Samples that merged into one would share a
    weight that no equal shares fit, or be as many in each.
    """
    exposure = replace(exposure, public=replace(exposure.public, batch_size=samples))
    try:
        head = find_head(exposure)
        if head.weight_gradient is None:
            return None
        rng = generator(seed, "the head's samples", head.weight_gradient.device)
        found = separate_head(exposure, head, None, rng, method="maps", attempts=4, starts=8)
    except Refused:
        return None
    return (found.features.double(), found.error_bar.double()) if found.complete and len(found.features) == samples else None


def _tail(exposure: Exposure, layer: ConvolutionLayer, count: int) -> Tail | None:
    parameter = next(exposure.model.parameters())
    return find_tail(exposure.model, layer.name, find_head(exposure).name, torch.zeros(count, *exposure.public.input_shape).to(parameter))


def _keeps_samples_apart(tail: Tail, layer: ConvolutionLayer, mixtures: Tensor) -> bool:
    """Whether a sample's feature depends on its own map alone, as it does not behind a batch norm in train mode."""
    maps = _grid(mixtures[:1].expand(len(tail.probes), -1, -1), layer).clone()
    if len(maps) == 1:
        return True
    before = tail(maps)
    maps[1:] *= 1.1
    return torch.equal(before[0], tail(maps)[0]) or torch.allclose(before[0], tail(maps)[0], rtol=1e-9, atol=0)


def _grid(maps: Tensor, layer: ConvolutionLayer) -> Tensor:
    """(m, H·W, in) -> (m, in, H, W), or (m, in) for a linear layer."""
    if layer.module.weight.ndim == 2:
        return maps.flatten(1)
    return maps.transpose(1, 2).reshape(len(maps), -1, layer.height, layer.width)
