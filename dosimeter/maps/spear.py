"""SPEAR: the inputs of a linear layer from the zeros of the slopes behind its ReLU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Generator, Tensor

from dosimeter.engines.shifts.linear_rows import LinearRows, as_estimate, read_rows, scaled_inputs
from dosimeter.interfaces import Exposure, MapRecovery
from dosimeter.options import PositiveInt
from dosimeter.registry import MAPS
from dosimeter.types import MapEstimate, Refused

AT_ONCE = 4096  # submatrices
SILENT = 100.0  # noises below which a neuron is off for all samples
ZERO_NOISES = 30.0  # an entry of L q within as many standard deviations is zero
LEAST_SHARE = 0.05  # of the rows that must be zero, beyond the B − 1 that were drawn
INDEPENDENT = 1e-2  # of a direction, beyond the sparser ones: a mixture of samples that are found has nothing left
SAME_DIRECTION = 1 - 1e-4  # cosine from which two directions are one
SHARPENINGS = 3


@MAPS.register("spear")
@dataclass(frozen=True, kw_only=True)
class SPEAR(MapRecovery):
    """Draws rows of a linear layer's gradient until all of them are rows that one sample's ReLU switched off.

    Dimitrov, Baader, Müller and Vechev, "SPEAR: Exact Gradient Inversion of Batches in Federated Learning", NeurIPS 2024. The gradient is
    L R of rank B. B − 1 rows of L have one null vector q; if the slopes of sample i are zero in all of them, L q is that sample's slopes
    up to scale. Candidates are kept where L q has many zeros, the sparsest first, as long as they are independent; the bias gradient gives
    the scale. The paper reports exact batches up to about 25 samples, and time that grows exponentially with the batch.
    Departures: a candidate is sharpened by all of its zeros. The greedy exchange of candidates by a forward pass is left out; where
    fewer than B directions are found, the method refuses.
    """

    quick: ClassVar[dict[str, Any]] = {"submatrices": 20_000}

    layer: str | None = None  # the linear layer by its name in the model; None: the first one
    submatrices: PositiveInt = 300_000  # drawn at most

    def __call__(self, exposure: Exposure, rng: Generator) -> MapEstimate:
        rows = read_rows(exposure, self.layer, self.name)
        found = self._directions(rows, rng)
        if len(found) < rows.samples:
            raise Refused(
                f"spear finds {len(found)} of {rows.samples} samples in {self.submatrices:,} submatrices; each needs all its "
                f"{rows.samples - 1} rows among the zeros of one sample's slopes"
            )
        return as_estimate(rows, scaled_inputs(rows, found.T), "SPEAR proves nothing of a single sample")

    def _directions(self, rows: LinearRows, rng: Generator) -> Tensor:
        """Columns of the mixing as unit vectors: (≤ B, B)."""
        samples = rows.samples
        if samples == 1:
            return rows.left.new_ones(1, 1)
        slopes = _Slopes.of(rows)
        found, sparsity = rows.left.new_zeros(0, samples), torch.zeros(0, dtype=torch.int64, device=rows.left.device)
        if len(slopes.left) < samples:
            return found
        rounds_needed: int | None = None
        for turn in range(-(-self.submatrices // AT_ONCE)):
            drawn = torch.rand(AT_ONCE, len(slopes.left), generator=rng, device=found.device).topk(samples - 1, dim=1).indices
            null = torch.linalg.qr(slopes.left[drawn].transpose(1, 2), mode="complete").Q[:, :, -1]  # (·, B)
            zeros, before = slopes.zeros(null).sum(1), len(found)
            least = max(samples - 1 + LEAST_SHARE * len(slopes.left), int(sparsity.min()) if len(sparsity) == samples else 0)
            order = zeros.argsort(descending=True)
            waiting = null[order[zeros[order] >= least]]
            for _ in range(2 * samples):
                if len(waiting) == 0:
                    break
                direction = slopes.sharpen(waiting[0])
                waiting = waiting[1:]
                waiting = waiting[(waiting @ direction).abs() <= SAME_DIRECTION]
                if not bool(((found @ direction).abs() > SAME_DIRECTION).any()):
                    found = torch.cat([found, direction[None]])
                    sparsity = torch.cat([sparsity, slopes.zeros(direction[None]).sum(1)])
            kept = _sparsest_basis(found, sparsity)
            settled = len(kept) == samples and bool((kept < before).all())
            found, sparsity = found[kept], sparsity[kept]
            if not settled:
                rounds_needed = None
            if rounds_needed is None and len(found) == samples:
                rounds_needed = 3 * turn + 4  # as many draws again, and more, may show sparser directions
            if rounds_needed is not None and turn >= rounds_needed:
                break
        return found[:samples]


def _sparsest_basis(directions: Tensor, sparsity: Tensor) -> Tensor:
    """Indices of directions (m, B) that are independent, those with the most zeros first.

    A mixture of two samples whose patterns agree has nearly as many zeros as they have. It depends on them where both are found.
    """
    basis, kept = directions.new_zeros(0, directions.shape[1]), []
    for index in sparsity.argsort(descending=True).tolist():
        rest = directions[index] - basis.T @ (basis @ directions[index])
        if float(rest.norm()) > INDEPENDENT:
            basis = torch.cat([basis, rest[None] / rest.norm()])
            kept.append(index)
    return torch.tensor(kept, dtype=torch.int64, device=directions.device)


@dataclass(frozen=True, kw_only=True)
class _Slopes:
    """The rows of L that say something, scaled such that L q has a root mean square of 1 for unit q; and the noise of each column."""

    left: Tensor  # (rows, B)
    noise: Tensor  # (B,)

    @classmethod
    def of(cls, rows: LinearRows) -> _Slopes:
        scale = len(rows.left) ** 0.5
        noise = scale * rows.rank.noise / rows.right.norm(dim=1)  # a row of `right` is as long as its singular value
        left = scale * rows.left
        return cls(left=left[left.norm(dim=1) > SILENT * float(noise.norm())], noise=noise)

    def zeros(self, directions: Tensor) -> Tensor:
        """Which entries of L q are zero to the noise: (m, rows)."""
        return (directions @ self.left.T).abs() < ZERO_NOISES * (directions * self.noise).norm(dim=1, keepdim=True)

    def sharpen(self, direction: Tensor) -> Tensor:
        """The direction that all of its zeros determine."""
        for _ in range(SHARPENINGS):
            zero = self.left[self.zeros(direction[None])[0]]
            direction = torch.linalg.eigh(zero.T @ zero).eigenvectors[:, 0]
        return direction
