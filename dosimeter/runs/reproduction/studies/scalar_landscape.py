"""The variance loss of a soft label as a function of its scalar."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Generator, Tensor

from dosimeter.options import PositiveFloat, PositiveInt
from dosimeter.runs.measurement import AuditedClient
from dosimeter.runs.reproduction.studies.last_layer import last_layer
from dosimeter.runs.reproduction.studies.study import STUDIES, Study

LIKE_THE_TRUTH = 0.01  # relative distance of a minimum from the true scalar on the grid


@STUDIES.register("scalar_landscape")
@dataclass(frozen=True, kw_only=True)
class ScalarLandscape(Study):
    """Where the variance loss of a pseudo label has its minima, and which scalars give a label without negative entries.

    Wang, Liang and He, "Towards Eliminating Hard Label Constraints in Gradient Inversion Attacks", ICLR 2024: Eqs. (4)-(5), Figs. 1, 2, 7.
    The scalar λ runs outwards from ±1 (|p − y| ≤ 1, so |λ*| ≥ 1), on a grid of `points` up to `reach` times the true one, even in log λ.
    `first_is_true`: the first local minimum on the true sign is the true scalar. `minima_before`: how many lie before the true scalar.
    `loss_at_first` is 1,000 times the variance at the first of them, as in the released code. `valid_range`: the largest over the
    smallest scalar around the true one whose label has no negative entry (for Fig. 2, −2.00 / −1.33 = 1.5).
    Departure: r is the row of the longest gradient; the paper takes any. A head's bias, where there is one, is part of the logits.
    """

    quantities: ClassVar = {
        "first_is_true": False,
        "minima_before": False,
        "loss_at_first": True,
        "loss_at_truth": True,
        "true_scalar": False,
        "valid_range": False,
    }

    family: Literal["smoothing", "mixup", "one_hot"] = "smoothing"
    points: PositiveInt = 20_000
    reach: PositiveFloat = 4.0

    def __call__(self, client: AuditedClient, rng: Generator) -> dict[str, float | None]:
        head = last_layer(client)
        error, feature = head.errors[0], head.features[0]  # (C,), (H,)
        row = int(error.abs().argmax())
        truth = 1 / float(error[row])
        sizes = torch.logspace(0, float(torch.log10(torch.tensor(self.reach * abs(truth)))), self.points, dtype=torch.float64)
        scalars = sizes * (1 if truth > 0 else -1)  # (n,)
        pull = head.weight @ feature * error[row]  # (C,) W g_r
        labels = torch.softmax(scalars[:, None] * pull + head.bias, 1) - error / error[row] / scalars[:, None]  # (n, C), Eq. (4)
        losses = 1000 * _variance(labels, 2 if self.family == "mixup" else 1)  # (n,)
        minima = sizes[_local_minima(losses)]
        before = minima[minima < abs(truth) * (1 - LIKE_THE_TRUTH)]
        first = minima[0] if len(minima) else sizes[-1]
        nearest = int((sizes - abs(truth)).abs().argmin())
        return {
            "first_is_true": float(abs(float(first) / abs(truth) - 1) < LIKE_THE_TRUTH),
            "minima_before": float(len(before)),
            "loss_at_first": float(losses[sizes == first][0]),
            "loss_at_truth": float(losses[nearest]),
            "true_scalar": abs(truth),
            "valid_range": _range_around(nearest, labels.min(1).values >= -1e-9, sizes),
        }


def _variance(labels: Tensor, free: int) -> Tensor:
    """Eq. (5): the variance of all entries but the `free` largest: (n,)."""
    return labels.topk(labels.shape[1] - free, largest=False).values.var(1, correction=0)


def _local_minima(losses: Tensor) -> Tensor:
    """Which interior points of the grid lie below both neighbours: (n,) bool."""
    inner = (losses[1:-1] < losses[:-2]) & (losses[1:-1] < losses[2:])
    edge = inner.new_zeros(1)
    return torch.cat([edge, inner, edge])


def _range_around(position: int, valid: Tensor, sizes: Tensor) -> float:
    """The largest over the smallest size of the unbroken run of valid grid points around a position."""
    invalid = torch.nonzero(~valid).flatten()
    below, above = invalid[invalid < position], invalid[invalid > position]
    low = int(below[-1]) + 1 if len(below) else 0
    high = int(above[0]) - 1 if len(above) else len(sizes) - 1
    return float(sizes[max(high, position)] / sizes[min(low, position)])
