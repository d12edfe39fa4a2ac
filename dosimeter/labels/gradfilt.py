"""GradFilt's label restoration: under its filter the bias gradient counts every class exactly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Generator

from dosimeter.interfaces import LabelRecovery
from dosimeter.options import NonNegativeInt
from dosimeter.registry import LABELS
from dosimeter.tampering.head_filter import restore_labels
from dosimeter.types import Exposure, Knowledge, LabelEstimate, Refused


@LABELS.register("gradfilt")
@dataclass(frozen=True, kw_only=True)
class GradFiltLabels(LabelRecovery):
    """Counts every class from the bias gradient of a model whose last layer the server filtered.

    Thesis chapter 5, Eqs. (5.12)-(5.14): λ = B (p' − ∇b'), where the filter makes p' known and the same for all samples.
    Departure: label smoothing, temperature and focal loss are allowed for. `targets` are read off the model; those given
    are only compared with it. `details`: the probabilities p' (C,) and the targets (t,).
    """

    needs: ClassVar[frozenset[Knowledge]] = frozenset({Knowledge.TAMPERED_MODEL, Knowledge.HEAD_GRADIENT, Knowledge.BIAS_GRADIENT})

    targets: tuple[NonNegativeInt, ...] | None = None

    def __call__(self, exposure: Exposure, rng: Generator) -> LabelEstimate:
        estimate = restore_labels(exposure, self.name)
        planted = estimate.details["targets"].tolist()
        if self.targets is not None and sorted(self.targets) != planted:
            raise Refused(f"gradfilt was asked for the targets {sorted(self.targets)}, but the model that was sent filters for {planted}")
        return estimate
