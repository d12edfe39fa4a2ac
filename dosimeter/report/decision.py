"""The words for whoever decides: one paragraph without technical terms, and what can be done about it."""

from __future__ import annotations

from collections.abc import Sequence

from dosimeter.report.findings import LEAK_STATES, Finding
from dosimeter.report.settings import describe_part
from dosimeter.report.tradeoff import Tradeoff
from dosimeter.report.words import enumeration
from dosimeter.surfaces.surface import surface_named
from dosimeter.types import Record


def in_plain_words(found: Sequence[Finding], records: Sequence[Record]) -> str:
    """What was shown, on what it rests, and what it does not say; for a reader who must answer for it."""
    leaked = sorted((finding for finding in found if finding.state in LEAK_STATES), key=_nearness)
    sizes = {record.threat_model.get("batch_size") for record in records}
    size = next(iter(sizes)) if len(sizes) == 1 else None
    samples = f"{size} private sample{'s' if size != 1 else ''}" if isinstance(size, int) else "private samples"
    sentences = [f"A client computed an update from {samples}, and every attack below saw the update and never the samples."]
    unverified = [finding.surface for finding in found if finding.state == "unverified"]
    if not leaked and not unverified:
        sentences.append("None of the attacks recovered more than can be had without the update. That is no proof that nothing can.")
    sentences.extend(finding.meaning for finding in leaked)
    if leaked:
        scored = [record for record in records if record.surface in {one.surface for one in leaked} and record.metrics]
        shown = "What was recovered was compared with the private samples themselves" if scored else "What was recovered is proved"
        also = ", and with what can be had without the update" if scored else " from the update alone; the samples were not at hand"
        sentences.append(f"{shown}{also}. So an update is no anonymous statistic here: it can hold what the samples hold.")
        sentences.append("Whoever receives, stores or passes on such updates must protect them as the samples.")
    if unverified:
        answers = f"For {enumeration(unverified)} an attack gave an answer that nobody can check without the private samples"
        sentences.append(f"{answers}: it may be right or invented, and it is no sign of safety.")
    if leaked or unverified:
        sentences.extend(_open_ends(found))
    behind = {str(record.threat_model.get("defenses") or []) for record in records}
    if len(behind) > 1:
        sentences.append(
            f"The client sent its update in {len(behind)} ways, without and behind defenses, and the worst of them is told here."
        )
    sentences.append("All of this was measured on one model, one way of training and these samples; another setting can leak more or less.")
    return " ".join(sentences)


def _nearness(finding: Finding) -> tuple[bool, int]:
    """The order in which leaks are told: what is closest to the samples themselves first, and membership last."""
    surface = surface_named(finding.surface)
    return surface.asks_about_candidates, -surface.position


def _open_ends(found: Sequence[Finding]) -> list[str]:
    """What is said of the surfaces that gave nothing away: that nothing was shown, or that nothing was tried."""
    ends = {
        ("not-shown",): "For {} no leak was shown, which does not mean safe.",
        ("not-attempted", "not-measured"): "On {} no method gave an answer, so nothing is known there.",
    }
    said = []
    for states, sentence in ends.items():
        names = [finding.surface for finding in found if finding.state in states]
        if names:
            said.append(sentence.format(enumeration(names)))
    return said


GRID = "dosimeter audit --defenses all"  # what measures the price of every defense


def what_now(found: Sequence[Finding], costs: Tradeoff | None) -> str:
    """The next step in one sentence, for the first screen; "" where nothing was measured."""
    states = {finding.state for finding in found}
    if costs is not None:
        return costs.advice.partition(". ")[0].rstrip(".") + "."
    if states & set(LEAK_STATES):
        return f"Protect each update as you protect the samples, until a defense holds: {GRID} measures which does."
    if "unverified" in states:
        return "Have the private samples compared with what came back: until then, treat each update as the samples."
    if states & {"not-shown", "not-attempted"}:
        return "Do not call the update safe: a longer budget, other methods or a ceiling below your limit would say more."
    return ""


def what_to_do(found: Sequence[Finding], records: Sequence[Record], costs: Tradeoff | None) -> str:
    """The advice of a grid of defenses; where none was measured, what the records' own figures advise, and how to have prices."""
    if costs is not None:
        return costs.advice
    behind = {tuple(describe_part(part) for part in record.threat_model.get("defenses") or []) for record in records}
    defenses = next(iter(behind)) if len(behind) == 1 else ()
    leaked = [finding.surface for finding in found if finding.state in LEAK_STATES]
    tried = f"Behind {enumeration(list(defenses))}, {enumeration(leaked) if leaked else 'nothing'} leaked. " if defenses else ""
    own = " ".join(_own_advice(found, records))
    return (
        f"{tried}{own}{' ' if own else ''}No defense’s price was measured, so there is nothing {'more ' if own else ''}to advise yet. "
        f"The command {GRID} tries each defense, mild and strong: what still leaks behind it, "
        "and what it costs in accuracy, bytes and time."
    )


def _own_advice(found: Sequence[Finding], records: Sequence[Record]) -> list[str]:
    """What each surface that leaked says of its own defense, once."""
    said: dict[str, None] = {}
    for surface in (surface_named(finding.surface) for finding in found if finding.state in LEAK_STATES):
        said.update(dict.fromkeys(surface.advice([record.details for record in records if record.surface == surface.name])))
    return list(said)
