"""A model that does not follow from the one of the round before."""

from __future__ import annotations

import math

from torch import Tensor

from dosimeter.inspection.pruning import rows_that_count
from dosimeter.inspection.sent import Sent

TURNED = 0.3  # cosine with its former self below which a row is another row
RESIZED = 8.0  # factor of its norm from which it is


def measure(sent: Sent) -> tuple[float, str] | None:
    """The largest share of a layer's rows that one round of training, or pruning, could hardly have made of the former ones."""
    if sent.reference is None:
        return None
    before = {name: value.detach() for name, value in sent.reference.named_parameters()}
    after = {name: value.detach() for name, value in sent.model.named_parameters()}
    changed = sorted(before.keys() ^ after.keys()) or [name for name in after if after[name].shape != before[name].shape]
    if changed:
        return (
            math.inf,
            f"the layers differ from the round before: {changed[0]!r} and {len(changed) - 1} more were added, removed or reshaped",
        )
    shares = {name: _replaced(before[name], after[name]) for name, value in after.items() if value.ndim >= 2}
    if not shares:
        return None
    name = max(shares, key=lambda key: shares[key])
    return shares[name], f"{shares[name]:.1%} of the rows of {name!r} have little to do with those of the round before"


def _replaced(before: Tensor, after: Tensor) -> float:
    old, new = before.flatten(1).double(), after.flatten(1).double().to(before.device)
    sizes = old.norm(dim=1), new.norm(dim=1)
    cosine = (old * new).sum(1) / (sizes[0] * sizes[1]).clamp_min(1e-30)
    tiny = 1e-30
    grown = (sizes[1] / sizes[0].clamp_min(tiny)).clamp(tiny, 1 / tiny).log().abs()
    kept = (sizes[0] > 0) & rows_that_count(new)
    return float(((cosine < TURNED) | (grown > math.log(RESIZED)))[kept].double().mean()) if bool(kept.any()) else 0.0
