"""The dose on the page: what each round of a client shows, and what all rounds up to it show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dosimeter.numbers import significant
from dosimeter.report.findings import state
from dosimeter.surfaces.judging import judge_surfaces
from dosimeter.types import Record

UNNAMED = "unnamed"


@dataclass(frozen=True, kw_only=True)
class Moment:
    """One round of one client."""

    round: int
    verdicts: dict[str, tuple[str, str, str]]  # surface -> verdict, its state, and the reason
    directions: str
    directions_so_far: str
    epsilon_so_far: str
    share: float  # of the most directions on the page, in per cent, for the bar


@dataclass(frozen=True, kw_only=True)
class Timeline:
    client: str
    moments: list[Moment]


def timelines(records: Sequence[Record]) -> list[Timeline]:
    """One a client, where any client has several rounds; else none."""
    by_client: dict[str, dict[int, list[Record]]] = {}
    for record in records:
        number = record.threat_model.get("round")
        if isinstance(number, int):
            by_client.setdefault(str(record.threat_model.get("client") or UNNAMED), {}).setdefault(number, []).append(record)
    if not any(len(rounds) > 1 for rounds in by_client.values()):
        return []
    most = max((_number(group[0], "directions_so_far") or 0 for rounds in by_client.values() for group in rounds.values()), default=0)
    return [
        Timeline(client=client, moments=[_moment(number, rounds[number], most) for number in sorted(rounds)])
        for client, rounds in sorted(by_client.items())
    ]


def _moment(number: int, group: list[Record], most: float) -> Moment:
    together = _number(group[0], "directions_so_far")
    return Moment(
        round=number,
        verdicts={one.surface: (one.verdict.value, state(one.verdict), one.reason) for one in judge_surfaces(group)},
        directions=_text(_number(group[0], "directions")),
        directions_so_far=_text(together),
        epsilon_so_far=_text(_number(group[0], "epsilon_so_far"), "none promised"),
        share=round(100 * together / most, 1) if together and most else 0.0,
    )


def _number(record: Record, key: str) -> float | None:
    value = record.threat_model.get(key)
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _text(value: float | None, missing: str = "–") -> str:
    return missing if value is None else str(value) if isinstance(value, int) else significant(value)
