"""The dose: what the rounds of one client add up to. The same data sent round after round stand out of the noise further each time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dosimeter.client.checks import require_exposure
from dosimeter.engines.privacy import guarantees
from dosimeter.engines.row_errors import row_errors
from dosimeter.interfaces import Exposure
from dosimeter.network.head import find_head
from dosimeter.types import Refused


@dataclass(frozen=True, kw_only=True)
class Dose:
    """What one round shows of a client, and what all rounds up to it show."""

    directions: int | None  # of the feature space that stand above the noise in this round; None without a head that was sent
    directions_so_far: int | None  # the same in all rounds together
    epsilon_so_far: float | None  # that the declared defenses promise for all rounds together; None where they promise nothing


def dose(exposures: Sequence[Exposure]) -> tuple[Dose, ...]:
    """The dose after each of a client's rounds, in order.

    Ours; in no paper. The head's gradient of every round is a sum of errors times features. Divided by its noise and stacked over T
    rounds, T·C × H, it shows a direction of the feature space where a singular value exceeds √(T·C) + √H, the largest that noise alone
    reaches (Marchenko and Pastur). A direction that every round shows grows as √T, so that rounds add up, and so does ε.
    Departure: features of later rounds are those of a changed model. Directions of different rounds then add up without being the same.
    """
    stacked: list[Tensor] = []
    found = []
    if not isinstance(exposures, Iterable):
        raise TypeError(f"exposures: expected a list of a client's exposures, got {type(exposures).__name__}")
    for number, exposure in enumerate(exposures):
        require_exposure(exposure, f"exposures[{number}]")
        scaled = _over_noise(exposure)
        if scaled is not None and (not stacked or scaled.shape[1] == stacked[0].shape[1]):
            stacked.append(scaled)
        promised = [one.epsilon for one in _guarantees(exposure, number + 1) if math.isfinite(one.epsilon)]
        found.append(
            Dose(
                directions=None if scaled is None else directions_above_noise(scaled),
                directions_so_far=directions_above_noise(torch.cat(stacked)) if stacked else None,
                epsilon_so_far=min(promised, default=None),
            )
        )
    return tuple(found)


def directions_above_noise(rows: Tensor) -> int:
    """How many singular values of (n, H), whose entries have noise of deviation 1, exceed what noise alone reaches."""
    return int((torch.linalg.svdvals(rows) > math.sqrt(rows.shape[0]) + math.sqrt(rows.shape[1])).sum())


def _over_noise(exposure: Exposure) -> Tensor | None:
    """The head's gradient in units of its noise: (C, H); None where it was not sent, or where its noise is not known."""
    try:
        head = find_head(exposure)
    except Refused:
        return None
    if head.weight_gradient is None:
        return None
    gradient = head.weight_gradient.double()
    errors = row_errors(head.weight_gradient, head.weight, exposure.public).norms / math.sqrt(head.features)  # (C,)
    rounding = torch.finfo(head.weight_gradient.dtype).eps * float(gradient.abs().max())
    deviation = errors.clamp_min(rounding)
    return gradient / deviation[:, None] if bool(deviation.isfinite().all()) and rounding > 0 else None


def _guarantees(exposure: Exposure, rounds: int) -> list:
    try:
        return guarantees(exposure.public.defenses, steps=rounds)
    except Refused:
        return []
