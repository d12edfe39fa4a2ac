"""Numbers as people read them: few digits, a narrow space before the unit, a true minus sign."""

from __future__ import annotations

import math

THIN = "\u202f"  # narrow no-break space, between a number and its unit
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def plain(value: float, decimals: int) -> str:
    return _minus(f"{value:.{decimals}f}")


def significant(value: float) -> str:
    """Three significant digits, with a power of ten where zeros would have to be counted."""
    if value == 0:
        return "0"
    if not 1e-3 <= abs(value) < 1e5:
        digits, _, power = f"{value:.1e}".partition("e")
        return f"{_minus(digits)}×10{str(int(power)).translate(_SUPERSCRIPT)}"
    decimals = max(0, 2 - math.floor(math.log10(abs(value))))
    return plain(value, min(decimals, 4))


def power_of_ten(power: int) -> str:
    """A tick of a logarithmic axis: written out near 1, as a power elsewhere."""
    return plain(10.0**power, max(0, -power)) if -2 <= power <= 2 else f"10{str(power).translate(_SUPERSCRIPT)}"


def percent(share: float | None) -> str:
    return "–" if share is None else f"{plain(100 * share, 0)}{THIN}%"


def times(ratio: float | None) -> str:
    """How many times as much."""
    return "–" if ratio is None else f"{significant(ratio)}{THIN}×"


def duration(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds:.2f}{THIN}s"
    if seconds < 60:
        return f"{seconds:.1f}{THIN}s"
    return f"{int(seconds // 60)}{THIN}min {round(seconds % 60):02d}{THIN}s"


def _minus(text: str) -> str:
    return text.replace("-", "−")
