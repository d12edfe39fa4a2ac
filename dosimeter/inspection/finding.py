"""What one check says."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A statistic, the threshold above which it is suspicious, and what that means in a sentence."""

    check: str
    statistic: float
    threshold: float
    sentence: str

    @property
    def suspicious(self) -> bool:
        return self.statistic > self.threshold
