"""How a guess moves: Adam on raw, signed or soft-signed gradients, and L-BFGS.

All work on (R, D): R restarts side by side, each moving on its own. An optimiser's memory is a dict of tensors, so that it can be saved.
"""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Memory = dict[str, Tensor]  # what an optimiser remembers of earlier steps


class Optimiser(ABC):
    """One step from a gradient."""

    @abstractmethod
    def start(self, variables: Tensor) -> Memory: ...

    @abstractmethod
    def step(self, memory: Memory, variables: Tensor, gradient: Tensor, rate: float) -> Tensor:
        """The next variables (R, D); `memory` is brought up to date in place."""


@dataclass(frozen=True, kw_only=True)
class Adam(Optimiser):
    """Adam (Kingma and Ba, ICLR 2015) on the gradient, its sign, or the soft sign of hfginv's released code.

    "signed" is Geiping et al.'s: the sign is taken before Adam's averages. "soft" is .8 × the gradient in units of its
    median magnitude, rounded to halves and cut at ±1, plus .2 × its sign.
    """

    sign: Literal["raw", "signed", "soft"] = "raw"
    momentum: float = 0.9
    second_momentum: float = 0.999
    floor: float = 1e-8
    weight_decay: float = 0.0  # of AdamW (Loshchilov and Hutter, ICLR 2019): the guess itself shrinks by rate × this

    def start(self, variables: Tensor) -> Memory:
        return {"mean": torch.zeros_like(variables), "square": torch.zeros_like(variables), "count": torch.zeros((), dtype=torch.int64)}

    def step(self, memory: Memory, variables: Tensor, gradient: Tensor, rate: float) -> Tensor:
        gradient = self._take_sign(gradient)
        memory["count"] += 1
        count = int(memory["count"])
        memory["mean"].lerp_(gradient, 1 - self.momentum)
        memory["square"].mul_(self.second_momentum).addcmul_(gradient, gradient, value=1 - self.second_momentum)
        denominator = (memory["square"] / (1 - self.second_momentum**count)).sqrt_().add_(self.floor)
        size = rate / (1 - self.momentum**count)
        if size > torch.finfo(variables.dtype).max:
            raise OverflowError(f"a step of {size:.3g} is no number of {variables.dtype}")
        if self.weight_decay:
            variables = variables * (1 - rate * self.weight_decay)
        return torch.addcdiv(variables, memory["mean"], denominator, value=-size)

    def _take_sign(self, gradient: Tensor) -> Tensor:
        if self.sign == "raw":
            return gradient
        if self.sign == "signed":
            return gradient.sign()
        unit = _median(gradient.abs()).clamp_min(torch.finfo(gradient.dtype).tiny)
        halves = (2 * gradient / unit).round().div(2).clamp(-1, 1)
        return 0.8 * halves + 0.2 * gradient.sign()


