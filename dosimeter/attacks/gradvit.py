"""GradViT: gradient matching for vision transformers, under priors on patches and on another network's statistics."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Generator, Tensor, nn

from dosimeter.engines.matching.attack import MatchingAttack
from dosimeter.engines.matching.distances import SquaredError
from dosimeter.engines.matching.optimisers import Adam
from dosimeter.engines.matching.priors import BatchNormStatistics, Prior, Seen, SquaredNorm, TotalVariation, batch_norms
from dosimeter.engines.matching.recipe import Path, Precision, Recipe
from dosimeter.engines.matching.schedules import Rate
from dosimeter.engines.matching.solve import solve
from dosimeter.interfaces import Exposure
from dosimeter.models.loading import load_model
from dosimeter.network.probing import InputWatch
from dosimeter.normalization import from_pixels, to_pixels
from dosimeter.options import Fraction, NonNegativeFloat, PositiveFloat, PositiveInt
from dosimeter.registry import ATTACKS
from dosimeter.types import Knowledge, LabelEstimate, Normalization, Reconstruction, Refused


@ATTACKS.register("gradvit")
@dataclass(frozen=True, kw_only=True)
class GradViT(MatchingAttack):
    """Matches the update of a vision transformer first, and then asks that patches join and that a CNN finds the pictures natural.

    Hatamizadeh et al., "GradViT: Gradient Inversion of Vision Transformers", CVPR 2022: gradient matching, the patch prior, the image prior
    by the batch-norm statistics of a pretrained CNN, total variation, ℓ2 norm, consistency of several seeds with registration, pixel noise,
    Adam along half a cosine, and a schedule that lets the image prior in after half of the steps. `network` and `network_weights` name the
    CNN, `network_normalization` its inputs; without a network there is no image prior.
    Departures: the distance is squared and relative to the update, so that one set of weights, ours, serves every model. Registration knows
    shifts and mirroring. The matching stays on in the second half.
    """

    needs: ClassVar[frozenset[Knowledge]] = frozenset({Knowledge.LABELS})
    matches: ClassVar = "whole"
    quick: ClassVar[dict[str, Any]] = {"steps": 200}

    steps: PositiveInt = 6000
    restarts: PositiveInt = 1
    learning_rate: PositiveFloat = 0.1
    patch: PositiveInt | None = None  # none: the stride of the model's first convolution
    patch_joins: NonNegativeFloat = 1e-4
    total_variation: NonNegativeFloat = 1e-4
    norm: NonNegativeFloat = 1e-6
    network: str | None = None  # a bundled architecture with batch norms, for pictures of the model's shape
    network_classes: PositiveInt = 10
    network_weights: str | None = None
    network_normalization: Normalization | None = None  # none: it takes the inputs as the model does
    image_prior: NonNegativeFloat = 1e-3
    image_prior_onset: Fraction = 0.5
    consistency: NonNegativeFloat = 1e-2
    consistency_onset: Fraction = 0.5
    registration: bool = True
    pixel_noise: NonNegativeFloat = 0.0
    boxed: bool = True
    seconds: PositiveFloat | None = None
    path: Path = "auto"
    precision: Precision = "fp32"

    def __call__(self, exposure: Exposure, labels: LabelEstimate | None, rng: Generator) -> Reconstruction:
        recipe = Recipe(
            distance=SquaredError(relative=True),
            optimiser=Adam(),
            rate=Rate(start=self.learning_rate, shape="cosine"),
            steps=self.steps,
            restarts=self.restarts,
            priors=self._priors(exposure),
            consistency=self.consistency,
            consistency_onset=self.consistency_onset,
            registered=self.registration,
            pixel_noise=self.pixel_noise,
            boxed=self.boxed,
            seconds=self.seconds,
            path=self.path,
            precision=self.precision,
        )
        return solve(exposure, labels, rng, recipe)

    def _priors(self, exposure: Exposure) -> tuple[Prior, ...]:
        priors: list[Prior] = [
            PatchJoins(weight=self.patch_joins, patch=self.patch or _patch_of(exposure.model)),
            TotalVariation(weight=self.total_variation),
            SquaredNorm(weight=self.norm),
        ]
        if self.network is not None and self.image_prior:
            device = next(exposure.model.parameters()).device
            channels, size, *_ = exposure.public.input_shape
            options = {"classes": self.network_classes, "channels": channels, "size": size}
            network = load_model(self.network, options, self.network_weights, seed=0).to(device).eval()
            if not batch_norms(network):
                raise Refused(f"gradvit: network: expected one with batch norms, got {self.network}")
            theirs = self.network_normalization or exposure.public.normalization
            priors.append(
                ImagePrior(
                    weight=self.image_prior,
                    onset=self.image_prior_onset,
                    network=network,
                    own=exposure.public.normalization,
                    theirs=theirs,
                )
            )
        return tuple(prior for prior in priors if prior.weight)


@dataclass(frozen=True, kw_only=True)
class PatchJoins(Prior):
    """Pixels on the two sides of a border between patches are alike: Σ ‖x[P k] − x[P k − 1]‖ over rows and columns, as a mean."""

    patch: int

    def __call__(self, inputs: Tensor, seen: Seen) -> Tensor:
        if inputs.ndim < 4:
            return inputs.new_zeros(())
        jumps = [inputs.diff(dim=axis).index_select(axis, _borders(inputs.shape[axis], self.patch).to(inputs.device)) for axis in (-2, -1)]
        return sum((jump.abs().mean() for jump in jumps if jump.numel()), start=inputs.new_zeros(()))


@dataclass(frozen=True, kw_only=True)
class ImagePrior(Prior):
    """The pictures' mean and variance at every batch norm of another network are those that it keeps of its training data."""

    network: nn.Module
    own: Normalization  # of the model's inputs
    theirs: Normalization  # of the network's

    def __call__(self, inputs: Tensor, seen: Seen) -> Tensor:
        watch, statistics, parameters, buffers = self._parts
        return statistics(inputs, watch(parameters, buffers, from_pixels(to_pixels(inputs, self.own), self.theirs)))

    @cached_property
    def _parts(self) -> tuple[InputWatch, BatchNormStatistics, Mapping[str, Tensor], Mapping[str, Tensor]]:
        network = copy.deepcopy(self.network)
        statistics = BatchNormStatistics(weight=1.0, statistics=batch_norms(network))
        watch = InputWatch(network, statistics.modules_to_watch(network))
        parameters = {name: parameter.detach() for name, parameter in network.named_parameters()}
        return watch, statistics, parameters, dict(network.named_buffers())


def _borders(side: int, patch: int) -> Tensor:
    """The places in a side's differences that lie across a border."""
    return torch.arange(patch - 1, side - 1, patch)


def _patch_of(model: nn.Module) -> int:
    """The stride of the convolution that cuts the picture into patches."""
    first = next((module for module in model.modules() if isinstance(module, nn.Conv2d)), None)
    if first is None or first.stride != first.kernel_size or first.stride[0] < 2 or first.stride[0] != first.stride[1]:
        raise Refused("gradvit: patch: expected a model whose first convolution cuts the picture into square patches; or set patch")
    return first.stride[0]
