"""What a record can mean: leaked, not shown, not attempted, impossible or not measured; without truth, proved or unverified."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Any

from dosimeter.types import Impossible, Outcome, Record, Refused

UTILITY = "utility"  # in place of a surface in the records of a defense's cost, which have no verdict


class Verdict(StrEnum):
    """The gravest for the client first."""

    LEAKED = "leaked"
    PROVED = "proved"  # from the update alone, under premises; the private samples are not at hand
    UNVERIFIED = "unverified"  # a method gave an answer, and the private samples that would score it are not at hand
    NOT_SHOWN = "not shown at this budget"
    NOT_ATTEMPTED = "not attempted"  # the method does not run here, which says nothing about other methods
    IMPOSSIBLE = "impossible here"  # a theorem forbids it to every method
    NOT_MEASURED = "not measured"  # an error stopped the method, so it says nothing about its surface


LEAKS = (Verdict.LEAKED, Verdict.PROVED)


def verdict_of(record: Record) -> Verdict:
    """The verdict of a record. "Impossible here" without a theorem is "not attempted"."""
    known = [verdict.value for verdict in Verdict]
    if record.verdict not in known:
        raise ValueError(f"record {record.key!r}: verdict: expected one of {', '.join(known)}, got {record.verdict!r}")
    verdict = Verdict(record.verdict)
    return Verdict.NOT_ATTEMPTED if verdict is Verdict.IMPOSSIBLE and not record.details.get("theorem") else verdict


def verdict_of_failure(outcome: Outcome, theorem: str) -> Verdict:
    """The verdict of a method that gave nothing to score."""
    if outcome is Outcome.CRASHED:
        return Verdict.NOT_MEASURED
    return Verdict.IMPOSSIBLE if outcome is Outcome.IMPOSSIBLE and theorem else Verdict.NOT_ATTEMPTED


def premises_sentence(record: Record) -> str:
    """What the proofs of a record take for granted, as one sentence; "" where it proves nothing."""
    premises = record.details.get("premises") or []
    return f"what is proved takes for granted: {'; '.join(map(str, premises))}" if premises else ""


def premises_beside(records: Iterable[Record], reason: str) -> tuple[str, Record] | None:
    """The premises to print beside a verdict: those of the proof with this reason that takes least for granted, and its record."""
    proofs = [(premises_sentence(record), record) for record in records if record.reason == reason and premises_sentence(record)]
    return min(proofs, key=lambda proof: len(proof[0]), default=None)


def refusal_of(found: Any) -> Refused | None:
    """What an estimate refuses, where its outcome is not attempted or impossible; else None."""
    if found.outcome is Outcome.IMPOSSIBLE and found.theorem:
        return Impossible(found.message, theorem=found.theorem)
    return Refused(found.message) if found.outcome in (Outcome.IMPOSSIBLE, Outcome.NOT_ATTEMPTED) else None
