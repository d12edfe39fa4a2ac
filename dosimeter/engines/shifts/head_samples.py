"""Samples out of their mixtures by the head's features: the rest of the model carries the right mixture to a feature that is proved.

A sample's map is c M, with M the B mixtures and c unknown. The model behind the layer carries it to the head's input f. The head's own
gradient gives f with a certificate (engines/subspace). So there are as many equations as features for B unknowns. Gauss-Newton solves
them. It begins at the corners of the polytope of all mixtures that nowhere fall below the activation's least value.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import linprog
from torch import Tensor

from dosimeter.engines.shifts.convolutions import ConvolutionLayer
from dosimeter.engines.subspace.problem import separate_head
from dosimeter.interfaces import Exposure
from dosimeter.linear_fit import linear_fit
from dosimeter.network.head import find_head
from dosimeter.network.layer_shapes import PROBES
from dosimeter.network.probing import input_of
from dosimeter.network.tail import Tail, find_tail
from dosimeter.normalization import from_pixels
from dosimeter.randomness import generator
from dosimeter.types import Refused

LARGEST_RESIDUAL = 1e-4  # of a feature, relative
STEPS = 15  # of Gauss-Newton
CORNERS = 3  # that are tried for each sample
STEP = 1e-6  # of the differences that stand for derivatives, relative
ROWS = 4000  # of a linear program
ERROR_SLACK = 8.0


@dataclass(frozen=True, kw_only=True)
class HeadSamples:
    """How each sample is mixed, in its own scale, with the error that the features leave."""

    mixing: Tensor  # (B, B)
    errors: Tensor  # (B,) relative, of the maps


def unmix_by_head(exposure: Exposure, layer: ConvolutionLayer, mixtures: Tensor, seed: int = 0) -> HeadSamples | None:
    """(B, H·W, in) mixtures -> the samples whose features are the head's; None where the head or the tail does not tell all of them."""
    samples = len(mixtures)
    features = _proved_features(exposure, samples, seed)
    if features is None:
        return None
    tail = _tail(exposure, layer, CORNERS * samples)
    if tail is None or not _keeps_samples_apart(tail, layer, mixtures):
        return None
    scale = mixtures.flatten(1).norm(dim=1, keepdim=True)  # (B, 1)
    problem = _Problem(tail=tail, layer=layer, mixtures=mixtures / scale[:, :, None])
    starts = problem.corners(_least_value(exposure, layer), np.random.default_rng(seed))
    if starts is None:
        return None
    found: dict[int, tuple[float, Tensor]] = {}
    reached = problem.features(starts)
    similar = torch.cdist(reached, features)
    for turn in range(samples):  # each start goes to its nearest feature, then to its second nearest, and so on
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
    errors = problem.errors(mixing, features)
    return HeadSamples(mixing=mixing / scale.T, errors=errors)


@dataclass(frozen=True, kw_only=True)
class _Problem:
    """The features of mixtures, as a function of their coefficients c (m, B). The tail always runs as many samples as it has probes."""

    tail: Tail
    layer: ConvolutionLayer
    mixtures: Tensor  # (B, H·W, in)

    def features(self, coefficients: Tensor) -> Tensor:
        """(m, B) -> (m, H)"""
        room = len(self.tail.probes)
        padded = torch.cat([coefficients, coefficients[:1].expand(max(room - len(coefficients), 0), -1)])
        return self.tail(_grid(torch.einsum("mb,bqc->mqc", padded, self.mixtures), self.layer))[: len(coefficients)]

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

    def errors(self, coefficients: Tensor, wanted: Tensor) -> Tensor:
        """The relative error of each map that follows from what is left of its feature: (B,)."""
        slopes, off = self.slopes(coefficients), (wanted - self.features(coefficients)).norm(dim=1)
        flat = self.mixtures.flatten(1)
        triangle = torch.linalg.qr(flat.T, mode="r").R  # (B, B): a map's norm is that of triangle c
        spread = torch.linalg.matrix_norm(triangle @ torch.linalg.pinv(slopes), 2)  # (m,)
        return ERROR_SLACK * off * spread / (coefficients @ flat).norm(dim=1)

    def corners(self, least: float, rng: np.random.Generator) -> Tensor | None:
        """Coefficients (m, B) of mixtures that nowhere fall below `least`, each at a corner that a random objective leads to."""
        flat = self.mixtures.flatten(1).T.cpu().numpy()  # (entries, B)
        samples = flat.shape[1]
        if samples == 1:
            scale = abs(least) / np.abs(flat).max()
            return torch.tensor([[sign * scale * factor] for sign in (1, -1) for factor in (1.0, 3.0, 10.0)]).to(self.mixtures)
        if not np.isfinite(least):
            return None
        rows = flat[rng.choice(len(flat), min(len(flat), ROWS), replace=False)]
        found = []
        for _ in range(CORNERS * samples):
            objective = rng.standard_normal(samples) @ (flat.T @ flat / len(flat))
            for _ in range(20):
                answer = linprog(objective, -rows, np.full(len(rows), -least), bounds=(None, None), method="highs")
                if answer.status:
                    break
                heights = flat @ answer.x
                violated = np.flatnonzero(heights < least * (1 + 1e-6))
                if len(violated) == 0:
                    found.append(answer.x)
                    break
                rows = np.concatenate([rows, flat[violated[np.argsort(heights[violated])[: 10 * samples]]]])
        return torch.tensor(np.array(found)).to(self.mixtures) if found else None


def _proved_features(exposure: Exposure, samples: int, seed: int) -> Tensor | None:
    """The head's features (B, H) where every sample is certified, else None."""
    try:
        head = find_head(exposure)
        if head.weight_gradient is None:
            return None
        rng = generator(seed, "the head's samples", head.weight_gradient.device)
        found = separate_head(exposure, head, None, rng, method="maps", attempts=4, starts=8)
    except Refused:
        return None
    return found.features.double() if found.complete and len(found.features) == samples else None


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


def _least_value(exposure: Exposure, layer: ConvolutionLayer) -> float:
    """The least that the layer's inputs can be, as far as probes tell."""
    rng = generator(0, "probes of the convolutions")
    pixels = torch.rand(8 * PROBES, *exposure.public.input_shape, generator=rng)
    probes = from_pixels(pixels, exposure.public.normalization).to(next(exposure.model.parameters()))
    return float(input_of(exposure.model, layer.name, probes).min())


def _grid(maps: Tensor, layer: ConvolutionLayer) -> Tensor:
    """(m, H·W, in) -> (m, in, H, W), or (m, in) for a linear layer."""
    if layer.module.weight.ndim == 2:
        return maps.flatten(1)
    return maps.transpose(1, 2).reshape(len(maps), -1, layer.height, layer.width)
