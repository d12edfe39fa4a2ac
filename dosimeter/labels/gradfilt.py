"""GradFilt's label restoration: under its filter the bias gradient counts every class exactly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Generator, nn

from dosimeter.engines.head_filter import BIAS, plant_filter, restore_labels
from dosimeter.interfaces import Exposure, LabelRecovery, Tampering
from dosimeter.network.input_shape import find_head_name
from dosimeter.options import NonNegativeInt, PositiveInt
from dosimeter.randomness import generator
from dosimeter.registry import LABELS
from dosimeter.types import Knowledge, LabelEstimate, Refused


@LABELS.register("gradfilt")
@dataclass(frozen=True, kw_only=True)
class GradFiltLabels(LabelRecovery, Tampering):
    """Counts every class from the bias gradient of a model whose last layer the server filtered.

    Thesis chapter 5, Eqs. (5.12)-(5.14): λ = B (p' − ∇b'), where the filter makes p' known and the same for all samples.
    Departures: label smoothing, temperature and focal loss are taken into account. The targets are read off the model, and given `targets`
    are only compared with them. `tamper` plants a filter for `targets`, or for class 0, since every class is counted.
    `details`: the probabilities p' (C,), the targets (t,), and the factor that clipping put on the update.
    """

    needs: ClassVar[frozenset[Knowledge]] = frozenset({Knowledge.TAMPERED_MODEL, Knowledge.HEAD_GRADIENT, Knowledge.BIAS_GRADIENT})

    targets: tuple[NonNegativeInt, ...] | None = None
    input_shape: tuple[PositiveInt, ...] | None = None

    def tamper(self, model: nn.Module) -> nn.Module:
        head, rng = find_head_name(model, self.input_shape), generator(0, "gradfilt camouflage")
        return plant_filter(model, head, self.targets or (0,), bias=BIAS, scale=1.0, camouflage=0.0, rng=rng)

    def __call__(self, exposure: Exposure, rng: Generator) -> LabelEstimate:
        estimate = restore_labels(exposure, self.name)
        planted = estimate.details["targets"].tolist()
        if self.targets is not None and sorted(self.targets) != planted:
            raise Refused(f"gradfilt was asked for the targets {sorted(self.targets)}, but the model that was sent filters for {planted}")
        return estimate
