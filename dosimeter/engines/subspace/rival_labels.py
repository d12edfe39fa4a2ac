"""Whether a solution's label is determined: how much worse every other label fits, in units of the noise.

The equations (I − UUᵀ) w∘d(t) = 0 see a label y through w∘y. The row of a class that several samples share is large, so its rounding is
large and its weight w is small. Where a head is sure of itself, two labels may then fit alike although the feature is exact. With σ the
deviations of the equations (certificate.py), and R the projector off σ⁻¹U and off the slopes σ⁻¹M,

    ρ = R σ⁻¹ w∘d(t)                  is the whitened residual under the label a,
    ρ + v,  v = R σ⁻¹ w∘(y_a − y_b)   is that under the label b, at the coordinates that fit b best.

The rise ‖ρ + v‖² − ‖ρ‖² is twice the log-likelihood ratio of a against b. If a is true, it is ‖v‖² give or take 2‖v‖.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dosimeter.engines.subspace.certificate import equation_variance
from dosimeter.engines.subspace.equations import Equations, probabilities, slopes, weighted_errors, whole_span
from dosimeter.engines.subspace.single import chunk_size

THIRD_SHARE = 5e-3  # the largest share of a third class that a blend of two may hide


def label_margins(equations: Equations, t: Tensor, labels: Tensor) -> Tensor:
    """By how many standard deviations each label fits better than the second best: (n,), for solutions t (n, B).

    Of a blend, it is by how many standard deviations a third class with a share of `THIRD_SHARE` would show.
    """
    if equations.classes - 1 <= 2 * equations.rank + equations.blends:
        return torch.zeros_like(t[:, 0])
    margins = _blend_margins if equations.blends else _class_margins if equations.targets is None else _target_margins
    chunk = chunk_size(whole_span(equations), t) // 2 + 1
    pieces = [margins(equations, part, names) for part, names in zip(t.split(chunk), labels.split(chunk))]
    return torch.cat(pieces) if pieces else t.new_empty(0)


def _class_margins(equations: Equations, t: Tensor, labels: Tensor) -> Tensor:
    basis, residual, sizes = _whiten(equations, t, labels)
    index = torch.arange(len(t), device=t.device)
    visible = 1 - basis.square().sum(2)  # (n, C) diagonal of R
    across = -(basis @ basis[index, labels, :, None])[:, :, 0]  # (n, C) row of R at the label, off its diagonal
    own = sizes[index, labels, None]
    rise = own.square() * visible[index, labels, None] + sizes.square() * visible - 2 * own * sizes * across
    rise = rise + 2 * (own * residual[index, labels, None] - sizes * residual)
    rise[index, labels] = torch.inf
    return rise.amin(1).clamp_min(0).sqrt()


def _target_margins(equations: Equations, t: Tensor, labels: Tensor) -> Tensor:
    """The rivals of a given soft label are the other labels given."""
    assert equations.targets is not None
    basis, residual, sizes = _whiten(equations, t, labels)
    apart = sizes[:, None, :] * (equations.targets[labels][:, None, :] - equations.targets)  # (n, m, C)
    apart = apart - (apart @ basis) @ basis.transpose(1, 2)
    rise = apart.square().sum(2) + 2 * (apart @ residual[:, :, None])[:, :, 0]
    rise[torch.arange(len(t), device=t.device), labels] = torch.inf
    return rise.amin(1).clamp_min(0).sqrt()


def _blend_margins(equations: Equations, t: Tensor, labels: Tensor) -> Tensor:
    basis, _, sizes = _whiten(equations, t, labels)
    index, first, second = torch.arange(len(t), device=t.device), labels // equations.classes, labels % equations.classes
    visible = 1 - basis.square().sum(2)
    across = -(basis @ basis[index, first, :, None])[:, :, 0]
    own = sizes[index, first, None]
    rise = own.square() * visible[index, first, None] + sizes.square() * visible - 2 * own * sizes * across  # (n, C) of a whole share
    rise[index, first] = rise[index, second] = torch.inf
    return THIRD_SHARE * rise.amin(1).clamp_min(0).sqrt()


def _whiten(equations: Equations, t: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The basis of what σ⁻¹U, the slopes and a blend explain (n, C, k), the residual ρ (n, C), and σ⁻¹w times the label's share (n, C)."""
    span, classes = whole_span(equations), equations.classes
    p = probabilities(equations, span, t)
    error = weighted_errors(equations, span, p, labels)
    deviation = equation_variance(equations, t, p, error @ span.left).sqrt()  # (n, C)
    sizes = equations.share * equations.spectrum.weights / deviation
    columns = [span.left.expand(len(t), -1, -1) / deviation[:, :, None], slopes(equations, span, p) / deviation[:, :, None]]
    if equations.blends:
        index, blend = torch.arange(len(t), device=t.device), torch.zeros_like(p)
        blend[index, labels // classes] += sizes[index, labels // classes]
        blend[index, labels % classes] -= sizes[index, labels % classes]
        columns.append(blend[:, :, None])
    stacked = torch.cat(columns, 2)
    stacked = stacked / torch.linalg.vector_norm(stacked, dim=1, keepdim=True).clamp_min(torch.finfo(p.dtype).tiny)
    basis = torch.linalg.qr(stacked).Q
    residual = (error / deviation)[:, :, None]
    return basis, (residual - basis @ (basis.transpose(1, 2) @ residual))[:, :, 0], sizes
