"""GradFilt: a filter in the last layer lets through the gradients of chosen classes alone."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from torch import Generator, nn

from dosimeter.attacks.imprint import read_inserted_layer
from dosimeter.attacks.inverting_gradients import InvertingGradients
from dosimeter.engines.bins.inserted_layer import Functional, InsertedLayer, Moments, insert_layer, measure_moments
from dosimeter.engines.head_filter import BIAS, calibrate, plant_filter, require_filtering, restore_labels
from dosimeter.engines.matching.distances import SquaredError
from dosimeter.engines.matching.optimisers import Adam
from dosimeter.engines.matching.priors import TotalVariation
from dosimeter.engines.matching.recipe import Path, Precision, Recipe
from dosimeter.engines.matching.schedules import Layers, Rate
from dosimeter.engines.matching.solve import solve, start_distance
from dosimeter.interfaces import ActiveAttack, Exposure
from dosimeter.network.bottleneck import narrowest
from dosimeter.network.head import find_head
from dosimeter.network.input_shape import find_head_name, find_input_shape
from dosimeter.options import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from dosimeter.randomness import generator
from dosimeter.registry import ATTACKS
from dosimeter.types import Knowledge, LabelEstimate, Normalization, Outcome, Reconstruction

BINS_PER_TARGET = 8
FEWEST_BINS = 128  # the thesis's number
FUNCTIONALS: tuple[Functional, ...] = ("brightness", "random", "random", "random", "random")
FADING = (0.3, 1e-3)  # total variation's weight at the start and at the end, as shares of the start's distance
RESTARTS, TRIAL, KEPT = 8, 0.375, 4  # starts where samples share a mean feature, and after which share of the steps how many go on
ALIKE = 1.1  # guesses whose objectives are within this factor of the lowest are not told apart by it
ROOMY = 1.15  # bins a target sample from which five functionals settle all of them; with fewer bins fewer functionals show more


@ATTACKS.register("gradfilt")
@dataclass(frozen=True, kw_only=True)
class GradFilt(ActiveAttack):
    """Lets only the target classes' samples through the last layer, and reconstructs those, however large the batch.

    Zhang, Guo and Li, "GradFilt: Class-wise Targeted Data Reconstruction from Gradients in Federated Learning", WWW 2024;
    thesis chapter 5: separation (Eqs. 5.9-5.12), label restoration (Eq. 5.14), calibration (Eqs. 5.16-5.22), matching
    under the cosine distance (Eq. 5.23) up to β target samples, an inserted linear layer beyond (Eq. 5.24).
    Departures: the signs and the multi-target rows of the calibration are corrected (see `calibrate`); Ω and α, which the
    thesis leaves open, are 1,000 (more would round away what FedAvg's local steps add to the biases) and 1; a last layer
    without bias is given one; the inserted layer is imprint's, planted where `expected` target samples exceed β, since it must be
    sent before the count is known (count in one round, insert in the next), with bins for that number. Where no layer hands on
    fewer numbers than an input has, only the mean feature of each target class is matched, which the head's target rows hold
    exactly (Eq. 5.16), from `restarts` starts; elsewhere the update is, and what comes of it is polished by half as many steps of least
    squares. `matched="update"` is Eq. (5.23) alone, with inverting_gradients' total variation, as its baseline has.
    `camouflage` leaves noise of that relative size in the zeroed rows, against a client that looks at them.
    Batch norm in train mode mixes the other samples into the targets' gradients, and local steps move the filter: separation
    is then not exact. Under secure aggregation it counts and separates the samples of all clients together.
    """

    needs: ClassVar[frozenset[Knowledge]] = frozenset({Knowledge.TAMPERED_MODEL, Knowledge.HEAD_GRADIENT, Knowledge.BIAS_GRADIENT})

    targets: tuple[NonNegativeInt, ...]
    bias: PositiveFloat = BIAS  # Ω
    scale: PositiveFloat = 1.0  # α
    camouflage: NonNegativeFloat = 0.0
    threshold: NonNegativeInt = 8  # β
    expected: PositiveInt | None = None  # target samples in the batch, from an earlier round; none: plant no layer
    bins: PositiveInt | None = None  # of the inserted layer; none: chosen for the expected number
    functionals: tuple[Functional, ...] | None = None  # none: five, or fewer where the bins are few for the expected number
    input_shape: tuple[PositiveInt, ...] | None = None
    normalization: Normalization | None = None
    moments: Moments | None = None  # of the functionals over the client's kind of data, as `after` finds them
    round: NonNegativeInt = 0
    steps: PositiveInt = 4800
    restarts: PositiveInt | None = None  # none: eight where samples share a mean feature, of which a trial leaves four, else one
    learning_rate: PositiveFloat = 0.1
    total_variation: NonNegativeFloat | None = None  # none: it fades where features are matched, else as inverting_gradients chooses it
    seconds: PositiveFloat | None = None
    path: Path = "auto"
    precision: Precision = "fp32"
    matched: Literal["features", "update"] | None = None  # none: features where no layer is narrower than an input, else polished

    def tamper(self, model: nn.Module) -> nn.Module:
        shape = self.input_shape or find_input_shape(model)
        rng = generator(self.round, "gradfilt camouflage")
        head = find_head_name(model, shape)
        filtered = plant_filter(model, head, self.targets, bias=self.bias, scale=self.scale, camouflage=self.camouflage, rng=rng)
        require_filtering(filtered, head, shape, self.targets, self.bias)
        if (self.expected or 0) <= self.threshold:
            return filtered
        expected = self.expected or 0
        bins = self.bins or max(FEWEST_BINS, BINS_PER_TARGET * expected)
        fitting = 5 if bins >= ROOMY * expected else 2 if bins >= expected else 1
        return insert_layer(
            filtered,
            shape,
            self.functionals or FUNCTIONALS[:fitting],
            bins,
            sparse=False,
            normalization=self.normalization,
            moments=self.moments,
            round_number=self.round,
        )

    def __call__(self, exposure: Exposure, labels: LabelEstimate | None, rng: Generator) -> Reconstruction:
        restored = restore_labels(exposure, self.name)
        calibrated, of_targets = calibrate(exposure, restored)
        wanted = len(of_targets.labels)
        note = f"{wanted} of {int(restored.counts.sum())} samples are of the target classes"
        if restored.message:
            note += f" ({restored.message})"
        if wanted == 0:
            outcome = Outcome.IMPOSSIBLE if restored.outcome is Outcome.COMPLETED else restored.outcome
            return exposure.without_inputs(outcome, note)
        if isinstance(exposure.model, InsertedLayer):
            found = read_inserted_layer(exposure, exposure.model, of_targets.counts.nonzero().flatten(), wanted)
        else:
            match = self._match_features if self._matches_features(exposure) else self._match_update
            found = match(calibrated, of_targets, rng)
            if wanted > self.threshold:
                note += f", more than {self.threshold}: send tamper with expected={wanted} to read them off an inserted layer"
        if any(isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training for m in exposure.model.modules()):
            note += "; batch norm in train mode mixes the other samples in"
        outcome = restored.outcome if found.outcome is Outcome.COMPLETED else found.outcome
        return replace(found, outcome=outcome, message="; ".join(part for part in (note, found.message) if part))

    def after(self, found: Reconstruction) -> GradFilt:
        """The attack of the next round, with bins for the kind of data that this round showed."""
        moments = measure_moments(found.inputs, found.normalization) if len(found.inputs) > 1 else self.moments
        return replace(self, moments=moments, round=self.round + 1)

    def calibrate(self, exposure: Exposure) -> tuple[Exposure, LabelEstimate]:
        """What the target samples alone would have sent, and their labels."""
        return calibrate(exposure, restore_labels(exposure, self.name))

    def _matches_features(self, exposure: Exposure) -> bool:
        if self.matched is not None:
            return self.matched == "features"
        shape = exposure.public.input_shape
        return narrowest(exposure.model, find_head(exposure).name, shape) >= math.prod(shape)

    def _match_update(self, calibrated: Exposure, labels: LabelEstimate, rng: Generator) -> Reconstruction:
        """Eq. (5.23), with inverting_gradients' total variation, then least squares unless the published form is asked for."""
        matching = InvertingGradients(
            steps=self.steps,
            restarts=self.restarts or 1,
            learning_rate=self.learning_rate,
            total_variation=self.total_variation,
            seconds=self.seconds,
            path=self.path,
            precision=self.precision,
            polish=0 if self.matched == "update" else self.steps // 2,
        )
        return matching(calibrated, labels, rng)

    def _match_features(self, calibrated: Exposure, labels: LabelEstimate, rng: Generator) -> Reconstruction:
        """Inputs whose mean feature in each target class is the client's, while total variation fades.

        The mean feature is smooth in the inputs, unlike the gradient below the head, which jumps where a neuron turns on or off. But
        inputs that swap a part with each other have it nearly in common: from noise every part would settle on an order of its
        own. So each sample begins as noise around a colour of its own, in every second start around a slope from one to another. Guesses
        whose objectives the last steps leave alike are averaged: none of them has more to say for it, and their mean is nearer to the
        truth than most.
        """
        head = find_head(calibrated)
        weight = f"{head.name}.weight" if head.name else "weight"
        recipe = Recipe(
            distance=SquaredError(relative=True),
            optimiser=Adam(sign="signed"),
            rate=Rate(start=self.learning_rate, shape="cosine"),
            steps=self.steps,
            restarts=self.restarts or (RESTARTS if int(labels.counts.max()) > 1 else 1),
            trial=TRIAL,
            kept=KEPT,
            alike=ALIKE,
            start="tinted",
            layers=Layers(skipped=frozenset(calibrated.update) - {weight}),
            seconds=self.seconds,
            path=self.path,
            precision=self.precision,
        )
        if self.total_variation is None:
            beginning = start_distance(calibrated, labels, rng, recipe)
            first, last = (share * beginning for share in FADING)
        else:
            first = last = self.total_variation
        return solve(calibrated, labels, rng, replace(recipe, priors=(FadingVariation(weight=first, last=last),)))


@dataclass(frozen=True, kw_only=True)
class FadingVariation(TotalVariation):
    """Total variation whose weight falls from `weight` to `last`, by the same factor in each of `stairs` stairs."""

    last: float
    stairs: int = 40

    def weight_at(self, progress: float) -> float:
        stair = min(int(progress * self.stairs), self.stairs - 1)
        return self.weight * (self.last / self.weight) ** (stair / (self.stairs - 1)) if self.weight else 0.0
