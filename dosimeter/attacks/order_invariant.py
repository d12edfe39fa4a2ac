"""Inputs behind local epochs whose order nobody knows: guesses for each epoch, and a prior that they are the same samples."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Generator, Tensor

from dosimeter.client.training import FedAvg
from dosimeter.engines.matching.attack import MatchingAttack, objective_at
from dosimeter.engines.matching.consistency import consensus
from dosimeter.engines.matching.distances import Cosine
from dosimeter.engines.matching.epochs_apart import EpochsApart, SameInEveryEpoch
from dosimeter.engines.matching.optimisers import Adam
from dosimeter.engines.matching.priors import TotalVariation
from dosimeter.engines.matching.recipe import Path, Recipe
from dosimeter.engines.matching.schedules import Rate
from dosimeter.engines.matching.solve import solve
from dosimeter.interfaces import Exposure
from dosimeter.options import NonNegativeFloat, PositiveFloat, PositiveInt
from dosimeter.registry import ATTACKS
from dosimeter.types import Knowledge, LabelEstimate, Reconstruction, Refused

TRIAL = 0.1  # share of the steps that each way to deal out the labels is tried for
LEAST_TRIAL = 40  # steps, before which objectives tell little


@ATTACKS.register("order_invariant")
@dataclass(frozen=True, kw_only=True)
class OrderInvariant(MatchingAttack):
    """Replays all local steps with guesses of their own for each epoch, and asks that every epoch's guesses be the same samples.

    Dimitrov et al., "Data Leakage in Federated Averaging", TMLR 2022: simulated local steps that are differentiated through, inputs for
    each epoch, the epoch order-invariant prior, and a final assignment of the epochs' inputs to one another whose mean is the answer.
    Departures: cosine distance with signed steps, as in `inverting_gradients`. The aggregate of the prior is the mean image of each label.
    Labels are given, or recovered by another method. Of several ways to deal them out to the mini-batches, the one with the lowest
    objective is taken.
    """

    needs: ClassVar[frozenset[Knowledge]] = frozenset({Knowledge.LABELS})
    reads_any_update: ClassVar[bool] = True
    quick: ClassVar[dict[str, Any]] = {"steps": 200}

    steps: PositiveInt = 1000
    dealings: PositiveInt = 8  # ways to deal the labels out to the mini-batches, of which the best after a tenth of the steps goes on
    learning_rate: PositiveFloat = 0.1
    invariance: NonNegativeFloat = 0.1  # weight of the prior that epochs agree
    total_variation: NonNegativeFloat = 1e-3
    seconds: PositiveFloat | None = None
    path: Path = "auto"

    def __call__(self, exposure: Exposure, labels: LabelEstimate | None, rng: Generator) -> Reconstruction:
        assert labels is not None
        if labels.soft is not None:
            raise Refused("order_invariant takes one label for each sample, not soft labels")
        dealings = [labels.labels, *(_dealt(labels.labels, rng) for _ in range(self.dealings - 1))]
        trials = [self._solve(exposure, dealt, rng, min(self.steps, max(LEAST_TRIAL, round(TRIAL * self.steps)))) for dealt in dealings]
        best = min(range(len(trials)), key=lambda place: trials[place].objective)
        found = self._solve(exposure, dealings[best], rng, self.steps, start=trials[best].inputs)
        by_epoch = found.inputs.reshape(-1, len(labels.labels), *found.inputs.shape[1:])
        return replace(found, inputs=consensus(by_epoch, dealings[best])[0], labels=dealings[best])

    def _solve(self, exposure: Exposure, dealt: Tensor, rng: Generator, steps: int, start: Tensor | None = None) -> Reconstruction:
        """The guesses of all epochs, one after the other, under labels in this order in each of them."""
        unrolled, epochs = _unrolled(exposure, len(dealt))
        ids = dealt.repeat(epochs)
        repeated = LabelEstimate(counts=torch.bincount(ids, minlength=exposure.public.classes), labels=ids)
        recipe = Recipe(
            distance=Cosine(),
            optimiser=Adam(sign="signed"),
            rate=Rate(start=self.learning_rate),
            steps=steps,
            priors=(
                TotalVariation(weight=self.total_variation),
                SameInEveryEpoch(weight=self.invariance, labels=tuple(dealt.tolist())),
            ),
            seconds=self.seconds,
            path=self.path,
        )
        return solve(unrolled, repeated, rng, recipe, start=start)

    def objective(self, exposure: Exposure, found: Reconstruction, inputs: Tensor, targets: Tensor) -> float | None:
        """At other samples, in their own order in every epoch: an upper bound, as the client's order may fit better."""
        if not isinstance(found.recipe, Recipe):
            return None
        unrolled, epochs = _unrolled(exposure, len(targets))
        classes = tuple((targets.argmax(1) if targets.ndim == 2 else targets).tolist())
        priors = tuple(replace(prior, labels=classes) if isinstance(prior, SameInEveryEpoch) else prior for prior in found.recipe.priors)
        recipe = replace(found.recipe, priors=priors)
        return objective_at(
            unrolled, recipe, inputs.repeat(epochs, *[1] * (inputs.ndim - 1)), targets.repeat(epochs, *[1] * (targets.ndim - 1))
        )


def _dealt(labels: Tensor, rng: Generator) -> Tensor:
    return labels[torch.randperm(len(labels), generator=rng, device=rng.device).to(labels.device)]


def _unrolled(exposure: Exposure, size: int) -> tuple[Exposure, int]:
    """The exposure as one of a client with new samples in every epoch, and the number of epochs."""
    training = exposure.public.training
    if not isinstance(training, FedAvg):
        raise Refused(f"order_invariant needs one client with local epochs (fedavg); this one sends {training.name}")
    apart = EpochsApart(each=training, batch_size=size)
    epochs = apart.epochs()
    return replace(exposure, public=replace(exposure.public, training=apart, batch_size=epochs * size)), epochs
