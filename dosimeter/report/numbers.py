"""Numbers as the report writes them: few digits, units beside, misses said."""

from __future__ import annotations

import math

from dosimeter.report.words import is_share, unit

THIN = "\u202f"  # narrow no-break space, between a number and its unit
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def score(value: float | None, metric: str, with_unit: bool = True) -> str:
    """A score of a metric: `24.1 dB`, `94 %`, `3.2×10⁻⁵`; None is a miss."""
    if value is None or math.isnan(value):
        return "miss"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if is_share(metric):
        return plain(100 * value, 0 if abs(100 * value - round(100 * value)) < 0.05 else 1) + (f"{THIN}%" if with_unit else "")
    symbol = unit(metric)
    text = plain(value, 1) if symbol == "dB" else significant(value)
    return f"{text}{THIN}{symbol}" if symbol and with_unit else text


def score_range(low: float | None, high: float | None, metric: str) -> str:
    """Two scores joined by a dash, the unit written once."""
    bare = [score(value, metric, with_unit=False) for value in (low, high)]
    return score(low, metric) if bare[0] == bare[1] else f"{bare[0]} – {score(high, metric)}"


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


def plain(value: float, decimals: int) -> str:
    return _minus(f"{value:.{decimals}f}")


def duration(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds:.2f}{THIN}s"
    if seconds < 60:
        return f"{seconds:.1f}{THIN}s"
    return f"{int(seconds // 60)}{THIN}min {round(seconds % 60):02d}{THIN}s"


def _minus(text: str) -> str:
    return text.replace("-", "−")
