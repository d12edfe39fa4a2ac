"""The Bayesian attacker: the inputs that are likeliest, given the update, the declared noise and what pictures look like."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Generator, Tensor

from dosimeter.engines.matching.attack import MatchingAttack
from dosimeter.engines.matching.distances import AbsoluteError, Distance, SquaredError
from dosimeter.engines.matching.optimisers import Adam
from dosimeter.engines.matching.priors import TotalVariation
from dosimeter.engines.matching.recipe import Path, Recipe
from dosimeter.engines.matching.schedules import Rate
from dosimeter.engines.matching.solve import solve
from dosimeter.interfaces import Exposure
from dosimeter.options import PositiveFloat, PositiveInt
from dosimeter.registry import ATTACKS
from dosimeter.types import Knowledge, LabelEstimate, Reconstruction

NEIGHBOURS = 0.05  # mean absolute difference of neighbouring pixels in natural pictures: public knowledge, not the client's data
LEAST_NOISE = 1e-3  # of the update's root mean square: what optimisation leaves, where no noise is declared


@ATTACKS.register("bayesian")
@dataclass(frozen=True, kw_only=True)
class Bayesian(MatchingAttack):
    """Maximises the posterior: the likelihood of the update under the declared noise, times a prior on pictures.

    Balunović, Dimitrov, Staab & Vechev, "Bayesian Framework for Gradient Leakage", ICLR 2022: arg max log p(g | x) + log p(x) (thesis Table
    2.1). Gaussian noise of σ makes −log p(g | x) = Σ (g − g(x))²/2σ², Laplace noise of scale b Σ |g − g(x)|/b. Adam, as in their code.
    An audit replays pruning and weighs layers by their own noise, as for every attack that matches.
    Departures: neighbouring pixels differ by a Laplace distribution, half of whose two differences a pixel count. So the prior's weight
    follows from the noise and is no option. Its scale is measured on auxiliary data, where there are any. Where no noise is declared, a
    thousandth of the update stands in. The prior's support is the data range.
    """

    needs: ClassVar[frozenset[Knowledge]] = frozenset({Knowledge.LABELS})
    matches: ClassVar = "whole"
    quick: ClassVar[dict[str, Any]] = {"steps": 300}

    steps: PositiveInt = 4000
    restarts: PositiveInt = 1
    learning_rate: PositiveFloat = 0.1
    patience: PositiveInt | None = None
    seconds: PositiveFloat | None = None
    path: Path = "auto"

    def __call__(self, exposure: Exposure, labels: LabelEstimate | None, rng: Generator) -> Reconstruction:
        distance, weight = self.posterior(exposure)
        recipe = Recipe(
            distance=distance,
            optimiser=Adam(),
            rate=Rate(start=self.learning_rate),
            steps=self.steps,
            restarts=self.restarts,
            priors=(TotalVariation(weight=weight),) if weight else (),
            patience=self.patience,
            seconds=self.seconds,
            path=self.path,
        )
        return solve(exposure, labels, rng, recipe)

    def posterior(self, exposure: Exposure) -> tuple[Distance, float]:
        """−log p(x | g) over a constant: a distance relative to the update's size, and the weight of the total variation beside it.

        With N pixels and differences of scale s, −log p(x) = N/2s · total variation. The distance is the likelihood's exponent times
        2σ²/‖g‖², or times b/‖g‖₁. So is the prior.
        """
        public, sent = exposure.public, list(exposure.update.values())
        noisy = [one for one in public.defenses if one.adds_noise()]
        entries = sum(change.numel() for change in sent)
        size = public.batch_size or 1
        # of all entries: layers whose noise differs were weighed by it before
        variance = sum(math.fsum(one.noise_floor(change, size) ** 2 for one in noisy) * change.numel() for change in sent) / entries
        slopes = math.prod(public.input_shape) * size / (2 * _difference_scale(exposure))
        if len(noisy) == 1 and noisy[0].noise_shape == "laplace":
            return AbsoluteError(), slopes * math.sqrt(variance) / max(_total(sent, absolute=True), math.ulp(0.0))
        whole = max(_total(sent, absolute=False), math.ulp(0.0))
        return SquaredError(relative=True), slopes * 2 * max(variance, LEAST_NOISE**2 * whole / entries) / whole


def _total(changes: list[Tensor], *, absolute: bool) -> float:
    return sum(float(change.abs().sum() if absolute else change.square().sum()) for change in changes)


def _difference_scale(exposure: Exposure) -> float:
    """The mean absolute difference of neighbouring pixels, in the inputs' own units."""
    public, auxiliary = exposure.public, exposure.auxiliary
    if auxiliary is not None and auxiliary.inputs.ndim >= 4:
        down, right = auxiliary.inputs.diff(dim=-2).abs().mean(), auxiliary.inputs.diff(dim=-1).abs().mean()
        return max(float(down + right) / 2, 1e-6)
    return NEIGHBOURS / (sum(public.normalization.std) / len(public.normalization.std))
