"""The numerical rank of a gradient, and the noise below it: rounding, or noise that the client added."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor

ROUNDING_SLACK = 8.0  # rounding noise over that of one rounding: matrix products round many partial sums
NOISE_SLACK = 1.3  # threshold over the edge of a white spectrum, since real noise fluctuates and is not exactly white
STRUCTURE_SLACK = 3.0  # the same, for what cannot be noise: pruning and quantisation are not white, and stay below
COARSE_TO_FINE = 4.0  # ratio of squared noise between weights whose roundings differ by a factor of four or more: 16 for a difference
FEWEST_FINE_WEIGHTS = 50  # that make this ratio sure
FIRST_SKETCH_WIDTH = 32  # columns of the first random sketch
SPARE_COLUMNS = 16  # columns more than the rank, at least


@dataclass(frozen=True, kw_only=True)
class Spectrum:
    """The signal in diag(w) G = U S Vᵀ + noise. The weights w make the noise equally large in all rows."""

    weights: Tensor  # (C,) w: one over each row's noise, median 1
    left: Tensor  # (C, r) U
    values: Tensor  # (r,) S, descending
    right: Tensor  # (r, H) Vᵀ
    noise: float  # standard deviation of one weighted entry
    edge: float  # the largest singular value of this noise alone
    below: float  # the largest singular value that counts as noise
    informative: int  # rows that exceed their noise
    additive: bool  # the noise exceeds rounding
    crowded: bool = False  # more directions than samples are declared stand above any noise, so that something declared is wrong

    @property
    def rank(self) -> int:
        return len(self.values)


def rounding_unit(gradient: Tensor) -> float:
    """The relative rounding of the coarsest format that holds all entries: bfloat16 values sent as float32 count as bfloat16."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        if torch.finfo(dtype).eps >= torch.finfo(gradient.dtype).eps and torch.equal(gradient.to(dtype).to(gradient.dtype), gradient):
            return torch.finfo(dtype).eps / 2
    return torch.finfo(gradient.dtype).eps / 2


def factor(gradient: Tensor, unit: float, rng: Generator, *, at_most: int | None = None, other: Tensor | None = None) -> Spectrum:
    """The signal of a (C, H) float64 gradient whose entries were rounded to `unit`, relative.

    Each row is first divided by its own noise. Rounding is relative, so the small rows of absent classes are far more precise than the
    rows of present ones. Added noise shows in the sum of the rows, which is zero for every loss of softmax outputs; it is taken to be
    equally large in every row. A batch of `at_most` samples cannot have a higher rank, so anything beyond counts as noise. If it is
    larger than independent noise of the size that the sum shows, the spectrum is `crowded`. `other` (C, H) is the size of each entry's
    rounding from another source, which is not relative: that of the weights, where the gradient is a difference of weights.
    """
    rounding = _rounding_noise(gradient, unit)  # (C,)
    if other is not None:
        rounding = (rounding.square() + other.to(gradient).square().mean(1)).sqrt()
    added = added_noise(gradient)
    if added <= ROUNDING_SLACK * float(rounding.square().mean().sqrt()):
        spectrum = _sketch_spectrum(gradient, rounding, rng, at_most) or _decompose_spectrum(gradient, rounding)
        if at_most is None or spectrum.rank <= at_most:
            return spectrum
    return _decompose_spectrum(gradient, rounding, added=added, at_most=at_most)


def added_noise(gradient: Tensor) -> float:
    """The size of one entry's noise, from the sum of the rows. Softmax errors sum to zero over the classes; noise does not."""
    return float(gradient.sum(0).square().mean().div(len(gradient)).sqrt())


def follows_rounding_of(weight: Tensor, gradient: Tensor, spectrum: Spectrum) -> bool:
    """Whether the noise of a gradient (C, H) is large where the rounding of the layer's weights (C, H) is, as in a difference of weights.

    Weights are rounded in proportion to their own power of two. Noise of one size knows nothing of them.
    """
    if not spectrum.additive:
        return False
    noise = gradient - (spectrum.left * spectrum.values) @ spectrum.right / spectrum.weights[:, None]
    power = torch.frexp(weight).exponent
    middle = power.median()
    coarse, fine = noise[power >= middle].square(), noise[power <= middle - 2].square()
    return len(fine) >= FEWEST_FINE_WEIGHTS and float(coarse.mean()) > COARSE_TO_FINE * float(fine.mean())


def noise_edge(noise: float, rows: int, columns: int) -> float:
    """The largest singular value of white noise: σ(√rows + √columns), Marchenko & Pastur 1967."""
    return noise * (math.sqrt(max(rows, 0)) + math.sqrt(max(columns, 0)))


def _rounding_noise(gradient: Tensor, unit: float) -> Tensor:
    """The size of each row's rounding error: (C,). A zeroed entry may have had any size up to the smallest that is left."""
    noise = unit * gradient.square().mean(1).sqrt()
    live = gradient != 0
    used = live.any(0)  # a column of zeros is a feature that is zero for all samples, not a pruned one
    zeros = ((~live) & used).sum(1).to(gradient) / used.sum().clamp_min(1)  # in double precision, or the product below overflows
    if bool(zeros.mean() > 0.01):
        smallest = gradient[live].abs().min()
        noise = (noise.square() + zeros * smallest.square() / 3).sqrt()
    floor = noise[noise > 0].median() if bool((noise > 0).any()) else torch.ones_like(noise[0])
    return noise.clamp_min(1e-3 * floor)


