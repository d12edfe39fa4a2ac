"""Is this model rigged? Every check looks at it, and one suspicious check is enough."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

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
from dosimeter.inspection.finding import Finding, Measured
from dosimeter.inspection.received_model import ReceivedModel, receive_model
from dosimeter.inspection.thresholds import FALSE_ALARMS, HONEST_MODELS, THRESHOLDS
from dosimeter.network.layer_shapes import BatchLimit, largest_batch
from dosimeter.types import Batch

UNTAUGHT = "classes that nobody has had since a last layer of zeros, or before most of it was pruned"
SWITCHED_OFF = "a class that was switched off by its bias"
GRADFILT, FISHING, IMPRINT, LOKI, TRAPS = "gradfilt", "fishing", "imprint", "loki", "trap_weights"


@dataclass(frozen=True, kw_only=True)
class Check:
    """One check: how it measures, and whose mark it looks for."""

    measure: Callable[[ReceivedModel], Measured]
    made_for: tuple[str, ...]  # the attacks that leave this mark
    otherwise: str = ""  # what else leaves it in honest models


CHECKS: Mapping[str, Check] = {
    "head_rows": Check(measure=head_rows.measure, made_for=(GRADFILT, FISHING), otherwise=UNTAUGHT),
    "head_biases": Check(measure=head_biases.measure, made_for=(GRADFILT, FISHING), otherwise=SWITCHED_OFF),
    "shut_out_classes": Check(measure=shut_out_classes.measure, made_for=(GRADFILT,), otherwise=SWITCHED_OFF),
    "constant_output": Check(
        measure=constant_output.measure, made_for=(GRADFILT, FISHING), otherwise="a network that was trained to one answer whatever it sees"
    ),
    "silenced_classes": Check(measure=silenced_classes.measure, made_for=(GRADFILT, FISHING), otherwise=UNTAUGHT),
    "parallel_rows": Check(
        measure=parallel_rows.measure, made_for=(IMPRINT, LOKI), otherwise="a layer that was widened by copies of its rows"
    ),
    "trap_rows": Check(measure=trap_rows.measure, made_for=(TRAPS,)),
    "inserted_layer": Check(
        measure=inserted_layer.measure,
        made_for=(IMPRINT, TRAPS),
        otherwise="a spatial transformer, a gate or a fully-connected residual block on the raw input",
    ),
    "lone_rows": Check(measure=lone_rows.measure, made_for=(IMPRINT, TRAPS), otherwise="a first layer that hardly any sample fires"),
    "previous_round": Check(
        measure=previous_round.measure,
        made_for=(GRADFILT, FISHING, IMPRINT, LOKI, TRAPS),
        otherwise="a layer that was drawn anew, or began so small that training outgrew it",
    ),
    "isolated_samples": Check(measure=isolated_samples.measure, made_for=()),
}


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """What all checks found; suspicious where one of them is."""

    findings: tuple[Finding, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)  # checks that could not look, and why
    exposed: tuple[BatchLimit, ...] = ()  # the largest batch whose activation maps each layer's gradient can show
    honest_models: int = HONEST_MODELS  # on which the thresholds were tried
    false_alarms: int = FALSE_ALARMS  # of them that were flagged

    @property
    def suspicious(self) -> bool:
        return any(finding.suspicious for finding in self.findings)

    @property
    def false_positive_rate(self) -> float:
        return self.false_alarms / self.honest_models

    @property
    def unseen(self) -> tuple[str, ...]:
        """The attacks for whose marks no check could look."""
        looked = {attack for finding in self.findings for attack in CHECKS[finding.check].made_for}
        return tuple(sorted({attack for name in self.left_out for attack in CHECKS[name].made_for} - looked))

    def __str__(self) -> str:
        lines = [_line(finding) for finding in sorted(self.findings, key=lambda one: not one.suspicious)]
        lines += [f"{'left out':>10}  {name}{_against(CHECKS[name].made_for)}: {why}" for name, why in self.left_out.items()]
        lines += [f"{'note':>10}  {self.exposure}"]
        rate = f"these thresholds flagged {self.false_alarms} of {self.honest_models} honest models ({self.false_positive_rate:.1%})"
        return "\n".join([*lines, f"{self.verdict}; {rate}"])

    @property
    def exposure(self) -> str:
        """One sentence: up to which batch size an honest round with this model gives activation maps away."""
        if not self.exposed:
            return "activation maps: no convolution or hidden linear layer was seen"
        widest = max(self.exposed, key=lambda one: one.limit)
        if not widest.limit:
            return "activation maps: no layer's gradient has room for the maps of a single sample"
        return f"activation maps: batches of up to {widest.limit} can be read off the gradient of {widest.layer} ({widest.reason})"

    @property
    def verdict(self) -> str:
        """One sentence: suspicious, or clean as far as the checks could look."""
        if self.suspicious:
            return "suspicious: do not train on this model unless you know what else explains it"
        whole = len(self.findings) + len(self.left_out)
        seen = f"no sign of tampering in what {len(self.findings)} of {whole} checks could look at"
        blind = f", and none of them could look for {' or '.join(self.unseen)}" if self.unseen else ""
        others = [name for name in self.left_out if CHECKS[name].made_for]
        missing = f"; marks that only {', '.join(others)} would see are not excluded" if others else ""
        return seen + blind + missing


def inspect(model: nn.Module, batch: Batch | None = None, reference: nn.Module | None = None) -> Inspection:
    """Look for the marks of a dishonest server in a model before training on it.

    Each check is independent of the others. It gives a statistic, a threshold and a sentence, or the reason why it cannot look.
    `batch` is the client's own data, on which the checks run the model; without it, they run on smooth random patterns.
    `reference` is the model of the round before, with which this one is compared. A clean result means that the marks that
    could be looked for are absent. It does not mean that no other attack is possible. The model is not changed.
    """
    received_model = receive_model(model, batch, reference)
    measured = {name: check.measure(received_model) for name, check in CHECKS.items()}
    findings = [
        Finding(check=name, statistic=result[0], threshold=THRESHOLDS[name], sentence=result[1], otherwise=CHECKS[name].otherwise)
        for name, result in measured.items()
        if not isinstance(result, str)
    ]
    left_out = {name: why for name, why in measured.items() if isinstance(why, str)}
    return Inspection(findings=tuple(findings), left_out=left_out, exposed=_exposed_batches(received_model))


def _exposed_batches(received: ReceivedModel) -> tuple[BatchLimit, ...]:
    try:
        return largest_batch(received.model, tuple(received.inputs.shape[1:]))
    except (RuntimeError, ValueError, StopIteration):  # a model that does not run on the probes has no shapes to tell
        return ()


def _against(attacks: tuple[str, ...]) -> str:
    return f" (for {', '.join(attacks)})" if attacks else ""


def _line(finding: Finding) -> str:
    mark = "SUSPICIOUS" if finding.suspicious else "fine" if math.isfinite(finding.threshold) else "note"
    otherwise = f"; seen in honest models too: {finding.otherwise}" if finding.suspicious and finding.otherwise else ""
    numbers = f"statistic {finding.statistic:.4g}, threshold {finding.threshold:.4g}"
    return f"{mark:>10}  {finding.check}: {finding.sentence} ({numbers}){otherwise}"
