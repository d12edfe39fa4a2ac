"""The result of one check."""

from __future__ import annotations

from dataclasses import dataclass

Measured = tuple[float, str] | str  # a statistic and a sentence that explains it, or the reason why the check cannot look here
NO_HEAD = "nothing is found to act as the last layer"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A statistic, the threshold above which it is suspicious, and a sentence that explains it."""

    check: str
    statistic: float
    threshold: float
    sentence: str
    otherwise: str = ""  # what else than tampering raises the statistic in honest models

    @property
    def suspicious(self) -> bool:
        return self.statistic > self.threshold
