"""The top of the page: the verdict on each surface, all verdicts in one sentence and by setting, and the warnings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dosimeter.report.limits import limits_sentence
from dosimeter.report.settings import group_by_setting
from dosimeter.report.words import NOT_MEASURED, enumeration
from dosimeter.surfaces.judging import gravity, judge_surfaces
from dosimeter.surfaces.limits import limits_of
from dosimeter.surfaces.surface import Surface, surfaces
from dosimeter.surfaces.verdicts import Verdict, premises_beside
from dosimeter.types import Outcome, Record

LEAK_STATES = ("leaked", "proved")
OPEN_STATES = ("not-attempted", "not-measured")  # they lead no headline where only surfaces are open that most models close


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The verdict on one surface, and what it means in plain words."""

    surface: str
    verdict: str
    state: str  # leaked, proved, unverified, not-shown, not-attempted, impossible or not-measured: what the style sheet colours by
    meaning: str
    reason: str = ""
    method: str = ""
    setting: str = ""
    under_optimised: bool = False  # no leak is shown, and an attack stopped short
    premises: str = ""  # what the proof behind the verdict takes for granted
    limits: str = ""  # how far apart the best attack and the ceiling are


def findings(records: Sequence[Record]) -> list[Finding]:
    """One finding a surface: the gravest verdict of all settings, or that nothing was measured."""
    settings = group_by_setting(records)
    verdicts = {verdict.surface: verdict for verdict in judge_surfaces(records)}
    found = []
    for surface in _fitting_surfaces(records):
        judged = verdicts.get(surface.name)
        measured = [record for record in records if record.surface == surface.name]
        if judged is None:
            unknown = Verdict.NOT_MEASURED
            meaning = surface.meaning(unknown) if measured else NOT_MEASURED
            found.append(Finding(surface=surface.name, verdict=unknown.value, state=state(unknown), meaning=meaning))
            continue
        settled = limits_of(surface, measured) if len(settings) == 1 else None  # the limits of several settings are several
        proof = premises_beside(measured, judged.reason)
        telling = max((record for record in measured if record.outcome != Outcome.CRASHED), key=gravity)
        found.append(
            Finding(
                surface=surface.name,
                verdict=judged.verdict.value,
                state=state(judged.verdict),
                meaning=surface.meaning(judged.verdict),
                reason=judged.reason,
                method=judged.method,
                under_optimised=judged.under_optimised,
                premises=proof[0] if proof else "",
                limits=limits_sentence(settled) if settled and settled.tells else "",
                setting=next(setting.name for setting in settings if telling in setting.records),
            )
        )
    return found


def _fitting_surfaces(records: Sequence[Record]) -> list[Surface[Any]]:
    """The surfaces that the audited clients can have: a model over pixels has no tokens, a regression has targets in place of labels."""
    texts = {record.surface for record in records if record.threat_model.get("inputs") == "token ids"}
    others = {record.surface for record in records if record.threat_model.get("inputs") != "token ids"}
    kinds = {"texts", "positions"} if texts else set()
    if others or not texts:
        kinds |= {"numbers"} if _read_by(others, "numbers") else {kind for kind in ("regressions", "grids") if _read_by(others, kind)}
    measured = texts | others
    return [surface for surface in surfaces() if surface.name in measured or (kinds & set(surface.reads) and not surface.optional)]


def _read_by(names: set[str], kind: str) -> bool:
    """Whether all these surfaces read updates of a kind of clients."""
    return all(kind in surface.reads for surface in surfaces() if surface.name in names)


def headline(found: Sequence[Finding]) -> str:
    """All verdicts in one sentence."""
    return "; ".join(_phrases(found)) + "."


def headline_parts(found: Sequence[Finding]) -> tuple[str, str]:
    """The gravest verdict as a sentence, and all others as another; "" where there are none."""
    first, *others = _phrases(found)
    rest = "; ".join(others)
    return f"{first}.", f"{rest[0].upper()}{rest[1:]}." if rest else ""


def _phrases(found: Sequence[Finding]) -> list[str]:
    by_state: dict[str, list[str]] = {}
    for finding in found:
        by_state.setdefault("under-optimised" if finding.under_optimised else finding.state, []).append(finding.surface)
    phrases = {
        "leaked": "{} leaked",
        "proved": "{} proved from the update alone, without the private samples",
        "unverified": "{} recovered by attacks whose answers are unverified",
        "not-attempted": "nothing tried on {}, which says nothing about safety",
        "under-optimised": "no leak of {} shown at this budget by attacks that were under-optimised, so more steps may show more",
        "not-shown": "no leak of {} shown at this budget",
        "impossible": "recovery of {} impossible here",
        "not-measured": "{} not measured",
    }
    waited = {surface.name for surface in surfaces() if surface.gate_waits}
    told = sorted((key for key in phrases if key in by_state), key=lambda key: key in OPEN_STATES and not waited & set(by_state[key]))
    said = [phrases[key].format(enumeration(by_state[key])) for key in told]
    return [said[0][0].upper() + said[0][1:], *said[1:]]


def verdict_matrix(records: Sequence[Record]) -> list[tuple[str, dict[str, tuple[str, str]]]]:
    """For each setting, each surface's verdict and its state."""
    return [
        (setting.name, {v.surface: (v.verdict.value, state(v.verdict)) for v in judge_surfaces(setting.records)})
        for setting in group_by_setting(records)
    ]


def warnings(records: Sequence[Record]) -> list[tuple[str, list[str]]]:
    """Each warning once, with the methods that gave it."""
    by_text: dict[str, dict[str, None]] = {}
    for record in records:
        crash = [f"stopped by an error, so it says nothing: {record.reason}"] if record.outcome == Outcome.CRASHED else []
        for text in crash + record.warnings:
            by_text.setdefault(text, {})[record.method] = None
    return [(text, list(methods)) for text, methods in by_text.items()]


def state(verdict: str) -> str:
    return {
        Verdict.LEAKED: "leaked",
        Verdict.PROVED: "proved",
        Verdict.UNVERIFIED: "unverified",
        Verdict.NOT_SHOWN: "not-shown",
        Verdict.NOT_ATTEMPTED: "not-attempted",
        Verdict.IMPOSSIBLE: "impossible",
        Verdict.NOT_MEASURED: "not-measured",
    }[Verdict(verdict)]
