"""Quantities of published tables that no metric gives. A trial adds them to the details of its record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from dosimeter.engines.bins.inserted_layer import InsertedLayer
from dosimeter.engines.head_filter import calibrate, restore_labels
from dosimeter.interfaces import Exposure
from dosimeter.types import Batch

ZERO_SINGULAR_VALUE = 1e-9  # relative to the largest


@dataclass(frozen=True)
class SideMeasure:
    """A function of a trial's exposure, of the exposure of its target samples alone, and of these samples."""

    compute: Callable[[Exposure, Exposure, Batch], float | None]
    is_error: bool


def calibration_error(exposure: Exposure, of_targets: Exposure, targets: Batch) -> float | None:
    """The largest relative error, over layers, of GradFilt's calibrated gradient against the target samples' own gradient.

    Thesis, Fig. 5.3. The figure divides the distance by the number of parameters. The relative error here does not.
    """
    calibrated = calibrate(exposure, restore_labels(exposure, "gradfilt"))[0].update
    own = of_targets.update
    return max(float((calibrated[name] - own[name]).norm() / own[name].norm()) for name in own if own[name].ndim > 1)


def determined_by_bins(exposure: Exposure, of_targets: Exposure, targets: Batch) -> float | None:
    """The share of target samples that the bins of an inserted layer determine; None without such a layer."""
    if not isinstance(exposure.model, InsertedLayer):
        return None
    return determined_share(bins_of_samples(exposure.model, targets.inputs))


def determined_share(bins: Sequence[Tensor]) -> float:
    """The share of samples that the sums over bins determine. `bins` holds, for each functional, the bin of each sample (n,).

    Let A (bins × samples) mark the bins of each sample. A sample is determined if its unit vector lies in the row space of A.
    """
    marks = torch.cat([one_hot(places, int(places.max()) + 1).T for places in bins]).double()  # (m, n)
    _, sizes, right = torch.linalg.svd(marks, full_matrices=False)
    within = right[sizes > ZERO_SINGULAR_VALUE * sizes.max()].square().sum(0)  # (n,)
    return float((within > 1 - ZERO_SINGULAR_VALUE).double().mean())


def bins_of_samples(layer: InsertedLayer, inputs: Tensor) -> list[Tensor]:
    """For each functional the bin of each sample (n,): the number of bin edges below the sample's value."""
    with torch.no_grad():
        return [part.sum(1) for part in (layer.rows(inputs.flatten(1)) > 0).split(layer.bins, 1)]


SIDE_MEASURES = {
    "calibration_error": SideMeasure(calibration_error, is_error=True),
    "determined_by_bins": SideMeasure(determined_by_bins, is_error=False),
}
