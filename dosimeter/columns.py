"""Rows of a table as a model takes them: columns of numbers in their own units, and columns of categories as one-hot inputs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from dosimeter.types import Normalization

UNIFORM = math.sqrt(12)  # the width of a uniform law over its standard deviation


@dataclass(frozen=True)
class Number:
    """A column of numbers between `low` and `high`. The model takes (value − mean) / std."""

    low: float
    high: float
    unit: str = ""
    mean: float = 0.0
    std: float = 1.0
    spread: float | None = None  # standard deviation of the values; none: `std` where it is not 1, else a uniform law's

    def __post_init__(self) -> None:
        numbers = {
            "low": self.low,
            "high": self.high,
            "mean": self.mean,
            "std": self.std,
            "spread": 1.0 if self.spread is None else self.spread,
        }
        for name, value in numbers.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise ValueError(f"Number.{name}: expected a finite number, got {value!r}")
        if not self.low < self.high:
            raise ValueError(f"Number.high: expected more than low = {self.low:g}, got {self.high:g}")
        if self.std <= 0 or (self.spread is not None and self.spread <= 0):
            raise ValueError("Number.std and Number.spread: expected positive numbers")

    @property
    def size(self) -> int:
        """How many inputs of the model the column takes."""
        return 1

    @property
    def scatter(self) -> float:
        """The standard deviation of the values, in their unit."""
        if self.spread is not None:
            return self.spread
        return self.std if self.std != 1 else (self.high - self.low) / UNIFORM


@dataclass(frozen=True, init=False)
class Category:
    """A column of categories. The model takes one input for each: 1 for the category of the row, 0 for the others."""

    names: tuple[str, ...]

    def __init__(self, *names: str) -> None:
        if len(names) < 2 or len(set(names)) < len(names) or not all(isinstance(name, str) for name in names):
            raise ValueError(f"Category: expected at least two different names, got {names!r}")
        object.__setattr__(self, "names", names)

    @property
    def size(self) -> int:
        return len(self.names)


@dataclass(frozen=True)
class Columns(Normalization):
    """What the inputs (B, D) of a model over a table mean, column by column, in their order. Pass as `normalization`.

    As a normalisation it maps every column's range to [0, 1].
    """

    columns: Mapping[str, Number | Category] = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if not isinstance(self.columns, Mapping) or not self.columns:
            raise ValueError(f"Columns: expected a mapping of names to dm.Number or dm.Category, got {self.columns!r}")
        mean, std = [], []
        for name, column in self.columns.items():
            if not isinstance(column, Number | Category):
                raise TypeError(f"Columns.{name}: expected a dm.Number or a dm.Category, got {column!r}")
            wide = column.high - column.low if isinstance(column, Number) else 1.0
            mean += [(column.mean - column.low) / wide] if isinstance(column, Number) else [0.0] * column.size
            std += [column.std / wide] if isinstance(column, Number) else [1.0] * column.size
        object.__setattr__(self, "mean", tuple(mean))
        object.__setattr__(self, "std", tuple(std))

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many inputs each column takes."""
        return tuple(column.size for column in self.columns.values())

    def as_scores(self, places: Tensor) -> Tensor:
        """Places in the columns' ranges (n, D) as numbers in standard deviations, and categories as one-hot inputs a unit apart."""
        parts = []
        for part, column in zip(places.split(self.sizes, 1), self.columns.values()):
            if isinstance(column, Number):
                parts.append(part * ((column.high - column.low) / column.scatter))
            else:
                broken = ~part.isfinite().all(1, keepdim=True)
                chosen = one_hot(part.argmax(1), column.size).to(part) / math.sqrt(2)
                parts.append(chosen.masked_fill(broken, torch.nan))
        return torch.cat(parts, 1)

    def words(self, places: Tensor) -> dict[str, str]:
        """One row (D,) by column: numbers with their units, and names of categories."""
        shown = {}
        for (name, column), part in zip(self.columns.items(), places.split(self.sizes)):
            if not bool(part.isfinite().all()):
                shown[name] = "–"
            elif isinstance(column, Number):
                shown[name] = f"{float(part) * (column.high - column.low) + column.low:.4g} {column.unit}".strip()
            else:
                shown[name] = column.names[int(part.argmax())]
        return shown

    def project(self, inputs: Tensor) -> Tensor:
        """Inputs (..., D) with every column of categories moved to the nearest distribution over its categories."""
        parts = [
            nearest_distribution(part) if isinstance(column, Category) else part
            for part, column in zip(inputs.split(self.sizes, -1), self.columns.values())
        ]
        return torch.cat(parts, -1)


def nearest_distribution(values: Tensor) -> Tensor:
    """The point of the probability simplex that is nearest to (..., k) (Held, Wolfe and Crowder 1974)."""
    ordered = values.sort(-1, descending=True).values
    excess = ordered.cumsum(-1) - 1
    ranks = torch.arange(1, values.shape[-1] + 1, device=values.device, dtype=values.dtype)
    count = (ordered * ranks > excess).sum(-1, keepdim=True).clamp_min(1)
    return (values - excess.gather(-1, count - 1) / count).clamp_min(0)
