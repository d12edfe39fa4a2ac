"""NVIDIA FLARE's filter by percentile."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from dosimeter.interfaces import PrivacySetting
from dosimeter.privacy_settings.ranges import PositiveOrZero
from dosimeter.registry import PRIVACY
from dosimeter.types import PrivacyReading


@PRIVACY.register("nvflare_percentile")
@dataclass(frozen=True, kw_only=True)
class NVFlarePercentile(PrivacySetting):
    """NVIDIA FLARE's `PercentilePrivacy`: sends the largest entries, cut to ±gamma, without noise; no ε holds.

    Read in nvflare 2.9.0, app_common/filters/percentile_privacy.py; Shokri & Shmatikov, "Privacy-Preserving Deep Learning", CCS 2015,
    whose noise the filter leaves out. What is sent is a function of the data: two updates that differ give outputs that differ, so that a
    test tells them apart without error.
    """

    framework: ClassVar[str] = "nvflare 2.9.0"

    percentile: PositiveOrZero = 10.0
    gamma: PositiveOrZero = 0.01

    def readings(self, rounds: int, delta: float | None = None) -> tuple[PrivacyReading, ...]:
        common = {"change": "replaced", "against": "the server", "stated": None, "proved": math.inf, "delta": delta or 0.0, "found": 1.0}
        reason = "entries are left out and cut, and nothing random is added"
        return tuple(PrivacyReading(unit=unit, reason=reason, **common) for unit in ("client", "sample"))

    def declared(self, unit: float) -> tuple[tuple[str, dict[str, Any]], ...]:
        return (("unmodelled", {}),)

    @classmethod
    def read(cls, thing: Any) -> dict[str, Any] | None:
        if type(thing).__name__ != "PercentilePrivacy":
            return None
        return {"percentile": float(thing.percentile), "gamma": float(thing.gamma)}
