"""The share of one sample in an update, where clipping hides it or no batch size is declared: all samples have the same."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from dosimeter.engines.recursion.own_gradients import LIKELY, Share


def find_share(found: Sequence[Sequence[Share]], most: float, *, whole: bool) -> Share | None:
    """The share that most inputs have in common, or None where inputs that are mixtures may have it in common by chance.

    `found` holds, for each input, the shares under which it is a sample. No share exceeds `most`. `whole`: the share is one over a whole
    number, since nothing but the batch size is unknown.
    """
    options = [(place, share) for place, shares in enumerate(found) for share in shares if share.value <= most * (1 + share.spread)]
    if whole:
        options = [(place, exact) for place, share in options if (exact := _one_in_a_whole_number(share)) is not None]
    best: Share | None = None
    for place, share in options:
        luck, agreeing = share.luck, {place}
        for other, candidate in options:
            reach = share.spread + candidate.spread
            if other not in agreeing and abs(math.log(candidate.value / share.value)) <= reach:
                agreeing.add(other)
                luck *= candidate.luck * min(2 * reach, 1.0)
        luck *= math.comb(len(found), len(agreeing))
        if best is None or luck < best.luck:
            best = replace(share, luck=luck)
    return best if best is not None and best.luck <= LIKELY else None


def _one_in_a_whole_number(share: Share) -> Share | None:
    """The share of one sample in a whole number of samples; None where there is none within its uncertainty."""
    count = max(round(1 / share.value), 1)
    if abs(count * share.value - 1) > share.spread:
        return None
    return replace(share, value=1 / count, luck=share.luck * min(2 * share.spread * count, 1.0))
