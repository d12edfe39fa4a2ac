"""Rows of the last layer that were zeroed or scaled (GradFilt)."""

from __future__ import annotations

from dosimeter.inspection.sent import Sent

FLOOR = 1e-9


def measure(sent: Sent) -> tuple[float, str] | None:
    """How many times the heaviest row of the last layer outweighs the lower quartile of its rows.

    Rows are taken relative to their median row, since a vector added to all of them changes no softmax: rows that are all
    alike are as good as zero.
    """
    weight = sent.head.weight.double()
    norms = (weight - weight.median(0).values).norm(dim=1)
    if len(norms) < 3 or float(norms.max()) == 0:
        return None
    ratio = float(norms.max() / norms.quantile(0.25).clamp_min(FLOOR * norms.max()))
    return ratio, f"the heaviest row of the last layer weighs {ratio:.3g} times as much as its lighter rows"
