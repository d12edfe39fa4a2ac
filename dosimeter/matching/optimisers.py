"""How a guess moves: Adam on raw, signed or soft-signed gradients, and L-BFGS. Every state is a dict of tensors, so it can be saved.

All work on (R, D): R restarts side by side, each moving on its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

State = dict[str, Tensor]


class Optimiser(ABC):
    """One step from a gradient."""

    @abstractmethod
    def start(self, variables: Tensor) -> State: ...

    @abstractmethod
    def step(self, state: State, variables: Tensor, gradient: Tensor, rate: float) -> Tensor:
        """The next variables (R, D); `state` is brought up to date in place."""


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

    def start(self, variables: Tensor) -> State:
        return {"mean": torch.zeros_like(variables), "square": torch.zeros_like(variables), "count": torch.zeros((), dtype=torch.int64)}

    def step(self, state: State, variables: Tensor, gradient: Tensor, rate: float) -> Tensor:
        gradient = self._signed(gradient)
        state["count"] += 1
        count = int(state["count"])
        state["mean"].lerp_(gradient, 1 - self.momentum)
        state["square"].mul_(self.second_momentum).addcmul_(gradient, gradient, value=1 - self.second_momentum)
        denominator = (state["square"] / (1 - self.second_momentum**count)).sqrt_().add_(self.floor)
        return torch.addcdiv(variables, state["mean"], denominator, value=-rate / (1 - self.momentum**count))

    def _signed(self, gradient: Tensor) -> Tensor:
        if self.sign == "raw":
            return gradient
        if self.sign == "signed":
            return gradient.sign()
        unit = gradient.abs().median(dim=1, keepdim=True).values.clamp_min(torch.finfo(gradient.dtype).tiny)
        halves = (2 * gradient / unit).round().div(2).clamp(-1, 1)
        return 0.8 * halves + 0.2 * gradient.sign()


@dataclass(frozen=True, kw_only=True)
class LBFGS(Optimiser):
    """Limited-memory BFGS with a fixed step, as PyTorch's without a line search (Liu and Nocedal, 1989), for R restarts at once."""

    history: int = 100

    def start(self, variables: Tensor) -> State:
        restarts, size = variables.shape
        empty = variables.new_zeros(self.history, restarts, size)
        return {
            "moves": empty,  # s_k = x_{k+1} − x_k, newest last
            "turns": empty.clone(),  # y_k = g_{k+1} − g_k
            "inverse": variables.new_zeros(self.history, restarts),  # 1 / ⟨y_k, s_k⟩, 0 for a pair that is not used
            "curvature": variables.new_ones(restarts),
            "gradient": torch.zeros_like(variables),
            "move": torch.zeros_like(variables),
            "count": torch.zeros((), dtype=torch.int64),
        }

    def step(self, state: State, variables: Tensor, gradient: Tensor, rate: float) -> Tensor:
        if int(state["count"]) > 0:
            self._remember(state, gradient)
        direction = self._direction(state, gradient)
        if int(state["count"]) == 0:
            size = gradient.abs().sum(1, keepdim=True).clamp_min(torch.finfo(gradient.dtype).tiny)
            move = direction * (1 / size).clamp_max(1) * rate
        else:
            move = direction * rate
        move = torch.where(torch.isfinite(move).all(1, keepdim=True), move, torch.zeros_like(move))
        state["gradient"], state["move"] = gradient.clone(), move
        state["count"] += 1
        return variables + move

    def _remember(self, state: State, gradient: Tensor) -> None:
        turn = gradient - state["gradient"]
        product = (turn * state["move"]).sum(1)  # (R,)
        useful = (product > 1e-10) & torch.isfinite(turn).all(1)
        turn = torch.where(useful[:, None], turn, torch.zeros_like(turn))
        for name, new in (("moves", state["move"]), ("turns", turn), ("inverse", torch.where(useful, 1 / product, 0))):
            state[name] = torch.cat([state[name][1:], new[None]])
        square = turn.square().sum(1)
        state["curvature"] = torch.where(useful, product / square.clamp_min(torch.finfo(square.dtype).tiny), state["curvature"])

    def _direction(self, state: State, gradient: Tensor) -> Tensor:
        """The two-loop recursion."""
        known = min(int(state["count"]), self.history)
        moves, turns, inverse = (state[name][self.history - known :] for name in ("moves", "turns", "inverse"))
        direction = -gradient
        shares: list[Tensor] = []
        for k in reversed(range(known)):
            shares.append(inverse[k] * (moves[k] * direction).sum(1))
            direction = direction - shares[-1][:, None] * turns[k]
        direction = direction * state["curvature"][:, None]
        for k in range(known):
            share = shares[known - 1 - k] - inverse[k] * (turns[k] * direction).sum(1)
            direction = direction + share[:, None] * moves[k]
        return direction
