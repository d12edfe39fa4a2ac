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
    """The parameters of the stem and the first block, where the model is a stem, three or more blocks and a head; else none."""
    found = blocks(model)
    return found[0] if found else frozenset()


def blocks(model: nn.Module) -> tuple[frozenset[str], ...]:
    """The parameters of each block, shallow to deep, where the model is a stem, three or more blocks and a head; else none.

    A block is a direct child that holds several weight matrices or kernels. What stands before the first is the stem and belongs to the
    first; what stands behind the last belongs to the last. The blocks may lie in one child together, as in MobileNet.
    """
    for prefix, trunk in [("", model), *((f"{name}.", child) for name, child in model.named_children())]:
        children = [(name, child) for name, child in trunk.named_children() if any(True for _ in child.parameters())]
        starts = [place for place, (_, child) in enumerate(children) if sum(p.ndim > 1 for p in child.parameters()) > 1]
        if len(starts) < 3:
            continue
        ends = [*starts[1:], len(children)]
        parts = [children[start:end] for start, end in zip([0, *starts[1:]], ends)]
        named = [{f"{prefix}{child}.{name}" for child, module in part for name, _ in module.named_parameters()} for part in parts]
        order = [name for name, _ in model.named_parameters()]
        first = min(order.index(name) for name in named[0])
        named[0] |= set(order[:first])  # a stem in front of the child that holds the blocks
        named[-1] |= set(order[first:]) - set().union(*named)
        return tuple(frozenset(names) for names in named)
    return ()
