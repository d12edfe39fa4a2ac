"""GradFilt beyond β target samples: behind the filter, an inserted layer files the target samples into bins."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Generator, nn

from dosimeter.attacks.imprint import read_inserted_layer
from dosimeter.engines.bins.inserted_layer import Functional, InsertedLayer, Moments, insert_layer, measure_moments
from dosimeter.engines.head_filter import FilteringAttack
from dosimeter.interfaces import Exposure
from dosimeter.network.input_shape import find_input_shape
from dosimeter.options import NonNegativeInt, PositiveInt
from dosimeter.registry import ATTACKS
from dosimeter.types import LabelEstimate, Normalization, Reconstruction, Refused

BINS_PER_TARGET = 8
FEWEST_BINS = 128  # the thesis's number
FUNCTIONALS: tuple[Functional, ...] = ("brightness", "random", "random", "random", "random")
ROOMY = 1.15  # bins a target sample from which five functionals settle all of them; with fewer bins fewer functionals show more


@ATTACKS.register("gradfilt_imprint")
@dataclass(frozen=True, kw_only=True)
class GradFiltImprint(FilteringAttack):
    """Filters for the target classes and reads their samples, too many for matching, off an inserted linear layer.

    Zhang, Guo and Li, "GradFilt: Class-wise Targeted Data Reconstruction from Gradients in Federated Learning", WWW 2024;
    thesis chapter 5: filter, label restoration and calibration as `gradfilt`, then the inserted layer of Eq. (5.24).
    Departures: the layer is `imprint`'s, with several functionals (`functionals=("brightness",)` is the published one). The layer must be
    sent before the target samples can be counted: count them with the label recovery `gradfilt` in one round, and send a layer for
    the `expected` number in the next. After local steps (FedAvg) the layer shows nothing.
    """

    expected: PositiveInt  # target samples in the batch
    bins: PositiveInt | None = None  # none: chosen for the expected number
    functionals: tuple[Functional, ...] | None = None  # none: five, or fewer where the bins are few for the expected number
    normalization: Normalization | None = None  # how pixels in [0, 1] become inputs; none: they are the inputs
    moments: Moments | None = None  # of the functionals over the client's kind of data, as `after` finds them
    round: NonNegativeInt = 0

    def tamper(self, model: nn.Module) -> nn.Module:
        bins = self.bins or max(FEWEST_BINS, BINS_PER_TARGET * self.expected)
        fitting = 5 if bins >= ROOMY * self.expected else 2 if bins >= self.expected else 1
        return insert_layer(
            self.plant(model, self.round),
            self.input_shape or find_input_shape(model),
            self.functionals or FUNCTIONALS[:fitting],
            bins,
            sparse=False,
            normalization=self.normalization,
            moments=self.moments,
            round_number=self.round,
        )

    def recover(self, exposure: Exposure, calibrated: Exposure, labels: LabelEstimate, rng: Generator) -> tuple[Reconstruction, str]:
        if not isinstance(exposure.model, InsertedLayer):
            raise Refused("gradfilt_imprint needs a model that bears its layer: send its tamper(model) and observe that")
        return read_inserted_layer(exposure, exposure.model, labels.counts.nonzero().flatten(), len(labels.labels)), ""

    def after(self, found: Reconstruction) -> GradFiltImprint:
        """The attack of the next round, with bins for the kind of data that this round showed."""
        moments = measure_moments(found.inputs, found.normalization) if len(found.inputs) > 1 else self.moments
        return replace(self, moments=moments, round=self.round + 1)
