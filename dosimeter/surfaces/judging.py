"""The verdict on each surface, from the records of all its methods."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dosimeter.surfaces.surface import surface_named, surface_names
from dosimeter.surfaces.verdicts import Verdict, verdict_of
from dosimeter.types import Outcome, Record


@dataclass(frozen=True, kw_only=True)
class SurfaceVerdict:
    """The verdict on one surface, with the record that shows most."""

    surface: str
    verdict: Verdict
    reason: str
    method: str  # of that record, "" where there is none
    under_optimised: bool = False  # no leak is shown, and an attack stopped short of what its own objective allows


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
    return -list(Verdict).index(verdict_of(record)), proved, surface_named(record.surface).advantage(record)


def is_under_optimised(record: Record) -> bool:
    """Whether the truth has a lower objective than the attack reached, so that more steps may show more."""
    return bool(surface_named(record.surface).shortfalls(record.details))


def _judge_surface(surface: str, group: list[Record]) -> SurfaceVerdict:
    worst = max(group, key=gravity)
    verdict = verdict_of(worst)
    if verdict not in (Verdict.NOT_ATTEMPTED, Verdict.IMPOSSIBLE):
        short = [record.method for record in group if is_under_optimised(record)] if verdict is Verdict.NOT_SHOWN else []
        reason = worst.reason
        if short and not is_under_optimised(worst):
            reason += f"; {', '.join(dict.fromkeys(short))} under-optimised, so more steps may show more"
        return SurfaceVerdict(surface=surface, verdict=verdict, reason=reason, method=worst.method, under_optimised=bool(short))
    reason = "; ".join(dict.fromkeys(record.reason for record in group))
    if verdict is Verdict.NOT_ATTEMPTED and len(group) > 1:
        reason = f"none of {len(group)} methods runs in this threat model: {reason}"
    return SurfaceVerdict(surface=surface, verdict=verdict, reason=reason, method=worst.method if len(group) == 1 else "")
