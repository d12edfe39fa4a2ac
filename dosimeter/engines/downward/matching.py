"""Pictures where the maps do not determine them: Adam on waves, first on the maps alone, then on the gradients of the layers below too.

The slopes behind the lowest maps are exact. So the gradients of the layers below follow from a guess by a forward and a backward pass
through these layers alone, whatever the guess would lead to above. At the right inputs they are those of the update. Each layer's
gradient counts alike: the distance is the mean of 1 − cosine over the layers. Inverting Gradients (Geiping et al., NeurIPS 2020) has one
cosine over all of a model's layers, and slopes that depend on the guess.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Generator, Tensor

from dosimeter.engines.downward.inversion import MapTargets, narrowest
from dosimeter.engines.downward.layers import find_layers
from dosimeter.engines.downward.norms import fix_norms
from dosimeter.engines.downward.pictures import Descent
from dosimeter.engines.downward.waves import Waves
from dosimeter.engines.matching.compiled import Recorded
from dosimeter.interfaces import Exposure
from dosimeter.network.tape import tensors_of
from dosimeter.normalization import input_bounds
from dosimeter.precision import tf32
from dosimeter.progress import advance
from dosimeter.types import Refused

WARMING = 20  # steps over which the rate rises
SLOWER = 8.0  # times that a step on the gradients takes longer than one on the maps
SHOWN = 25  # steps between two reports
Terms = tuple[Tensor, Tensor, Tensor]  # the objective, the distance, and the slopes at the unknowns


@dataclass(frozen=True, kw_only=True)
class Matching:
    """How the matching goes."""

    approach: int = 2000  # steps on the maps alone
    steps: int = 0  # on maps and gradients
    learning_rate: float = 0.03
    approach_variation: float = 0.05  # weight of the total variation while the maps count alone
    total_variation: float = 0.1
    map_weight: float = 1.0
    precision: Literal["fp32", "tf32"] = "fp32"
    seconds: float | None = None  # for both


@dataclass(frozen=True, kw_only=True)
class Matched:
    """Pictures, and how far their gradients are from the update's."""

    inputs: Tensor  # (B, *shape)
    objective: float
    distance: float | None  # none without steps on the gradients


def match(exposure: Exposure, descent: Descent, rng: Generator, how: Matching, start: Tensor | None = None) -> Matched:
    """Inputs that lead to the maps of the descent, and to the gradients below them. Begins at grey, or at `start` (B, *shape)."""
    if how.steps and descent.cut is None:
        raise Refused("maps: matching needs the slopes behind the lowest maps, and the gradients do not tell them here")
    like = next(exposure.model.parameters())
    low, high = input_bounds(exposure.public.normalization, like.new_zeros(descent.tape.inputs))
    waves = Waves.of(descent.tape.inputs, low, high)
    unknowns = waves.faint(rng) if start is None else waves.unknowns(start)
    below = _Below.of(exposure, descent)
    began, objective, distance = time.monotonic(), math.inf, None
    with tf32(how.precision == "tf32"):
        if how.approach:
            share = None if how.seconds is None else how.seconds * how.approach / (how.approach + SLOWER * how.steps)
            terms = _terms(waves, below.maps, how.approach_variation)
            unknowns, objective, _ = _adam(terms, unknowns, how.approach, how.learning_rate, share, "approaching")
        if how.steps:
            left = None if how.seconds is None else how.seconds - (time.monotonic() - began)
            terms = _terms(waves, lambda inputs: below.gradients(inputs, how.map_weight), how.total_variation)
            unknowns, objective, distance = _adam(terms, unknowns, how.steps, how.learning_rate, left, "matching")
    return Matched(inputs=waves.inputs(waves.shares(unknowns)), objective=objective, distance=distance)


