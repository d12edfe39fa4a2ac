"""One sample's head gradient as a function of one unknown scalar."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dosimeter.engines.subspace.spectrum import rounding_unit
from dosimeter.network.head import Head

Family = Literal["smoothing", "mixup", "one_hot"]
Array = npt.NDArray[np.float64]
Sent = npt.NDArray[np.floating]  # in the client's own precision


@dataclass(frozen=True, kw_only=True)
class ScalarProblem:
    """∇W = (p − y) fᵀ / τ of one sample, seen from row r: f = g_r / s, with s = (p_r − y_r) / τ unknown (soft-labels Eqs. 2-4)."""

    row: Array  # (H,) g_r
    ratios: Array  # (C,) (p_i − y_i) / (p_r − y_r)
    pull: Array  # (C,) W g_r
    bias: Array  # (C,)
    temperature: float
    family: Family
    precision: float  # rounding unit of the client's arithmetic
    noise: float  # relative distance of ∇W from rank one
    sign: int  # of s, where features are known to be non-negative; else 0

    @property
    def free(self) -> int:
        """How many entries of the label may differ from the rest."""
        return 2 if self.family == "mixup" else 1

    def probabilities(self, errors: Array) -> Array:
        """p at each guess of s: (n,) -> (n, C)."""
        logits = self.pull / errors[:, None]
        logits += self.bias
        logits /= self.temperature
        logits -= logits.max(1, keepdims=True)
        np.exp(logits, out=logits)
        logits /= logits.sum(1, keepdims=True)
        return logits

    def labels(self, errors: Array) -> Array:
        """ŷ at each guess of s (soft-labels Eq. 4): (n,) -> (n, C)."""
        return self.probabilities(errors) - self.temperature * errors[:, None] * self.ratios


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """Local solutions, the best first."""

    errors: Array  # (n,) s
    labels: Array  # (n, C)
    residuals: Array  # (n,) distance from the family's shape, relative to the gradient's
    floors: Array  # (n,) the residual that rounding and noise alone cause
    spreads: Array  # (n,) relative error of s, and so of the feature, that the noise allows
    blurs: Array  # (n,) error of the label that follows from it, L1
    error_bars: Array  # (n,) blurs plus the label's error from the client's rounding of logits, probabilities and gradient, L1
    read: bool = False  # s is read off the bias gradient, not found by the label's family


def on_host(tensor: Tensor) -> Sent:
    """The tensor as a numpy array. Single precision stays: its products with double vectors are double, without a copy."""
    return (tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.double()).cpu().numpy()


def scalar_problem(head: Head, gradient: Sent, temperature: float, family: Family, row: int) -> ScalarProblem:
    """The problem of ∇W's nearest outer product, ratios (p − y)/(p_r − y_r) times g_r, by one power iteration from row r."""
    chosen = gradient[row].astype(np.float64)
    ratios = gradient @ chosen / (chosen @ chosen)  # (C,) g_i / g_r
    chosen = ratios @ gradient / (ratios @ ratios)  # (H,) g_r estimated from all rows
    ratios = gradient @ chosen / (chosen @ chosen)
    return ScalarProblem(
        row=chosen,
        ratios=ratios,
        pull=on_host(head.weight) @ chosen,
        bias=bias_of(head),
        temperature=temperature,
        family=family,
        precision=precision_of(head),
        noise=off_rank_one(gradient, ratios, chosen),
        sign=int(np.sign(chosen.sum())) if head.non_negative else 0,
    )


def bias_of(head: Head) -> Array:
    return np.zeros(head.classes) if head.bias is None else on_host(head.bias).astype(np.float64)


def precision_of(head: Head) -> float:
    """The rounding unit of the client's arithmetic, or of the coarsest format that holds the gradient where that is coarser."""
    assert head.weight_gradient is not None
    return max(head.precision, 2 * rounding_unit(head.weight_gradient))


def off_rank_one(gradient: Sent, ratios: Array, chosen: Array, enough: float = 0.0) -> float:
    """‖∇W − r gᵀ‖ / ‖∇W‖. Since r is a projection, its square is ‖∇W‖² − ‖r‖²‖g‖²; where that is rounding alone, entry by entry.

    `enough`: the caller needs no smaller value than this.
    """
    whole = float(np.einsum("ij,ij->", gradient, gradient, dtype=np.float64))
    share = 1 - float(ratios @ ratios) * float(chosen @ chosen) / whole
    if share > 1e-14:
        return share**0.5
    if enough > 1e-7:
        return enough
    rest = gradient - np.outer(ratios, chosen)
    return float(np.vdot(rest, rest) / whole) ** 0.5


def length(vector: Array) -> float:
    return float(vector @ vector) ** 0.5


def lengths(rows: Sent) -> Array:
    return np.einsum("ij,ij->i", rows, rows, dtype=np.float64) ** 0.5
