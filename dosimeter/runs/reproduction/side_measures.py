"""Numbers of a published table that no metric of a surface gives. A trial adds them to the details of its record."""

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
    """What is computed of a trial's exposure, of the exposure of its target samples alone, and of these samples."""

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
    """The share of target samples that the bins of an inserted layer determine; none without such a layer."""
    if not isinstance(exposure.model, InsertedLayer):
        return None
    return determined_share(bins_of_samples(exposure.model, targets.inputs))


def determined_share(bins: Sequence[Tensor]) -> float:
    """The share of samples that sums over bins determine; each functional has the bin of each sample, (n,).

    With A (bins × samples) marking the bins of each sample, a sample is determined if its unit vector lies in the row space of A.
    """
    marks = torch.cat([one_hot(places, int(places.max()) + 1).T for places in bins]).double()  # (m, n)
    _, sizes, right = torch.linalg.svd(marks, full_matrices=False)
    within = right[sizes > ZERO_SINGULAR_VALUE * sizes.max()].square().sum(0)  # (n,)
    return float((within > 1 - ZERO_SINGULAR_VALUE).double().mean())


def bins_of_samples(layer: InsertedLayer, inputs: Tensor) -> list[Tensor]:
    """For each functional the bin of each sample (n,): the number of its edges below the sample."""
    with torch.no_grad():
        return [part.sum(1) for part in (layer.rows(inputs.flatten(1)) > 0).split(layer.bins, 1)]


SIDE_MEASURES = {
    "calibration_error": SideMeasure(calibration_error, is_error=True),
    "determined_by_bins": SideMeasure(determined_by_bins, is_error=False),
}
