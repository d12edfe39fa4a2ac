"""What a score can mean: leaked, not shown at this budget, impossible here, or not measured."""

from __future__ import annotations

from enum import StrEnum

UTILITY = "utility"  # stands for a surface in the records that say what the defenses cost; they have no verdict


class Verdict(StrEnum):
    """The gravest for the client first."""

    LEAKED = "leaked"
    NOT_SHOWN = "not shown at this budget"
    IMPOSSIBLE = "impossible here"
    NOT_MEASURED = "not measured"  # of a method that an error stopped: it has no say on its surface
