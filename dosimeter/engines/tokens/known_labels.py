"""The labels under which texts are guessed: what the label recoveries tell, the surest first."""

from __future__ import annotations

from torch import Generator

from dosimeter.engines.needs import check_needs
from dosimeter.interfaces import Exposure
from dosimeter.registry import LABELS
from dosimeter.types import LabelEstimate, Refused

RECOVERIES = ("subspace", "head_slopes", "ilrg", "zlg")  # in this order, of those that do not refuse


def labels_of_texts(exposure: Exposure, rng: Generator) -> LabelEstimate | None:
    """The first estimate that is certified, else the first of all; None where every recovery refuses, and for targets that are numbers."""
    first = None
    if exposure.public.loss.target_kind() == "numbers":
        return None
    for name in RECOVERIES:
        recovery = LABELS.build(name)
        try:
            check_needs(recovery, exposure, None)
            found = recovery(exposure, rng)
        except Refused:
            continue
        if exposure.public.batch_size not in (None, len(found.labels)):
            continue
        if found.certified:
            return found
        first = first or found
    return first