def _threshold(values: Tensor, noise: float, rows: int, columns: int) -> float:
    """The least singular value that counts as signal if the noise is rounding. The decomposition itself rounds too."""
    return max(ROUNDING_SLACK * noise_edge(noise, rows, columns), 20 * torch.finfo(values.dtype).eps * float(values[0]))


def _sketch_spectrum(gradient: Tensor, rounding: Tensor, rng: Generator, expected: int | None) -> Spectrum | None:
    """The signal by random projection (Halko, Martinsson & Tropp, SIAM Review 2011, Algorithms 4.1 and 5.1), if its rank is low.

    The sketch's width doubles until the sketch misses only noise. None if the sketch would not be small.
    """
    rows, columns = gradient.shape
    scale = float(rounding.median())
    weights = scale / rounding
    weighted = weights[:, None] * gradient  # (C, H)
    noise = max(ROUNDING_SLACK * scale, _decomposition_noise(torch.linalg.matrix_norm(weighted)[None], columns))
    width = max(FIRST_SKETCH_WIDTH, (expected or 0) + SPARE_COLUMNS)
    while 3 * width <= min(rows, columns):
        probe = torch.randn(columns, width, generator=rng, dtype=gradient.dtype, device=gradient.device)
        sketch = torch.linalg.qr(weighted @ probe).Q  # (C, width)
        seen = sketch.T @ weighted  # (width, H)
        if float(torch.linalg.matrix_norm(weighted - sketch @ seen)) <= noise * math.sqrt(rows * columns):
            sketch = torch.linalg.qr(weighted @ torch.linalg.qr(seen.T).Q).Q  # one power iteration removes the probe's noise
            across, small = torch.linalg.qr(weighted.T @ sketch)  # (H, width), (width, width)
            inner, values, turned = torch.linalg.svd(small.T)
            rank = int((values > _threshold(values, scale, rows, columns)).sum())
            if rank <= width - SPARE_COLUMNS // 2:
                left, right = sketch @ inner[:, :rank], turned[:rank] @ across.T
                rest = torch.linalg.matrix_norm(weighted - (left * values[:rank]) @ right) / math.sqrt((rows - rank) * (columns - rank))
                return _build_spectrum(weights, left, values, right, rank, max(float(rest), scale), rows, columns, additive=False)
        width *= 2
    return None


def _decompose_spectrum(gradient: Tensor, rounding: Tensor, *, added: float = 0.0, at_most: int | None = None) -> Spectrum:
    """The signal by a full decomposition. With `added` noise, the signal is what exceeds the edge of a white spectrum."""
    rows, columns = gradient.shape
    row_noise = (rounding.square() + added**2).sqrt()
    scale = float(row_noise.median())
    weights = scale / row_noise
    left, values, right = _decompose(weights[:, None] * gradient)
    over = NOISE_SLACK * noise_edge(scale, rows, columns) if added else _threshold(values, scale, rows, columns)
    rank = int((values > over).sum())
    crowded = False
    if at_most is not None and at_most < rank:
        largest_noise = max(
            STRUCTURE_SLACK * noise_edge(scale, rows, columns), _threshold(values, float((weights * rounding).median()), rows, columns)
        )
        rank, crowded = at_most, float(values[at_most]) > largest_noise
    noise = max(_noise_of_tail(values, rank, rows, columns), scale)
    spectrum = _build_spectrum(weights, left, values, right, rank, noise, rows, columns, additive=added > 0)
    return replace(spectrum, crowded=crowded)


def _decompose(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The singular value decomposition. A wide matrix is first reduced to its triangular factor, which is much faster."""
    if matrix.shape[1] < 2 * matrix.shape[0]:
        return torch.linalg.svd(matrix, full_matrices=False)
    across, triangle = torch.linalg.qr(matrix.T)  # (H, C), (C, C)
    left, values, turned = torch.linalg.svd(triangle.T)
    return left, values, turned @ across.T


def _noise_of_tail(values: Tensor, rank: int, rows: int, columns: int) -> float:
    return float(values[rank:].square().sum().div(max((rows - rank) * (columns - rank), 1)).sqrt())


def _decomposition_noise(values: Tensor, columns: int) -> float:
    """The decomposition's own backward error: a few rounding units of the largest value, spread over the columns."""
    return 2 * torch.finfo(values.dtype).eps * float(values[0]) / math.sqrt(max(columns, 1))


def _build_spectrum(
    weights: Tensor, left: Tensor, values: Tensor, right: Tensor, rank: int, noise: float, rows: int, columns: int, *, additive: bool
) -> Spectrum:
    noise = math.hypot(noise, _decomposition_noise(values, columns))
    signal = torch.linalg.vector_norm(left[:, :rank] * values[:rank], dim=1) / math.sqrt(columns)  # (C,) of each row
    return Spectrum(
        weights=weights,
        left=left[:, :rank],
        values=values[:rank],
        right=right[:rank],
        noise=noise,
        edge=noise_edge(noise, rows, columns),
        below=float(values[rank]) if rank < len(values) else 0.0,
        informative=int((signal > 3 * noise).sum()),
        additive=additive,
    )
