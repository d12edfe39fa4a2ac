"""GGL and GIAS: search what a decoder can draw for the images whose gradient is the client's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Generator, Tensor

from dosimeter.engines.decoder.drawing import DrawsWithDecoder
from dosimeter.engines.decoder.latent import Latent, descend, evaluate, evolve, specialise
from dosimeter.engines.decoder.nulls import decoder_nulls
from dosimeter.engines.matching.differentiable import reason_against, twice_differentiable
from dosimeter.engines.matching.distances import Cosine
from dosimeter.engines.matching.optimisers import Adam
from dosimeter.engines.matching.problem import Problem, make_problem
from dosimeter.engines.matching.recipe import Recipe
from dosimeter.engines.matching.schedules import Rate
from dosimeter.engines.matching.state import begin
from dosimeter.interfaces import Exposure
from dosimeter.normalization import to_pixels
from dosimeter.options import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from dosimeter.registry import ATTACKS
from dosimeter.types import Knowledge, LabelEstimate, Outcome, Reconstruction, Refused


@ATTACKS.register("generative_prior")
@dataclass(frozen=True, kw_only=True)
class GenerativePrior(DrawsWithDecoder):
    """Searches the latent space of a decoder, trained on auxiliary images, for a batch whose gradient points where the client's does.

    `search="descent"`: the latent stage of Jeon et al., "Gradient Inversion with Generative Image Prior" (GIAS), NeurIPS 2021, Eq. (5).
    `generator_steps` adds its second stage: each sample's own copy of the generator is trained on the match, at the latent found.
    `search="evolution"`: Li et al., "Auditing Privacy Defenses in Federated Learning via Generative Gradient Leakage" (GGL), CVPR 2022,
    Eq. (6), by covariance-matrix adaptation. Evolution needs no slope, so it also works where defenses leave none.
    Departures: the generator is the decoder of `fgla` and `rgla`, no GAN. The first `dimensions` principal axes of the auxiliary
    features span the latent space. `penalty` keeps coordinates near their mean. The covariance is diagonal.
    """

    needs: ClassVar[frozenset[Knowledge]] = frozenset({Knowledge.LABELS, Knowledge.AUXILIARY})
    matches: ClassVar = "direction"
    quick: ClassVar[dict[str, Any]] = {"steps": 60, "width": 32}

    search: Literal["descent", "evolution"] = "descent"
    steps: PositiveInt = 500
    learning_rate: PositiveFloat = 0.05
    population: PositiveInt = 16
    dimensions: PositiveInt = 64
    penalty: NonNegativeFloat = 1e-3
    generator_steps: NonNegativeInt = 0  # of GIAS's second stage
    generator_rate: PositiveFloat = 1e-3

    def __call__(self, exposure: Exposure, labels: LabelEstimate | None, rng: Generator) -> Reconstruction:
        assert exposure.auxiliary is not None
        target, trained = self.obtain_decoder(exposure)
        known = to_pixels(exposure.auxiliary.inputs, target.normalization).clamp(0, 1)
        latent = Latent.of(target, trained.decoder, known, self.dimensions, rng)
        recipe = Recipe(distance=Cosine(), optimiser=Adam(), rate=Rate(start=self.learning_rate), steps=self.steps)
        problem = make_problem(exposure, labels, recipe)
        first = begin(problem, rng).variables
        start = 0.1 * torch.randn(problem.guess.shape[0], len(latent.axes), generator=rng, device=rng.device).to(latent.axes)
        if self.search == "descent" or self.generator_steps:
            _refuse_without_slope(problem, first)
        if self.search == "descent":
            found, reached = descend(latent, problem, start, steps=self.steps, rate=self.learning_rate, penalty=self.penalty)
        else:
            found, reached = evolve(latent, problem, start, rng, steps=self.steps, population=self.population, penalty=self.penalty)
        with torch.no_grad():
            inputs = latent.draw(found)
        if self.generator_steps:
            inputs, later = specialise(latent, problem, found, steps=self.generator_steps, rate=self.generator_rate)
            reached = [*reached, *later]
        distance = float(evaluate(problem, inputs[None]).distance[0])
        assert problem.guess.targets is not None
        return Reconstruction(
            inputs=inputs,
            labels=problem.guess.targets.clone(),
            objective=min(reached),
            distance=distance,
            normalization=exposure.public.normalization,
            outcome=Outcome.COMPLETED if torch.isfinite(torch.tensor(distance)) else Outcome.DIVERGED,
            message=f"{trained.origin}; cosine distance {reached[0]:.3g} at the start, {distance:.3g} at the end",
            nulls=decoder_nulls(exposure, target, trained.decoder, rng, count=len(inputs)),
        )


def _refuse_without_slope(problem: Problem, variables: Tensor) -> None:
    with twice_differentiable():
        reason = reason_against(problem, variables)
    if reason:
        raise Refused(f'{reason}; search="evolution" without generator_steps needs no gradient')
