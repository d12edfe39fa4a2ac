"""A model that training cannot have made from that of the round before."""

from __future__ import annotations

import math

from torch import Tensor

from dosimeter.inspection.finding import Measured
from dosimeter.inspection.pruning import rows_that_count
from dosimeter.inspection.received_model import ReceivedModel

LEAST_COSINE = 0.3  # with the old row: below it a row is another one, unless it contains the old row
CHANCE_COSINE = 2.0  # times 1/√d: up to there two unrelated rows of d entries may agree
CONTAINED = (0.3, 8.0)  # range of ⟨new, old⟩ / ‖old‖² in which a row contains the old one
MOST_RESIZED = 8.0  # factor of the norm from which on a row is another one
MOST_GROWN = 30.0  # the same for a row that contains the old one
FEWEST_ROWS = 3  # the rows of two classes mirror each other, and training may turn both at once
SMALLEST_NORM = 1e-150  # rows of at most this norm are empty


def measure(received_model: ReceivedModel) -> Measured:
    """The largest share of a layer's rows that one round of training or pruning can hardly have made from the old rows."""
    if received_model.reference is None:
        return "it needs the model of the round before"
    before = {name: value.detach() for name, value in received_model.reference.named_parameters()}
    after = {name: value.detach() for name, value in received_model.model.named_parameters()}
    changed = sorted(before.keys() ^ after.keys()) or [name for name in after if after[name].shape != before[name].shape]
    if changed:
        return (
            math.inf,
            f"the layers differ from the round before: {changed[0]!r} and {len(changed) - 1} more were added, removed or reshaped",
        )
    shares = {
        name: _replaced_share(before[name], after[name]) for name, value in after.items() if value.ndim >= 2 and len(value) >= FEWEST_ROWS
    }
    if not shares:
        return f"no parameter has {FEWEST_ROWS} rows"
    name = max(shares, key=lambda key: shares[key])
    return shares[name], f"{shares[name]:.1%} of the rows of {name!r} have little to do with those of the round before"


def _replaced_share(before: Tensor, after: Tensor) -> float:
    """The share of rows that no longer contain the old row.

    Training adds to a row many entries that are about orthogonal to it. After many steps the cosine is small, but
    ⟨new, old⟩ / ‖old‖² is still near 1. For a row that was replaced, this ratio is near 0.
    """
    old, new = before.flatten(1).double(), after.flatten(1).double().to(before.device)
    sizes = old.norm(dim=1).clamp_min(SMALLEST_NORM), new.norm(dim=1).clamp_min(SMALLEST_NORM)
    along = (old / sizes[0][:, None] * new).sum(1)
    cosine, contained, growth = along / sizes[1], along / sizes[0], sizes[1] / sizes[0]
    continued = (cosine >= CHANCE_COSINE / old.shape[1] ** 0.5) & (contained >= CONTAINED[0]) & (contained <= CONTAINED[1])
    same = (cosine >= LEAST_COSINE) & (growth <= MOST_RESIZED) | continued & (growth <= MOST_GROWN)
    replaced = ~same | (growth < 1 / MOST_RESIZED)
    counting = (sizes[0] > SMALLEST_NORM) & rows_that_count(new)
    return float(replaced[counting].double().mean()) if bool(counting.any()) else 0.0
