"""What one check says."""

from __future__ import annotations

from dataclasses import dataclass

Measured = tuple[float, str] | str  # a statistic and what it means in a sentence, or why the check cannot look here
NO_HEAD = "nothing is found to act as the last layer"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A statistic, the threshold above which it is suspicious, and what that means in a sentence."""

    check: str
    statistic: float
    threshold: float
    sentence: str
    otherwise: str = ""  # what else than tampering has shown the same

    @property
    def suspicious(self) -> bool:
        return self.statistic > self.threshold
