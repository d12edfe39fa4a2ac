"""An audit as other programs read it: JUnit XML, SARIF and Markdown, for the pages of continuous integration."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote
from xml.etree import ElementTree

from dosimeter.report.findings import findings, headline
from dosimeter.runs.audit import Audit
from dosimeter.runs.gate import AnyCondition, caveat
from dosimeter.surfaces.surface import surface_named
from dosimeter.surfaces.verdicts import LEAKS, UTILITY
from dosimeter.types import Record
from dosimeter.version import __version__

SARIF_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # characters that XML 1.0 lacks


@dataclass(frozen=True, kw_only=True)
class Check:
    """One condition of the gate: whether it is met, or why nothing measured it."""

    condition: str
    failure: str | None
    untested: str | None
    caveat: str = ""  # what a condition that is not met leaves open


def check(conditions: Sequence[AnyCondition], records: Sequence[Record]) -> list[Check]:
    return [
        Check(
            condition=str(condition),
            failure=(failure := condition.failure(records)),
            untested=None if failure else condition.why_untested(records),
            caveat=caveat(condition, records),
        )
        for condition in dict.fromkeys(conditions)  # the schema of SARIF takes no rule twice
    ]


def junit(result: Audit, checks: Sequence[Check], report: Path, source: str) -> str:
    """One test case a condition, which fails where it is met and errs where nothing measured it; and one a surface, for its verdict."""
    suite = ElementTree.Element("testsuite", name="dosimeter", tests=str(len(checks) + len(result.verdicts)))
    suite.set("failures", str(sum(one.failure is not None for one in checks)))
    suite.set("errors", str(sum(one.untested is not None for one in checks)))
    for one in checks:
        case = ElementTree.SubElement(suite, "testcase", classname="dosimeter.gate", name=_plain(one.condition))
        if one.failure is not None:
            ElementTree.SubElement(case, "failure", type="condition met", message=_plain(one.failure))
        elif one.untested is not None:
            ElementTree.SubElement(case, "error", type="not measured", message=_plain(one.untested))
        elif one.caveat:
            ElementTree.SubElement(case, "system-out").text = _plain(one.caveat)
    for verdict in result.verdicts:
        case = ElementTree.SubElement(suite, "testcase", classname="dosimeter.verdict", name=f"{verdict.surface}: {verdict.verdict.value}")
        ElementTree.SubElement(case, "system-out").text = _plain(f"{verdict.method}: {verdict.reason}; report: {report}")
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def sarif(result: Audit, checks: Sequence[Check], report: Path, source: str) -> str:
    """One result a leaked surface and one a condition that is met, not measured or left open; all point to the file that was audited."""
    place = {"physicalLocation": {"artifactLocation": {"uri": quote(source)}, "region": {"startLine": 1}}}
    gated = any(one.failure for one in checks)
    leaked = [verdict for verdict in result.verdicts if verdict.verdict in LEAKS]
    rules = [
        {
            "id": f"leaked/{one.surface}",
            "shortDescription": {"text": f"{one.surface} leaked"},
            "help": {"text": surface_named(one.surface).if_leaked},
        }
        for one in leaked
    ] + [{"id": f"gate/{one.condition}", "shortDescription": {"text": one.condition}} for one in checks if _remark(one)]
    results: list[dict[str, Any]] = [
        {"ruleId": f"leaked/{one.surface}", "level": "warning" if gated else "note", "message": {"text": f"{one.reason} ({one.method})"}}
        for one in leaked
    ]
    results += [
        {"ruleId": f"gate/{one.condition}", "level": "note" if one.caveat else "error", "message": {"text": _remark(one)}}
        for one in checks
        if _remark(one)
    ]
    driver = {"name": "Dosimeter", "version": __version__, "rules": rules}
    run = {"tool": {"driver": driver}, "results": [one | {"locations": [place]} for one in results]}
    return json.dumps({"$schema": SARIF_SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2, ensure_ascii=False) + "\n"


def markdown(result: Audit, checks: Sequence[Check], report: Path, source: str) -> str:
    """A summary for a page of a pull request: the headline, the verdicts, the gate and what was cut."""
    records = [record for record in result.records if record.surface != UTILITY]
    lines = [f"### {headline(findings(records))}", "", "| surface | verdict | method | why |", "|---|---|---|---|"]
    lines += [
        f"| {v.surface} | {f'**{v.verdict}**' if v.verdict in LEAKS else v.verdict.value} | {_cell(v.method)} | {_cell(v.reason)} |"
        for v in result.verdicts
    ]
    if checks:
        lines += ["", "| gate | result |", "|---|---|"]
        lines += [f"| `{_cell(one.condition)}` | {_cell(_outcome(one))} |" for one in checks]
    lines += ["", *(f"- {cut}" for cut in result.cuts), f"Report: `{report}`"]
    return "\n".join(lines) + "\n"


FORMATS: dict[str, Callable[[Audit, Sequence[Check], Path, str], str]] = {"junit": junit, "sarif": sarif, "markdown": markdown}


def _outcome(one: Check) -> str:
    return one.failure or (f"not measured: {one.untested}" if one.untested else one.caveat or "passed")


def _remark(one: Check) -> str:
    return one.failure or one.untested or one.caveat


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _plain(text: str) -> str:
    return _NO_XML.sub("?", text)
