"""The front door: is this model rigged?"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import nn

from dosimeter.inspection.checks import (
    constant_output,
    head_biases,
    head_rows,
    inserted_layer,
    isolated_samples,
    lone_rows,
    parallel_rows,
    previous_round,
    shut_out_classes,
    silenced_classes,
    trap_rows,
)
from dosimeter.inspection.finding import Finding
from dosimeter.inspection.sent import Sent, receive_model
from dosimeter.inspection.thresholds import FALSE_ALARMS, HONEST_MODELS, THRESHOLDS
from dosimeter.types import Batch

Check = Callable[[Sent], tuple[float, str] | None]
CHECKS: Mapping[str, Check] = {
    "head_rows": head_rows.measure,
    "head_biases": head_biases.measure,
    "shut_out_classes": shut_out_classes.measure,
    "constant_output": constant_output.measure,
    "silenced_classes": silenced_classes.measure,
    "parallel_rows": parallel_rows.measure,
    "trap_rows": trap_rows.measure,
    "inserted_layer": inserted_layer.measure,
    "lone_rows": lone_rows.measure,
    "previous_round": previous_round.measure,
    "isolated_samples": isolated_samples.measure,
}


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """What the checks found; suspicious as soon as one of them is."""

    findings: tuple[Finding, ...]
    left_out: tuple[str, ...] = ()  # checks that have nothing to look at in this model, or with what was given
    honest_models: int = HONEST_MODELS  # that the thresholds were tried on
    false_alarms: int = FALSE_ALARMS  # honest models among them that were flagged

    @property
    def suspicious(self) -> bool:
        return any(finding.suspicious for finding in self.findings)

    @property
    def false_positive_rate(self) -> float:
        return self.false_alarms / self.honest_models

    def __str__(self) -> str:
        lines = [_line(finding) for finding in sorted(self.findings, key=lambda one: not one.suspicious)]
        if self.left_out:
            lines.append(f"{'left out':>10}  {', '.join(self.left_out)}: nothing to look at in this model, or without data or round before")
        verdict = "suspicious: do not train on this model" if self.suspicious else "no sign of tampering"
        rate = f"these thresholds flagged {self.false_alarms} of {self.honest_models} honest models ({self.false_positive_rate:.1%})"
        return "\n".join([*lines, f"{verdict}; {rate}"])


def inspect(model: nn.Module, batch: Batch | None = None, reference: nn.Module | None = None) -> Inspection:
    """Look for the marks of a dishonest server in a model before training on it.

    Each check is independent of the others and gives its statistic, its threshold and a sentence. With `batch`, the
    client's own data, the checks that watch the model at work see what it would do with them; without, smooth random
    patterns stand in. With `reference`, the model of the round before, what changed is looked at too. A clean result
    means that none of these marks is there, not that no other attack is possible. The model is not changed.
    """
    sent = receive_model(model, batch, reference)
    measured = {name: check(sent) for name, check in CHECKS.items()}
    findings = [
        Finding(check=name, statistic=result[0], threshold=THRESHOLDS[name], sentence=result[1])
        for name, result in measured.items()
        if result is not None
    ]
    return Inspection(findings=tuple(findings), left_out=tuple(name for name, result in measured.items() if result is None))


def _line(finding: Finding) -> str:
    mark = "SUSPICIOUS" if finding.suspicious else "fine" if math.isfinite(finding.threshold) else "note"
    return f"{mark:>10}  {finding.check}: {finding.sentence} (statistic {finding.statistic:.4g}, threshold {finding.threshold:.4g})"
