"""What a score can mean: leaked, not shown at this budget, impossible here, or not measured."""

from __future__ import annotations

from enum import StrEnum

UTILITY = "utility"  # in place of a surface in the records of a defense's cost, which have no verdict


class Verdict(StrEnum):
    """The gravest for the client first."""

    LEAKED = "leaked"
    NOT_SHOWN = "not shown at this budget"
    IMPOSSIBLE = "impossible here"
    NOT_MEASURED = "not measured"  # an error stopped the method, so it says nothing about its surface
