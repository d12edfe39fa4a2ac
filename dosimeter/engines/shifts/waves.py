"""Positions of a grid that no walk tells one after the other: waves over the grid tell all of them at once.

Without padding, every offset of the kernel reads a moved copy of the same positions. So take a wave x(z) = Σ_q z^q v_q, with z^q short for
z₁^row z₂^column. Where two offsets are d apart, R_o x = z^d R_o' x. At one z, the solutions of all these equations are the waves of the B
samples, mixed by a B by B matrix of this z. Now take more frequencies z than the grid has rows and columns. A wave is a polynomial in z of
the grid's degree, so that its Fourier coefficients beyond the grid vanish. This ties all mixings to one. Those within the grid are the v_q.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Generator, Tensor

from dosimeter.network.reads import Reads, Side

MORE_FREQUENCIES = 2  # than the grid has rows, or columns
ITERATIONS = 4  # of the inverse of the normal equations, which are then refined without them
REFINEMENTS = 2


def spread_waves(moved: Sequence[Tensor], reads: Reads, side: Side, samples: int) -> tuple[Tensor, float]:
    """R_o (r, n) of every offset -> all vectors (n, n), position by position with B columns each, and the gap of the waves' kernels."""
    height, width = reads.grid(side)
    down, across = (length + MORE_FREQUENCIES if length > 1 else 1 for length in (height, width))
    waves, gap = _waves(moved, reads, side, samples, (down, across))  # (K, K', n, B)
    outside = torch.ones(down, across, dtype=torch.bool, device=waves.device)
    outside[:height, :width] = False

    def beyond(mixings: Tensor) -> Tensor:
        """(K·K'·B, m) -> the coefficients outside of the grid, (·, m)."""
        mixed = waves @ mixings.reshape(down, across, samples, -1)
        return torch.fft.fft2(mixed, dim=(0, 1), norm="ortho")[outside].flatten(0, 1)

    def back(coefficients: Tensor) -> Tensor:
        """The adjoint of `beyond`."""
        full = waves.new_zeros(down, across, waves.shape[2], coefficients.shape[1])
        full[outside] = coefficients.reshape(-1, waves.shape[2], coefficients.shape[1])
        return (waves.mH @ torch.fft.ifft2(full, dim=(0, 1), norm="ortho")).flatten(0, 2)

    shifts = torch.fft.fft2(outside.to(waves), norm="ortho") / math.sqrt(down * across)  # of two frequencies' difference
    rows, columns = torch.arange(down).to(waves.device), torch.arange(across).to(waves.device)
    apart = shifts[(rows[None] - rows[:, None])[:, None, :, None], (columns[None] - columns[:, None])[None, :, None, :]]  # (K, K', K, K')
    flat = waves.flatten(0, 1)
    gram = torch.einsum("kna,lnb->kalb", flat.conj(), flat) * apart.reshape(len(flat), 1, len(flat), 1)
    mixings, tied = _kernel(gram.reshape(len(flat) * samples, -1), beyond, back, samples)
    found = torch.fft.fft2(waves @ mixings.reshape(down, across, samples, samples), dim=(0, 1))[:height, :width]  # (H, W, n, B)
    real = found.real if float(found.real.norm()) > float(found.imag.norm()) else found.imag  # both mix the samples
    return real.flatten(0, 1).permute(1, 0, 2).flatten(1), min(gap, tied)


def _waves(moved: Sequence[Tensor], reads: Reads, side: Side, samples: int, counts: tuple[int, int]) -> tuple[Tensor, float]:
    """At every frequency a basis of the B waves (K, K', n, B), and the least gap behind them."""
    alike = reads.alike(side)
    n, device = moved[0].shape[1], moved[0].device
    products = [(moved[one.offset].T @ moved[one.other]).to(torch.complex128) for one in alike]
    squares = sum((moved[o].T @ moved[o] for one in alike for o in (one.offset, one.other)), torch.zeros_like(products[0].real))
    complexes = {o: moved[o].to(torch.complex128) for one in alike for o in (one.offset, one.other)}
    waves = torch.zeros(*counts, n, samples, dtype=torch.complex128, device=device)
    least = math.inf
    for row in range(counts[0]):
        for column in range(counts[1]):
            mirrored = (-row % counts[0], -column % counts[1])
            if mirrored < (row, column):
                waves[row, column] = waves[mirrored].conj()
                continue
            turns = [_turn(one.down * row / counts[0] + one.across * column / counts[1]) for one in alike]
            crossed = sum((turn * product for turn, product in zip(turns, products)), torch.zeros_like(products[0]))

            def unequal(vectors: Tensor, turns: Sequence[complex] = turns) -> Tensor:
                seen = {o: operator @ vectors for o, operator in complexes.items()}
                return torch.cat([seen[one.offset] - turn * seen[one.other] for turn, one in zip(turns, alike)])

            def adjoint(values: Tensor, turns: Sequence[complex] = turns) -> Tensor:
                parts = zip(turns, alike, values.chunk(len(alike)))
                return sum(
                    (complexes[one.offset].mT @ part - turn.conjugate() * complexes[one.other].mT @ part for turn, one, part in parts),
                    torch.zeros_like(values[:n]),
                )

            waves[row, column], gap = _kernel(squares - crossed - crossed.mH, unequal, adjoint, samples)
            least = min(least, gap)
    return waves, least


def _turn(share: float) -> complex:
    return complex(math.cos(2 * math.pi * share), math.sin(2 * math.pi * share))


def _kernel(normal: Tensor, apply: Callable[[Tensor], Tensor], adjoint: Callable[[Tensor], Tensor], count: int) -> tuple[Tensor, float]:
    """An orthonormal basis (n, count) of the smallest right singular vectors, and the gap of the singular values behind them.

    `normal` is the square of `apply`. It halves the digits, so the last steps take what `apply` itself leaves.
    """
    n = len(normal)
    rng = Generator(device=normal.device).manual_seed(0)
    shift = 4 * torch.finfo(torch.float64).eps * n * float(normal.diagonal().real.max())
    triangle = torch.linalg.cholesky(normal + shift * torch.eye(n).to(normal))
    vectors = torch.randn(n, min(count + 1, n), generator=rng, dtype=torch.float64, device=normal.device).to(normal)
    for _ in range(ITERATIONS):
        vectors = torch.linalg.qr(torch.cholesky_solve(vectors, triangle)).Q
    values, turned = _right_singular(apply(vectors))
    kernel = (vectors @ turned)[:, len(values) - count :]
    gap = float(values[-count - 1] / values[-count]) if len(values) > count else math.inf
    for _ in range(REFINEMENTS):
        step = torch.cholesky_solve(adjoint(apply(kernel)), triangle)
        kernel = torch.linalg.qr(kernel - step).Q
    return kernel, gap


def _right_singular(matrix: Tensor) -> tuple[Tensor, Tensor]:
    _, values, right = torch.linalg.svd(matrix, full_matrices=False)
    return values, right.mH
