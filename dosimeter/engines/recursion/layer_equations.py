"""The linear equations that tie a convolution's input to its outputs and to its gradient, for one sample (thesis Eq. 2.6)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import unfold

from dosimeter.network.chain import Link
from dosimeter.network.convolving import convolve, padded

LEAST_SINGULAR = 1e-6  # over the largest: float32 gradients say nothing of directions below


@dataclass(frozen=True, kw_only=True)
class Equations:
    """A x = b for the input x of one layer."""

    matrix: Tensor  # (equations, n)
    wanted: Tensor  # (equations,)

    @property
    def unknowns(self) -> int:
        return self.matrix.shape[1]


@dataclass(frozen=True, kw_only=True)
class Solution:
    """The least-squares solution of least norm."""

    value: Tensor  # (n,)
    rank: int  # of the equations


def output_equations(link: Link, outputs: Tensor) -> Equations:
    """W x = z − b (thesis Eq. 2.6, first line). Outputs (out·H'·W',) that are NaN are unknown and give no equation."""
    matrix = output_matrix(link)
    known = ~outputs.isnan()
    offset = 0.0 if link.module.bias is None else link.module.bias.detach().double().repeat_interleave(len(outputs) // len(link.weight))
    return Equations(matrix=matrix[known], wanted=(outputs - offset)[known])


def slope_equations(link: Link, slopes: Tensor, gradient: Tensor) -> Equations:
    """∇Z x = ∇W (thesis Eq. 2.6, second line): every channel of the input by itself, with the same matrix."""
    module = cast(nn.Conv2d, link.module)
    channels, area = link.shape[0], link.shape[1] * link.shape[2]
    pixels = torch.eye(area, dtype=torch.float64, device=slopes.device).reshape(area, 1, *link.shape[1:])
    patches = unfold(padded(pixels, module), module.kernel_size, dilation=module.dilation, stride=module.stride)  # (area, k·k, places)
    own = torch.einsum("ol,pkl->okp", slopes.reshape(len(link.weight), -1), patches).flatten(0, 1)  # (out·k·k, area)
    wanted = gradient.double().permute(0, 2, 3, 1).flatten(0, 2)  # (out·k·k, in)
    if len(own) > area:  # as many equations as unknowns say the same
        triangle = torch.linalg.qr(torch.cat([own, wanted], 1), mode="r").R[:area]
        own, wanted = triangle[:, :area], triangle[:, area:]
    return Equations(matrix=torch.block_diag(*[own] * channels), wanted=wanted.T.flatten())


def output_matrix(link: Link) -> Tensor:
    """The convolution, without its bias, as a matrix: (out·H'·W', in·H·W)."""
    module = cast(nn.Conv2d, link.module)
    unknowns = link.shape[0] * link.shape[1] * link.shape[2]
    pixels = torch.eye(unknowns, dtype=torch.float64, device=link.weight.device).reshape(unknowns, *link.shape)
    return convolve(module, pixels).flatten(1).T


def stack(*parts: Equations) -> Equations:
    """All equations below one another, each kind divided by its own size, so that small gradients count as much as outputs."""
    sizes = [part.matrix.norm().clamp_min(torch.finfo(torch.float64).tiny) for part in parts]
    return Equations(
        matrix=torch.cat([part.matrix / size for part, size in zip(parts, sizes)]),
        wanted=torch.cat([part.wanted / size for part, size in zip(parts, sizes)]),
    )


def solve(equations: Equations) -> Solution:
    """By the triangular factor where the equations determine everything, else by their singular vectors."""
    matrix, wanted = equations.matrix, equations.wanted
    if len(matrix) >= equations.unknowns:
        both = torch.linalg.qr(torch.cat([matrix, wanted[:, None]], 1), mode="r").R
        triangle, right = both[: equations.unknowns, :-1], both[: equations.unknowns, -1:]
        size = triangle.diagonal().abs()
        if float(size.min()) > LEAST_SINGULAR * float(size.max()):
            value = torch.linalg.solve_triangular(triangle, right, upper=True)[:, 0]
            return Solution(value=value, rank=equations.unknowns)
        matrix, wanted = triangle, right[:, 0]
    left, values, vectors = torch.linalg.svd(matrix, full_matrices=False)
    kept = values > LEAST_SINGULAR * values[0]
    value = vectors[kept].T @ ((left[:, kept].T @ wanted) / values[kept])
    return Solution(value=value, rank=int(kept.sum()))
