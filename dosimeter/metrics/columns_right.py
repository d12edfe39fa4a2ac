"""Columns of a table's row that were recovered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dosimeter.interfaces import Metric
from dosimeter.metrics import check_paired
from dosimeter.options import PositiveFloat
from dosimeter.registry import METRICS


@METRICS.register("columns_right")
@dataclass(frozen=True, kw_only=True)
class ColumnsRight(Metric):
    """The share of a row's columns that are right: the same category, or a number within a third of a standard deviation.

    Vero et al., "TabLeak: Tabular Data Leakage in Federated Learning", ICML 2023: the reconstruction accuracy, with its tolerance of
    .319 standard deviations.
    """

    surface: ClassVar = "inputs"
    higher_is_better: ClassVar[bool] = True
    title: ClassVar[str] = "columns right"
    is_share: ClassVar[bool] = True

    sizes: tuple[int, ...] = ()  # of the columns, in inputs; none: every input is a column of numbers
    tolerance: PositiveFloat = 0.319  # standard deviations

    def __call__(self, recovered: Tensor, truth: Tensor) -> Tensor:
        """Rows (B, D), numbers in standard deviations and categories as one-hot inputs -> (B,)."""
        check_paired(self.name, recovered, truth)
        sizes = self.sizes or (1,) * truth.shape[1]
        right = [
            (mine - true).abs()[:, 0] <= self.tolerance if size == 1 else mine.argmax(1) == true.argmax(1)
            for mine, true, size in zip(recovered.split(sizes, 1), truth.split(sizes, 1), sizes)
        ]
        return torch.stack(right, 1).double().mean(1)

    def applies(self, shape: tuple[int, ...] | None) -> bool:
        return shape is None or len(shape) == 1

    def unavailable(self, shape: tuple[int, ...] | None = None) -> str | None:
        if shape is not None and (not self.sizes or shape != (sum(self.sizes),)):
            return "scores rows of a table whose columns are declared: normalization=dm.Columns(...)"
        return None
