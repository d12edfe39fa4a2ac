"""What the defenses in force leave unsaid of the head's gradient: its noise, and the bounds of entries that were not sent as they are."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import Tensor

from dosimeter.defenses.clipping import Clipping
from dosimeter.defenses.dpsgd import DPSGD
from dosimeter.defenses.gaussian_noise import GaussianNoise
from dosimeter.defenses.laplace_noise import LaplaceNoise
from dosimeter.defenses.outgoing import largest_magnitude
from dosimeter.defenses.pruning import Pruning
from dosimeter.defenses.quantisation import Quantisation
from dosimeter.defenses.soteria import Soteria
from dosimeter.interfaces import Defense, Public


@dataclass(frozen=True, kw_only=True)
class Distortion:
    """Entries of one layer: sent with noise where `live`, else known to lie between `low` and `high`."""

    noise: float  # standard deviation of what was added to a live entry
    live: Tensor  # (C, H) or (C,) bool
    low: Tensor  # like live, of the entries that are not
    high: Tensor


def distortion_of(change: Tensor | None, public: Public) -> Distortion | None:
    """What the public defenses did to a layer that was sent as `change`; None where they left its entries alone."""
    if change is None or not any(distorts(defense) for defense in public.defenses):
        return None
    live = torch.ones_like(change, dtype=torch.bool)
    low, high = torch.full_like(change, -torch.inf), torch.full_like(change, torch.inf)
    for defense in public.defenses:
        if isinstance(defense, Pruning) and defense.ratio > 0:
            kept = _survivors(change, defense)
            cutoff = float(change[kept].abs().min()) if bool(kept.any()) else 0.0
            live, low, high = live & kept, torch.where(kept, low, -cutoff), torch.where(kept, high, cutoff)
        elif isinstance(defense, Clipping) and defense.mode == "value":
            cut = change.abs() >= defense.max_norm
            live = live & ~cut
            low = torch.where(cut & (change > 0), defense.max_norm, low)
            high = torch.where(cut & (change < 0), -defense.max_norm, high)
        elif isinstance(defense, Soteria) and change.ndim > 1:
            live = live & change.any(0)  # whole columns are gone, and may have held anything
        elif _rounds(defense, change):
            reach, most = float(defense.step(change)) * (1.0 if defense.stochastic else 0.5), largest_magnitude(change)
            live = torch.zeros_like(live)
            low = torch.maximum(low, (change - reach).clamp_min(-most))
            high = torch.minimum(high, (change + reach).clamp_max(most))
    variance = sum(_added(defense, change, public) ** 2 for defense in public.defenses)
    return Distortion(noise=math.sqrt(variance), live=live, low=low, high=high)


def _rounds(defense: Defense, change: Tensor) -> TypeGuard[Quantisation]:
    """Whether entries are known to lie within a step; of a bias, whose sums are used, the rounding counts as noise."""
    return isinstance(defense, Quantisation) and defense.bits < 32 and change.ndim > 1 and change.numel() > 0


def distorts(defense: Defense) -> bool:
    """Whether a defense leaves entries of the gradient noisy, or known by bounds only."""
    match defense:
        case Pruning() | Soteria():
            return defense.ratio > 0
        case Clipping():
            return defense.mode == "value"
        case Quantisation():
            return defense.bits < 32
        case GaussianNoise() | LaplaceNoise():
            return True
        case DPSGD():
            return defense.noise_multiplier > 0
    return False


def _survivors(change: Tensor, pruning: Pruning) -> Tensor:
    """The entries that were not pruned: those that are not zero, or, where noise was added since, as many as survive."""
    if bool((change == 0).any()) or change.numel() == 0:
        return change != 0
    pruned = min(math.floor(pruning.ratio * change.numel() + 1e-9), change.numel() - 1)
    return change.abs() >= change.abs().flatten().kthvalue(pruned + 1).values


def _added(defense: Defense, change: Tensor, public: Public) -> float:
    """The standard deviation of what a defense added to an entry."""
    match defense:
        case GaussianNoise():
            return defense.std * (largest_magnitude(change) if defense.relative else 1.0)
        case LaplaceNoise():
            return math.sqrt(2) * defense.scale * (largest_magnitude(change) if defense.relative else 1.0)
        case Quantisation() if defense.bits < 32 and change.numel() and not _rounds(defense, change):
            return float(defense.step(change)) / math.sqrt(6 if defense.stochastic else 12)
        case DPSGD() if public.batch_size is not None and math.isfinite(defense.max_norm):
            return defense.noise_multiplier * defense.max_norm / public.batch_size
    return 0.0