@dataclass(frozen=True, kw_only=True)
class LBFGS(Optimiser):
    """Limited-memory BFGS with a fixed step, as PyTorch's without a line search, for R restarts at once.

    Liu and Nocedal, Mathematical Programming 1989, in the compact form of Byrd, Nocedal and Schnabel, 1994, Theorem 2.2:
    six matrix products a step in place of a loop over the history. The small triangular systems are solved in float64.
    """

    history: int = 100

    def start(self, variables: Tensor) -> Memory:
        restarts, size = variables.shape
        _require_memory(2 * restarts * self.history * (size * variables.element_size() + self.history * 8), variables.device)
        empty = variables.new_zeros(restarts, self.history, size)
        return {
            "moves": empty,  # S: s_k = x_{k+1} − x_k, in the slots of a ring
            "turns": empty.clone(),  # Y: y_k = g_{k+1} − g_k
            "crossed": variables.new_zeros(restarts, self.history, self.history, dtype=torch.float64),  # ⟨s_i, y_j⟩
            "turned": variables.new_zeros(restarts, self.history, self.history, dtype=torch.float64),  # ⟨y_i, y_j⟩
            "curvature": variables.new_ones(restarts),  # γ = ⟨s, y⟩ / ⟨y, y⟩ of the newest pair
            "gradient": torch.zeros_like(variables),
            "move": torch.zeros_like(variables),
            "count": torch.zeros((), dtype=torch.int64),
        }

    def step(self, memory: Memory, variables: Tensor, gradient: Tensor, rate: float) -> Tensor:
        if int(memory["count"]) == 0:
            size = gradient.abs().sum(1, keepdim=True).clamp_min(torch.finfo(gradient.dtype).tiny)
            move = -gradient * (1 / size).clamp_max(1) * rate
        else:
            self._remember(memory, gradient)
            move = -rate * self._inverse_hessian_product(memory, gradient)
        move = torch.where(torch.isfinite(move).all(1, keepdim=True), move, torch.zeros_like(move))
        memory["gradient"], memory["move"] = gradient.clone(), move
        memory["count"] += 1
        return variables + move

    def _remember(self, memory: Memory, gradient: Tensor) -> None:
        """Write the newest pair into its slot. A pair without positive curvature is written as zeros, which change nothing."""
        move, turn = memory["move"], gradient - memory["gradient"]
        product, square = (turn * move).sum(1), turn.square().sum(1)  # (R,)
        # against their lengths: PyTorch's bound of 1e-10 on the product itself ends progress early where gradients are small
        useful = (product > 1e-10 * (square * move.square().sum(1)).sqrt()) & torch.isfinite(square)
        move, turn = (torch.where(useful[:, None], pair, torch.zeros_like(pair)) for pair in (move, turn))
        slot = (int(memory["count"]) - 1) % self.history
        memory["moves"][:, slot], memory["turns"][:, slot] = move, turn
        memory["crossed"][:, slot, :] = _products(memory["turns"], move)
        memory["crossed"][:, :, slot] = _products(memory["moves"], turn)
        memory["turned"][:, slot, :] = memory["turned"][:, :, slot] = _products(memory["turns"], turn)
        ratio = product / square.clamp_min(torch.finfo(square.dtype).tiny)
        memory["curvature"] = torch.where(useful, ratio, memory["curvature"])

    def _inverse_hessian_product(self, memory: Memory, gradient: Tensor) -> Tensor:
        """H g = γ g + S w − γ Y u with u = R⁻¹ Sᵀg, w = R⁻ᵀ((D + γ YᵀY) u − γ Yᵀg), R the upper triangle of SᵀY, D its diagonal."""
        count = int(memory["count"])
        oldest = count - min(count, self.history)
        order = torch.arange(oldest, count, device=gradient.device) % self.history  # oldest first
        crossed = memory["crossed"][:, order][:, :, order]
        diagonal = crossed.diagonal(dim1=1, dim2=2)
        triangle = crossed.triu() + torch.diag_embed((diagonal == 0).to(crossed))  # an unused pair solves to 0
        curvature = memory["curvature"].double()[:, None, None]
        along = _products(memory["moves"], gradient)[:, order, None]  # Sᵀg
        across = _products(memory["turns"], gradient)[:, order, None]  # Yᵀg
        inner = torch.linalg.solve_triangular(triangle, along, upper=True)
        right = diagonal[:, :, None] * inner + curvature * (memory["turned"][:, order][:, :, order] @ inner - across)
        outer = torch.linalg.solve_triangular(triangle.mT, right, upper=False)
        weights = gradient.new_zeros(2, len(gradient), self.history)
        weights[0, :, order] = outer[:, :, 0].to(gradient)
        weights[1, :, order] = (curvature * inner)[:, :, 0].to(gradient)
        combined = _weighted_sum(memory["moves"], weights[0]) - _weighted_sum(memory["turns"], weights[1])
        return memory["curvature"][:, None] * gradient + combined


def _require_memory(needed: int, device: torch.device) -> None:
    """Raise a MemoryError where the CPU's memory cannot hold so many bytes; a GPU raises an error of its own."""
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if device.type == "cpu" and hasattr(os, "sysconf") else math.inf
    if needed > available:
        raise MemoryError(f"a history of {needed / 2**30:.3g} GiB, the machine has {available / 2**30:.3g}")


def _median(rows: Tensor) -> Tensor:
    """(R, D) -> (R, 1), the lower median of each row; on a GPU by sorting, since PyTorch's median uses one block for a whole row."""
    if not rows.is_cuda:
        return rows.median(dim=1, keepdim=True).values
    return rows.sort(dim=1).values[:, (rows.shape[1] - 1) // 2, None]


def _products(rows: Tensor, vector: Tensor) -> Tensor:
    """(R, m, D) and (R, D) -> (R, m), the product of every row with its restart's vector.

    One matrix-vector product a restart: the batched product of PyTorch on CPU is ten times slower for such shapes.
    """
    return torch.stack([own @ v for own, v in zip(rows, vector)]).double()


def _weighted_sum(rows: Tensor, weights: Tensor) -> Tensor:
    """(R, m, D) and (R, m) -> (R, D), the weighted sum of the rows."""
    return torch.stack([w @ own for w, own in zip(weights, rows)])
