"""A model that does not follow from the one of the round before."""

from __future__ import annotations

import math

from torch import Tensor

from dosimeter.inspection.finding import Measured
from dosimeter.inspection.pruning import rows_that_count
from dosimeter.inspection.received_model import Sent

TURNED = 0.3  # cosine with its former self below which a row is another row, unless it still holds that
CHANCE = 2.0  # times 1/√d: the cosine of rows of d entries that have nothing to do with each other
HELD = (0.3, 8.0)  # how often its former self a row holds that training has added to
RESIZED = 8.0  # factor of its norm from which it is another row
GROWN = 30.0  # the same for a row that still holds its former self
FEWEST = 3  # rows: the two of two classes mirror each other, and training may turn both at once
TINY = 1e-150


def measure(sent: Sent) -> Measured:
    """The largest share of a layer's rows that one round of training, or pruning, could hardly have made of the former ones."""
    if sent.reference is None:
        return "it needs the model of the round before"
    before = {name: value.detach() for name, value in sent.reference.named_parameters()}
    after = {name: value.detach() for name, value in sent.model.named_parameters()}
    changed = sorted(before.keys() ^ after.keys()) or [name for name in after if after[name].shape != before[name].shape]
    if changed:
        return (
            math.inf,
            f"the layers differ from the round before: {changed[0]!r} and {len(changed) - 1} more were added, removed or reshaped",
        )
    shares = {name: _replaced(before[name], after[name]) for name, value in after.items() if value.ndim >= 2 and len(value) >= FEWEST}
    if not shares:
        return f"no parameter has {FEWEST} rows"
    name = max(shares, key=lambda key: shares[key])
    return shares[name], f"{shares[name]:.1%} of the rows of {name!r} have little to do with those of the round before"


def _replaced(before: Tensor, after: Tensor) -> float:
    """The share of rows that do not hold their former self any more.

    Training adds to a row, in many entries, what is about orthogonal to it: after many steps ⟨new, old⟩ / ‖old‖² is still near
    1, however small the cosine has become. Of a row that was replaced it is near 0.
    """
    old, new = before.flatten(1).double(), after.flatten(1).double().to(before.device)
    sizes = old.norm(dim=1).clamp_min(TINY), new.norm(dim=1).clamp_min(TINY)
    along = (old / sizes[0][:, None] * new).sum(1)
    cosine, held, grown = along / sizes[1], along / sizes[0], sizes[1] / sizes[0]
    continued = (cosine >= CHANCE / old.shape[1] ** 0.5) & (held >= HELD[0]) & (held <= HELD[1])
    same = (cosine >= TURNED) & (grown <= RESIZED) | continued & (grown <= GROWN)
    replaced = ~same | (grown < 1 / RESIZED)
    counted = (sizes[0] > TINY) & rows_that_count(new)
    return float(replaced[counted].double().mean()) if bool(counted.any()) else 0.0
