"""The ε that was typed beside the ε that holds, on the page and in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dosimeter.numbers import THIN, percent, significant
from dosimeter.surfaces.judging import judge_surfaces
from dosimeter.surfaces.verdicts import LEAKS
from dosimeter.types import Record

SERVER = "the server"
INFINITE = "∞"


@dataclass(frozen=True, kw_only=True)
class Promise:
    """One row: for whom and against whom, and each ε as text."""

    whom: str
    stated: str
    proved: str
    trial: str
    attacks: str  # what the methods of this audit showed
    reason: str


def promises(records: Sequence[Record]) -> list[Promise]:
    """One row a reading of the privacy setting, of the latest round; none where no setting is declared."""
    latest: dict[tuple[str, ...], dict] = {}
    for record in records:
        for reading in record.threat_model.get("privacy") or []:
            key = tuple(str(reading.get(name, "")) for name in ("setting", "unit", "change", "against"))
            if key not in latest or (reading.get("rounds") or 0) > (latest[key].get("rounds") or 0):
                latest[key] = reading
    shown = _shown(records) if latest else ""
    return [_promise(reading, shown) for reading in latest.values()]


def _promise(reading: dict, shown: str) -> Promise:
    change = "exchanged" if reading.get("change") == "replaced" else str(reading.get("change", ""))
    against, rounds = str(reading.get("against", "")), reading.get("rounds") or 1
    delta = f" at δ {significant(reading['delta'])}" if reading.get("delta") else ""
    found = reading.get("found")
    left = f"; at 1{THIN}% false alarms a test of membership finds at most {percent(found)}" if found is not None and found < 1 else ""
    trial = reading.get("shown")
    return Promise(
        whom=f"a {reading.get('unit', '')} {change}, against {against}",
        stated="none" if reading.get("stated") is None else significant(reading["stated"]),
        proved=(INFINITE if reading.get("proved") is None else significant(reading["proved"])) + delta,
        trial="–" if trial is None else f"≥ {significant(trial)}",
        attacks="–" if against != SERVER else shown if reading.get("behind", True) else "not run behind it",
        reason=f"{reading.get('setting', '')}, {rounds} round{'s' if rounds != 1 else ''}: {reading.get('reason', '')}{left}",
    )


def _shown(records: Sequence[Record]) -> str:
    """The surfaces on which something was proved or leaked."""
    found = [f"{one.surface} {one.verdict.value}" for one in judge_surfaces(records) if one.verdict in LEAKS]
    return ", ".join(found) or "nothing at this budget"
