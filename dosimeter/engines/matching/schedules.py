"""What changes while an attack runs: the learning rate, and which layers are matched."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn


@dataclass(frozen=True, kw_only=True)
class Rate:
    """The learning rate over the steps: constant, in steps, or along half a cosine, after a linear warm-up.

    The default steps, × `factor` at 3/8, 5/8 and 7/8, are those of Geiping et al.'s code.
    """

    start: float
    shape: Literal["constant", "steps", "cosine"] = "steps"
    factor: float = 0.1
    milestones: tuple[float, ...] = (3 / 8, 5 / 8, 7 / 8)
    warm_up: float = 0.0  # a fraction of the steps

    def __post_init__(self) -> None:
        if not math.isfinite(self.start):
            raise ValueError(f"learning_rate: expected a finite number, got {self.start}")

    def at(self, progress: float) -> float:
        """The rate after a fraction `progress` of the steps."""
        rise = min(1.0, progress / self.warm_up) if self.warm_up > 0 else 1.0
        if self.shape == "steps":
            return self.start * rise * self.factor ** sum(progress >= milestone for milestone in self.milestones)
        if self.shape == "cosine":
            return self.start * rise * 0.5 * (1 + math.cos(math.pi * progress))
        return self.start * rise


@dataclass(frozen=True, kw_only=True)
class Layers:
    """Which layers are matched when: all at once, or in equal shares from the deep end, one more every `every` of the steps.

    hfginv, Stage II, "Stepwise optimization objective". `skipped` are never matched.
    """

    shares: int = 1
    every: float = 1 / 30
    skipped: frozenset[str] = frozenset()

    def at(self, progress: float, names: Sequence[str]) -> tuple[str, ...]:
        """The matched layers among `names` (shallow to deep) after a fraction `progress` of the steps."""
        wanted = self.ever(names)
        if self.shares == 1:
            return wanted
        entered = math.ceil(len(wanted) / self.shares) * (1 + math.floor(progress / self.every + 1e-9))
        return wanted[max(0, len(wanted) - entered) :]

    def ever(self, names: Sequence[str]) -> tuple[str, ...]:
        """Every layer that is matched at some time."""
        return tuple(name for name in names if name not in self.skipped) or tuple(names)


def first_block(model: nn.Module) -> frozenset[str]:
    """The parameters of the stem and the first block, where the model is a stem, three or more blocks and a head; else none.

    A block is a direct child that holds several weight matrices or kernels; what stands before the first is the stem. The blocks may
    lie in one child together, as in MobileNet.
    """
    for prefix, trunk in [("", model), *((f"{name}.", child) for name, child in model.named_children())]:
        children = [(name, child) for name, child in trunk.named_children() if any(True for _ in child.parameters())]
        blocks = [name for name, child in children if sum(parameter.ndim > 1 for parameter in child.parameters()) > 1]
        if len(blocks) >= 3:
            names = [name for name, _ in children]
            shallow = names[: names.index(blocks[0]) + 1]
            return frozenset(f"{prefix}{child}.{name}" for child in shallow for name, _ in trunk.get_submodule(child).named_parameters())
    return frozenset()
