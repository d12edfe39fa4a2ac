"""The scale of a single sample's feature, which the form of its label determines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import softmax

GRID_POINTS = 4000  # scales of the first grid
NARROWINGS = 40  # rounds that narrow a minimum down
MINIMA_NARROWED = 24  # deepest minima of the first grid that are narrowed down
LARGEST_LOGIT = 1e4  # of the largest scale tried
FREE_PAIR_CLASSES = 6  # classes from which equal entries beside two free ones are no coincidence
DISTINCT_SCALES = 1e-3  # relative distance above which two scales are two answers


@dataclass(frozen=True)
class ScaledFeature:
    """A feature at one scale, and the label that this scale implies."""

    feature: Tensor  # (H,)
    error: Tensor  # (C,) softmax(z) − y
    label: Tensor  # (C,)
    misfit: float  # root mean square by which the label misses its form, relative to the error's norm


@dataclass(frozen=True, kw_only=True)
class LabelForm:
    """The form of a label: all entries but `free` of them are equal, and zero if `empty`; or the label is `known`."""

    free: int = 0
    empty: bool = False
    known: Tensor | None = None  # (C,)


def scale_feature(
    weight_gradient: Tensor, weight: Tensor, bias: Tensor | None, non_negative: bool, label: Tensor | None
) -> list[ScaledFeature]:
    """Every scale s that fits f = s v, with ∇W = u σ vᵀ and softmax(s W v + b) − y = (σ/s) u (soft-labels Eqs. 2-4), in float64.

    A given `label` (C,) fixes y. Otherwise y is one-hot or smoothed (all entries but one are equal) or a mixture of two classes (all
    but two are zero), Eq. 5, the form with fewer free entries first, then a smoothed mixture. Of two classes the label is taken to be
    hard, since every soft one fits. The misfit is relative to ‖softmax − y‖, which vanishes as s → ∞. If no s fits, the nearest is
    returned. One batched grid replaces the paper's L-BFGS and particle swarm.
    """
    u, size, v = _rank_one(weight_gradient.double())
    if float(v.sum()) < 0:
        u, v = -u, -v
    slope = weight.double() @ v  # (C,)
    offset = torch.zeros_like(slope) if bias is None else bias.double()
    signs = (1.0,) if non_negative else (1.0, -1.0)
    reach = LARGEST_LOGIT / float(slope.abs().max().clamp_min(1e-30))
    grid = torch.cat([sign * torch.logspace(-9, 0, GRID_POINTS, dtype=torch.float64, device=u.device) * reach for sign in signs])

    def labels(scales: Tensor) -> Tensor:
        return softmax(scales[:, None] * slope + offset, 1) - (size / scales)[:, None] * u

    def find_scales(form: LabelForm) -> list[ScaledFeature]:
        minima = _minimise(lambda s: _misfit(labels(s), form) * (s / size).abs(), grid)
        return [
            ScaledFeature(feature=scale * v, error=size / scale * u, label=labels(scale[None])[0], misfit=float(misfit))
            for scale, misfit in zip(*minima, strict=True)
        ]

    noise = 1e-5 if weight_gradient.dtype == torch.float32 else 1e-9
    found = [one for form in _label_forms(len(slope), label, u) for one in find_scales(form)]
    if label is None and len(slope) >= FREE_PAIR_CLASSES and not any(one.misfit <= noise for one in found):
        found += find_scales(LabelForm(free=2))
    fitting: list[ScaledFeature] = []
    for one in (one for one in found if one.misfit <= noise):
        if all(float((one.feature - other.feature).norm()) > DISTINCT_SCALES * float(other.feature.norm()) for other in fitting):
            fitting.append(one)
    return fitting or [min(found, key=lambda one: one.misfit)]


def scale_binary_feature(
    weight_gradient: Tensor, weight: Tensor, bias: Tensor | None, non_negative: bool, label: float | None
) -> list[ScaledFeature]:
    """Every scale s that fits f = s v for one logit and sigmoid cross-entropy: sigmoid(s w·v + b) − y = σ/s, with ∇W = σ v, in float64.

    Zhu and Blaschko, R-GAP, ICLR 2021: the product of a logit and its slope is known, and two logits can have it ("twin data"). Without a
    `label` both are tried. A label of 1 and the opposite feature explain the same gradient as a label of 0, unless features cannot be
    negative or there is a bias.
    """
    gradient = weight_gradient.double().flatten()
    size = gradient.norm()
    v = gradient / size
    slope, offset = weight.double().flatten() @ v, 0.0 if bias is None else float(bias)
    reach = LARGEST_LOGIT / float(slope.abs().clamp_min(1e-30))
    found = []
    for wanted in (0.0, 1.0) if label is None else (label,):
        sign = 1.0 if wanted < 0.5 else -1.0  # that of the error
        if non_negative and bool((sign * v).sum() < 0):
            continue

        def off(scales: Tensor, sign: float = sign, wanted: float = wanted) -> Tensor:
            return torch.sigmoid(sign * scales * slope + offset) - wanted - sign * size / scales

        grid = torch.logspace(-9, 0, GRID_POINTS, dtype=torch.float64, device=v.device) * reach
        values = off(grid)
        for start in (values[:-1] * values[1:] <= 0).nonzero().flatten().tolist():
            scale = sign * _bisect(off, float(grid[start]), float(grid[start + 1]))
            error = (size / scale).reshape(1)
            found.append(ScaledFeature(feature=scale * v, error=error, label=v.new_tensor([wanted]), misfit=0.0))
    return found


def _bisect(off: Callable[[Tensor], Tensor], low: float, high: float) -> float:
    rising = float(off(torch.tensor(high, dtype=torch.float64))) > 0
    for _ in range(100):
        middle = (low * high) ** 0.5
        above = float(off(torch.tensor(middle, dtype=torch.float64))) > 0
        low, high = (low, middle) if above == rising else (middle, high)
    return (low * high) ** 0.5


def _label_forms(classes: int, label: Tensor | None, like: Tensor) -> list[LabelForm]:
    """The known label, else the two hard labels of two classes, else a smoothed label and a mixture."""
    if label is not None:
        return [LabelForm(known=label)]
    if classes == 2:
        return [LabelForm(known=hard) for hard in torch.eye(2).to(like)]
    return [LabelForm(free=1), LabelForm(free=2, empty=True)]


def _misfit(labels: Tensor, form: LabelForm) -> Tensor:
    """How far each candidate label (n, C) is from its form: (n,). Entries outside [0, 1] add to the distance."""
    if form.known is not None:
        return (labels - form.known).square().mean(1).sqrt()
    outside = (-labels).clamp_min(0).amax(1) + (labels - 1).clamp_min(0).amax(1)
    equal = labels.sort(1).values[:, : labels.shape[1] - form.free]
    floor = equal.mean(1).abs() if form.empty else torch.zeros_like(outside)
    return equal.std(1, correction=0) + outside + floor


def _minimise(misfit: Callable[[Tensor], Tensor], grid: Tensor) -> tuple[Tensor, Tensor]:
    """The deepest local minima of the misfit on the grid, narrowed down, and their misfits: (m,) each, deepest first."""
    values = torch.cat([misfit(part) for part in grid.split(1000)])
    padded = torch.cat([values[:1] + 1, values, values[-1:] + 1])
    minima = ((padded[1:-1] <= padded[:-2]) & (padded[1:-1] <= padded[2:])).nonzero().flatten()
    minima = minima[values[minima].argsort()[:MINIMA_NARROWED]]
    centre, ratio = grid[minima], float(grid[1] / grid[0])
    steps = torch.linspace(-1, 1, 9, dtype=grid.dtype, device=grid.device)
    for _ in range(NARROWINGS):
        trial = centre[:, None] * ratio**steps  # (m, 9)
        value = misfit(trial.flatten()).reshape(trial.shape)
        best = value.argmin(1, keepdim=True)
        centre = trial.gather(1, best)[:, 0]
        ratio = 1 + (ratio - 1) / 2
    values = misfit(centre)
    order = values.argsort()
    return centre[order], values[order]


def _rank_one(gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """∇W = u σ vᵀ with unit u (C,) and v (H,), by power iteration from its largest row: one sample's gradient has rank one."""
    v = gradient[gradient.norm(dim=1).argmax()]
    v = v / v.norm()
    for _ in range(3):
        u = gradient @ v
        v = gradient.T @ (u / u.norm())
        v = v / v.norm()
    u = gradient @ v
    return u / u.norm(), u.norm(), v
