"""Slopes before a norm that computes its own statistics: batch norm in train mode, or group norm.

Let z = γ x̂ + β be what the norm gives, with x̂ = (y − μ) / σ over the entries that share statistics. The slopes at y are
D = s (γ ż − mean(γ ż) − x̂ mean(γ ż x̂)), with ż the slopes at z and s = 1 / σ. Behind the norm stands a rectifier whose map is known. Where
the rectifier is open, its map is z, and x̂ is known. Where it is closed, ż is 0 and x̂ is not known. So D is known at the open entries up
to s, and nowhere else. But each position's row of D lies in the column space of the layer's gradient. This space has n = B·H·W
dimensions, fewer than the open channels. So the rows and all s follow from the open entries. One factor stays unknown for all entries
that no s ties together: the whole batch in train mode, one sample under group norm. A layer before a norm does not tell this factor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from dosimeter.engines.downward.layers import Layer
from dosimeter.engines.downward.slopes import Backward
from dosimeter.network.tape import Named, Operation

LEAST_SPARE = 1.2  # open channels for each dimension of the column space
LEAST_GAP = 10.0  # between the statistics' own direction and the next one
Freedom = Literal["sample", "batch"]  # what shares one unknown factor


@dataclass(frozen=True, kw_only=True)
class CompletedSlopes:
    """The slopes at a layer's output, up to one factor for each sample or for the batch."""

    slopes: Tensor  # (B, out, h, w)
    freedom: Freedom
    gap: float  # of the least clear statistics


def complete_slopes(backward: Backward, layer: Layer) -> CompletedSlopes | None:
    """The slopes at the output of a layer that a norm with own statistics and a known rectifier follow; None where there are none."""
    tape = backward.tape
    after = tape.consumers(layer.output)
    norm = tape.operation(after[0]) if len(after) == 1 else None
    groups = None if norm is None else _groups(norm, tape.shape(layer.output))
    behind = tape.consumers(after[0]) if groups is not None else []
    if norm is None or groups is None or len(behind) != 1 or behind[0] not in backward.gates:
        return None
    gate, slopes = backward.gates[behind[0]], backward.slopes(behind[0])
    if slopes is None or not bool(gate.known.all()):
        return None
    weight, bias = _affine(norm, backward)
    share = 0 if groups == 0 else slopes.shape[1] // groups
    passed = weight * slopes * gate.opened  # γ ż
    normed = torch.where(gate.opened, (gate.maps - bias) / weight, 0)  # x̂ at open entries
    known = passed - _mean(passed, share) - normed * _mean(passed * normed, share)
    sure = gate.opened & (gate.maps > gate.doubt / 2)
    basis = _column_space(layer, sure[:, 0].numel())
    if basis is None:
        return None
    return _complete(known, sure, basis, share)


def _complete(known: Tensor, sure: Tensor, basis: Tensor, share: int) -> CompletedSlopes | None:
    """Rows in the span of `basis` (out, r) that agree with s · known at the sure entries, for the s that fit best."""
    samples, channels, height, width = known.shape
    rows, marks = (one.permute(0, 2, 3, 1).reshape(samples, height * width, channels) for one in (known, sure))
    if float(marks.sum(2).min()) < LEAST_SPARE * basis.shape[1]:
        return None
    found, gaps = torch.empty_like(rows), []
    fits = [[torch.linalg.qr(basis[marks[b, q]]) for q in range(height * width)] for b in range(samples)]
    together = [range(samples)] if share == 0 else [range(b, b + 1) for b in range(samples)]
    tie = (
        torch.eye(channels).to(known) if share == 0 else torch.eye(channels // share).to(known).repeat_interleave(share, 0)
    )  # (out, statistics)
    for members in together:
        misses = tie.new_zeros(tie.shape[1], tie.shape[1])
        for b in members:
            for q in range(height * width):
                at = tie[marks[b, q]] * rows[b, q][marks[b, q]][:, None]  # (sure, statistics)
                off = at - fits[b][q][0] @ (fits[b][q][0].T @ at)
                misses += off.T @ off
        scale = misses.diagonal().clamp_min(1e-300).rsqrt()
        values, vectors = torch.linalg.eigh(misses * scale[:, None] * scale)
        gaps.append(float((values[1] / values[0].clamp_min(1e-300)).sqrt()) if len(values) > 1 else torch.inf)
        factors = vectors[:, 0] * scale
        factors = tie @ (factors / factors.sum() * len(factors))  # (out,)
        for b in members:
            for q in range(height * width):
                fit, triangle = fits[b][q]
                wanted = (factors * rows[b, q])[marks[b, q]]
                found[b, q] = basis @ torch.linalg.solve_triangular(triangle, (fit.T @ wanted)[:, None], upper=True)[:, 0]
    if min(gaps) < LEAST_GAP:
        return None
    slopes = found.reshape(samples, height, width, channels).permute(0, 3, 1, 2).contiguous()
    return CompletedSlopes(slopes=slopes, freedom="batch" if share == 0 else "sample", gap=min(gaps))


def _groups(norm: Operation, shape: tuple[int, ...]) -> int | None:
    """The number of groups of a group norm, 0 for a batch norm in train mode, None for anything else."""
    given = _given(norm)
    if len(shape) != 4:
        return None
    if norm.function is F.group_norm:
        return given["num_groups"]
    return 0 if norm.function is F.batch_norm and given.get("training") is True else None


def keeps_statistics(operation: Operation) -> bool:
    """Whether an operation is a norm over statistics of what it receives."""
    if operation.function is F.batch_norm:
        return _given(operation).get("training") is True
    return operation.function in (F.group_norm, F.layer_norm, F.instance_norm)


def _given(norm: Operation) -> dict[str, Any]:
    names = ("input", "num_groups", "weight", "bias", "eps")
    if norm.function is F.batch_norm:
        names = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
    return dict(zip(names, norm.arguments)) | norm.options


def _affine(norm: Operation, backward: Backward) -> tuple[Tensor, Tensor]:
    """γ and β, (1, out, 1, 1)."""
    given = _given(norm)
    found = []
    for name, missing in (("weight", 1.0), ("bias", 0.0)):
        one = given.get(name)
        tensor = backward.tensors[one.name] if isinstance(one, Named) else torch.tensor([missing], dtype=torch.float64)
        found.append(tensor.to(next(iter(backward.anchors.values()))).reshape(1, -1, 1, 1))
    return found[0], found[1]


def _mean(values: Tensor, share: int) -> Tensor:
    """Over the entries that share statistics: a channel of the batch (`share` 0), or `share` channels of a sample."""
    if share == 0:
        return values.mean((0, 2, 3), keepdim=True)
    grouped = values.reshape(len(values), -1, share, *values.shape[2:]).mean((2, 3, 4), keepdim=True)
    return grouped.expand(-1, -1, share, -1, -1).reshape(len(values), -1, 1, 1)


def _column_space(layer: Layer, positions: int) -> Tensor | None:
    """An orthonormal basis (out, r) of what the layer's gradient spans, r the number of positions, or one less behind a mean."""
    if positions >= layer.gradient.shape[0]:
        return None
    left, values, _ = torch.linalg.svd(layer.gradient.flatten(1), full_matrices=False)
    rank = max((positions - 1, positions), key=lambda r: float(values[r - 1] / values[r].clamp_min(1e-300)))
    return left[:, :rank]
