"""The gate as CI systems read it: JUnit, SARIF and Markdown, with failures, errors and what was cut."""

import dataclasses
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from dosimeter.cli import main
from dosimeter.runs.audit import Audit
from dosimeter.runs.gate import parse_condition
from dosimeter.terminal.formats import FORMATS, check
from dosimeter.types import Record

LEAKED = Record(
    key="k",
    config={},
    surface="inputs",
    method="dlg",
    seed=0,
    threat_model={"defenses": []},
    metrics={"psnr": [30.0]},
    nulls={},
    outcome="completed",
    verdict="leaked",
    reason="a | b \x07 <c>",
    warnings=[],
    seconds=1.0,
    versions={},
)
RESULT = Audit(records=(LEAKED,), cuts=("sapag left out: no time",))
CONDITIONS = ["inputs.psnr.median > 20", "inputs.psnr.median > 40", "labels.verdict == leaked"]  # met, passed, not measured


def written(name: str) -> str:
    checks = check([parse_condition(text) for text in CONDITIONS], RESULT.records)
    return FORMATS[name](RESULT, checks, Path("out/report.html"), "my audit.toml")


def test_junit_has_a_failure_an_error_and_a_pass():
    suite = ElementTree.fromstring(written("junit"))
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("4", "1", "1")
    cases = {case.get("name"): [child.tag for child in case] for case in suite}
    assert cases == {CONDITIONS[0]: ["failure"], CONDITIONS[1]: [], "labels.verdict == leaked": ["error"], "inputs: leaked": ["system-out"]}
    assert suite[0][0].get("message").startswith("failed on inputs.psnr.median > 20: dlg gave 30")


def test_sarif_points_to_the_file_and_has_a_rule_for_every_result():
    log = json.loads(written("sarif"))
    (run,) = log["runs"]
    rules = {rule["id"] for rule in run["tool"]["driver"]["rules"]}
    assert (log["version"], run["tool"]["driver"]["name"]) == ("2.1.0", "Dosimeter")
    assert {one["ruleId"] for one in run["results"]} == rules
    levels = {one["ruleId"]: one["level"] for one in run["results"]}
    assert levels == {"leaked/inputs": "warning", f"gate/{CONDITIONS[0]}": "error", "gate/labels.verdict == leaked": "error"}
    assert all(one["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "my%20audit.toml" for one in run["results"])


def test_a_condition_that_is_given_twice_is_one_rule():
    checks = check([parse_condition(text) for text in CONDITIONS * 2], RESULT.records)
    rules = json.loads(FORMATS["sarif"](RESULT, checks, Path("r.html"), "a.toml"))["runs"][0]["tool"]["driver"]["rules"]
    assert len({rule["id"] for rule in rules}) == len(rules) == 3  # SARIF takes no rule twice


def test_markdown_has_verdicts_gate_and_cuts():
    lines = written("markdown").splitlines()
    assert lines[0].startswith("### Inputs leaked")
    assert "| inputs | **leaked** | dlg | a \\| b \x07 <c> |" in lines
    assert "| `inputs.psnr.median > 40` | passed |" in lines
    assert "- sapag left out: no time" in lines


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_pass_that_leaves_something_open_says_so(name):
    short = dataclasses.replace(
        LEAKED, details={"objective": 2.0, "objective_at_truth": 1.0}, verdict="not shown at this budget", reason="no"
    )
    checks = check([parse_condition("inputs.psnr.median > 40")], [short])
    said = "not failed on inputs.psnr.median > 40, but dlg under-optimised: more steps may show more"
    text = FORMATS[name](Audit(records=(short,)), checks, Path("report.html"), "audit.toml")
    assert said in text.replace("&gt;", ">")
    if name == "sarif":
        assert [one["level"] for one in json.loads(text)["runs"][0]["results"]] == ["note"]


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_an_audit_without_a_leak_or_a_gate_is_written_too(name):
    calm = Audit(records=(dataclasses.replace(LEAKED, verdict="not shown at this budget"),))
    assert FORMATS[name](calm, [], Path("r.html"), "a.toml")


def test_the_command_prints_the_format_and_keeps_the_exit_code(tmp_path, capsys):
    words = ["audit", "data.name=digits", "data.batch_size=2", "labels=['ilrg']", "features=[]", "maps=[]", "attacks=[]"]
    code = main([*words, "--out", str(tmp_path), "--fail-on", "labels.insacc.median >= 0", "--format", "junit"])
    assert code == 1
    assert ElementTree.fromstring(capsys.readouterr().out).get("failures") == "1"
    code = main([*words, "--out", str(tmp_path), "--fail-on", "inputs.verdict == leaked", "--format", "sarif"])
    assert code == 2
    assert json.loads(capsys.readouterr().out)["runs"]
