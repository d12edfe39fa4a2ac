"""The verdict on each surface, from the records of all its methods."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dosimeter.surfaces.surface import surface_named, surface_names
from dosimeter.surfaces.verdicts import Verdict
from dosimeter.types import Outcome, Record


@dataclass(frozen=True, kw_only=True)
class SurfaceVerdict:
    """The verdict on one surface, with the record that shows most."""

    surface: str
    verdict: Verdict
    reason: str
    method: str  # of that record, "" where there is none


def judge_surfaces(records: Iterable[Record]) -> list[SurfaceVerdict]:
    """For each surface, the gravest verdict among its records, and its reason. Crashed methods do not count."""
    by_surface: dict[str, list[Record]] = {name: [] for name in surface_names()}
    for record in records:
        if record.outcome != Outcome.CRASHED and record.surface in by_surface:
            by_surface[record.surface].append(record)
    return [_judge_surface(name, group) for name, group in by_surface.items() if group]


def gravity(record: Record) -> tuple[int, bool, float]:
    """A rank for records of one surface: by verdict, by proof, then by score. Larger is worse for the client."""
    proved = bool(record.details.get("certified"))
    return -list(Verdict).index(Verdict(record.verdict)), proved, surface_named(record.surface).advantage(record)


def _judge_surface(surface: str, group: list[Record]) -> SurfaceVerdict:
    worst = max(group, key=gravity)
    if worst.verdict != Verdict.IMPOSSIBLE:
        return SurfaceVerdict(surface=surface, verdict=Verdict(worst.verdict), reason=worst.reason, method=worst.method)
    reasons = "; ".join(dict.fromkeys(record.reason for record in group))
    reason = reasons if len(group) == 1 else f"none of {len(group)} methods can run in this threat model: {reasons}"
    return SurfaceVerdict(surface=surface, verdict=Verdict.IMPOSSIBLE, reason=reason, method=worst.method if len(group) == 1 else "")