@dataclass(frozen=True, kw_only=True)
class _Below:
    """The layers below the cut: maps and gradients that a guess leads to there."""

    targets: MapTargets
    cut: int
    slopes: Tensor
    weights: Sequence[str]
    gradients_sent: Sequence[Tensor]

    @classmethod
    def of(cls, exposure: Exposure, descent: Descent) -> _Below:
        like = next(exposure.model.parameters())
        tape, tensors = fix_norms(descent.tape, tensors_of(exposure.model))
        cut, slopes = (0, like.new_zeros(1)) if descent.cut is None else descent.cut
        known = [one for one in descent.known if one.value <= cut] or narrowest(tape, descent.known, descent.head)
        known = [replace(one, maps=one.maps.to(like)) for one in known]
        layers = [layer for several in find_layers(tape, exposure.update).values() for layer in several if layer.output <= cut]
        names = [layer.weight for layer in layers]
        targets = MapTargets(tape=tape, tensors=tensors, maps=known)
        sent = [exposure.update[name].to(like) for name in names]
        return cls(targets=targets, cut=cut, slopes=slopes.to(like), weights=names, gradients_sent=sent)

    def maps(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """The maps' misfit, twice."""
        misfit = self.targets.residuals(inputs).square().sum(1).mean()
        return misfit, misfit

    def gradients(self, inputs: Tensor, map_weight: float) -> tuple[Tensor, Tensor]:
        """The distance of the gradients with the maps' misfit, and the distance alone."""
        tensors = dict(self.targets.tensors)
        weights = [tensors[name].detach().requires_grad_() for name in self.weights]
        tensors |= dict(zip(self.weights, weights))
        values = [one.value for one in self.targets.maps]
        *reached, top = self.targets.tape.run({0: inputs}, tensors, [*values, self.cut])
        found = torch.autograd.grad((top * self.slopes).sum(), weights, create_graph=True)
        cosines = [torch.cosine_similarity(one.flatten(), sent.flatten(), 0) for one, sent in zip(found, self.gradients_sent)]
        distance = 1 - torch.stack(cosines).mean()
        return distance + map_weight * self.targets.compare(reached).square().sum(1).mean(), distance


def _terms(waves: Waves, objective: Callable[[Tensor], tuple[Tensor, Tensor]], variation: float) -> Callable[[Tensor], Terms]:
    def terms(unknowns: Tensor) -> Terms:
        with torch.enable_grad():
            leaf = unknowns.detach().requires_grad_()
            shares = waves.shares(leaf)
            total, distance = objective(waves.inputs(shares))
            if variation and shares.ndim == 4:
                down, right = shares[..., 1:, :] - shares[..., :-1, :], shares[..., 1:] - shares[..., :-1]
                total = total + variation * (down.abs().mean() + right.abs().mean())
            (slopes,) = torch.autograd.grad(total, leaf)
        return total.detach(), distance.detach(), slopes

    return terms


def _adam(
    terms: Callable[[Tensor], Terms], start: Tensor, steps: int, rate: float, seconds: float | None, word: str
) -> tuple[Tensor, float, float]:
    """Adam along half a cosine, over the steps or the seconds, whichever end first: the unknowns, the objective and the distance."""
    unknowns = start.detach().clone()
    function = Recorded(terms, (unknowns,)) if unknowns.is_cuda else terms
    adam = torch.optim.Adam([unknowns], lr=rate, betas=(0.9, 0.99))
    began, objective, distance = time.monotonic(), math.inf, math.inf
    for step in range(steps):
        spent = 0.0 if seconds is None else (time.monotonic() - began) / max(seconds, 1e-9)
        done = max(step / steps, spent)
        if done >= 1 and step:
            break
        adam.param_groups[0]["lr"] = rate * (1 + math.cos(math.pi * min(done, 1.0))) / 2 * min(1.0, (step + 1) / WARMING)
        total, apart, slopes = function(unknowns)
        assert total is not None
        assert apart is not None
        unknowns.grad = slopes
        adam.step()
        if step % SHOWN == 0 or step + 1 == steps:
            objective, distance = float(total), float(apart)
            advance(step + 1, steps, f"{word}, objective {objective:.3g}")
    return unknowns.detach(), objective, distance
