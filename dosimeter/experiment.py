"""One experiment, top to bottom: a private batch is trained on, the server attacks what it got, and the truth returns to score it."""

from __future__ import annotations

import platform
import time
import warnings
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dosimeter.adaptive import adapt
from dosimeter.client import observe
from dosimeter.config import describe, digest
from dosimeter.identifying import identifiability
from dosimeter.interfaces import Attack, Defense, FeatureRecovery, LabelRecovery, Loss, Method, Tampering, Training
from dosimeter.losses import CrossEntropy
from dosimeter.options import check_fields
from dosimeter.pictures import picture_rows
from dosimeter.scoring import Scores, score
from dosimeter.server import reconstruct, recover_features, recover_labels
from dosimeter.training import FedSGD
from dosimeter.types import Batch, Exposure, FeatureEstimate, LabelEstimate, Normalization, Outcome, Reconstruction, Record, Refused
from dosimeter.verdicts import Verdict, judge_features, judge_inputs, judge_labels
from dosimeter.version import __version__

FOREIGN = 1_000_003  # between the seed of a client and that of the foreign one

Estimate = LabelEstimate | FeatureEstimate | Reconstruction


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Who is audited: a model and a private batch, with what the nulls need and the words that describe them."""

    model: nn.Module
    batch: Batch
    foreign: Batch | None = None  # another client's batch, for the null
    auxiliary: Batch | None = None  # what the threat model grants the server
    reference: Batch | None = None  # images for the nulls alone, where the server is granted none
    pool: Batch | None = None  # what other clients hold: utility is measured by a training on it
    held_out: Batch | None = None  # what that training is judged by
    normalization: Normalization = field(default_factory=Normalization)
    description: dict[str, Any] = field(default_factory=dict)  # model, data, accuracy, digests: plain JSON


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How the client trains and what defends it."""

    training: Training = field(default_factory=FedSGD)
    loss: Loss = field(default_factory=CrossEntropy)
    defenses: tuple[Defense, ...] = ()
    declare_batch_size: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class Measurement(Setting):
    """A setting and the methods that the server runs: the last one set is scored, those before it feed it."""

    labels: LabelRecovery | Literal["given", "optimised"] = "given"  # optimised: the method finds its own
    features: FeatureRecovery | None = None
    attack: Attack | None = None
    adaptive: bool = False  # the attack takes the defenses into account

    @property
    def method(self) -> Method | None:
        """The method that is scored."""
        return self.attack or self.features or (self.labels if isinstance(self.labels, LabelRecovery) else None)

    @property
    def tampering(self) -> Tampering | None:
        """The method that changes the model before it is sent."""
        return next((method for method in (self.attack, self.labels) if isinstance(method, Tampering)), None)

    @property
    def surface(self) -> str:
        return "inputs" if self.attack else "features" if self.features else "labels"


def key_of(subject: Subject, measurement: Measurement) -> str:
    """What an experiment is known by in the records."""
    return digest(_config(subject, measurement))


def run(
    subject: Subject,
    measurement: Measurement,
    *,
    raise_refusals: bool = False,
    exposure: Exposure | None = None,
    attempts: int = 1,
) -> Record:
    """Carry out one measurement and return its record. A refusal is a finding, unless it is to be raised.

    `attempts` is how many methods are tried on the same labels, for which the verdict on luck is corrected.
    `exposure` is what `expose` gave of this very subject and setting, where several measurements share it.
    """
    if measurement.method is None:
        raise ValueError("nothing to measure: name a label recovery (`labels`), a feature recovery (`features`) or an `attack`")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            exposure = exposure or expose(subject, measurement, subject.batch)
        except Refused as refusal:
            if raise_refusals or measurement.tampering is None:
                raise
            return failed(subject, measurement, Outcome.IMPOSSIBLE, str(refusal))
        started = time.perf_counter()
        try:
            found = _of_private_samples(_attack(exposure, measurement, subject.batch.targets), measurement.defenses)
            if found.outcome is Outcome.IMPOSSIBLE:
                raise Refused(found.message)
        except Refused as refusal:
            if raise_refusals:
                raise
            return failed(subject, measurement, Outcome.IMPOSSIBLE, str(refusal))
        if found.outcome is Outcome.CRASHED:
            return failed(subject, measurement, Outcome.CRASHED, found.message)
        seconds = time.perf_counter() - started
        foreign = _attack_foreign(subject, measurement)
        scores = _score(subject, exposure, found, foreign)
        details = (
            _details(found, scores)
            | _identified(exposure, found)
            | _objective_at_truth(found, subject.batch)
            | _counters(measurement, exposure)
        )
    verdict, reason = _judge(found, scores, attempts)
    said = [str(warning.message) for warning in caught if issubclass(warning.category, UserWarning)]
    return Record(
        **_identity(subject, measurement),
        metrics={name: values.tolist() for name, values in scores.items()},
        nulls={null: {name: values.tolist() for name, values in columns.items()} for null, columns in scores.nulls.items()},
        outcome=found.outcome.value,
        verdict=verdict.value,
        reason=reason,
        warnings=list(dict.fromkeys([*said, *scores.warnings, *_shortfalls(found, details)])),
        seconds=seconds,
        details=details,
        pictures=_pictures(subject, found, foreign, scores),
    )


def expose(subject: Subject, setting: Setting, batch: Batch) -> Exposure:
    """What the server gets of a batch in this setting, after an active attack has changed the model."""
    return observe(
        _sent(subject, setting),
        batch,
        training=setting.training,
        defenses=setting.defenses,
        loss=setting.loss,
        normalization=subject.normalization,
        auxiliary=subject.auxiliary,
        declare_batch_size=setting.declare_batch_size,
        seed=setting.seed,
    )


def _sent(subject: Subject, setting: Setting) -> nn.Module:
    """The model that the server sends: a dishonest one's is changed by the attack, which knows what inputs the protocol has."""
    method = setting.tampering if isinstance(setting, Measurement) else None
    if method is None:
        return subject.model
    known = {"input_shape": tuple(subject.batch.inputs.shape[1:]), "normalization": subject.normalization}
    options = (option.name for option in fields(method))  # pyright: ignore[reportArgumentType]
    unsaid = {name: known[name] for name in options if name in known and getattr(method, name) is None}
    return replace(method, **unsaid).tamper(subject.model)  # pyright: ignore[reportArgumentType]


def _attack(exposure: Exposure, measurement: Measurement, given: Tensor) -> Estimate:
    """The server's side. `given` is used only where the threat model grants the labels, which the record says."""
    seed = measurement.seed
    if isinstance(measurement.labels, LabelRecovery):
        labels = recover_labels(exposure, measurement.labels, seed=seed)
        if measurement.method is measurement.labels:
            return labels
    else:
        labels = given if measurement.labels == "given" else None
    if measurement.attack is not None:
        attack = measurement.attack
        if measurement.adaptive:
            adapted = adapt(attack, exposure)
            attack, exposure = adapted.method, adapted.exposure
        return reconstruct(exposure, attack, labels=labels, seed=seed)
    assert measurement.features is not None
    return recover_features(exposure, measurement.features, labels=labels, seed=seed)


def _of_private_samples(found: Estimate, defenses: tuple[Defense, ...]) -> Estimate:
    """A certificate speaks of what the client trained on: where a defense replaces that, it proves nothing of the private batch."""
    replacing = ", ".join(defense.name for defense in defenses if defense.replaces)
    if not replacing or isinstance(found, Reconstruction):
        return found
    message = "; ".join(
        filter(None, (found.message, f"what the gradient proves is of the samples after {replacing}, not of the private ones"))
    )
    if isinstance(found, LabelEstimate):
        return replace(found, certified=False, message=message)
    return replace(found, certified=torch.zeros_like(found.certified), message=message)


def _attack_foreign(subject: Subject, measurement: Measurement) -> Estimate | None:
    """The same attack on another client's gradient: what its score is worth without the private batch."""
    if subject.foreign is None or measurement.surface == "labels":
        return None
    try:
        elsewhere = replace(measurement, seed=measurement.seed + FOREIGN)  # another client draws other noise
        found = _attack(expose(subject, elsewhere, subject.foreign), measurement, subject.foreign.targets)
    except Refused:
        return None
    return None if found.outcome in (Outcome.IMPOSSIBLE, Outcome.CRASHED) else found


def _score(subject: Subject, exposure: Exposure, found: Estimate, foreign: Estimate | None) -> Scores:
    reference = subject.auxiliary or subject.reference
    return score(found, subject.batch, auxiliary=reference, foreign=foreign, exposure=exposure, normalization=subject.normalization)


def _judge(found: Estimate, scores: Scores, attempts: int) -> tuple[Verdict, str]:
    metrics = {name: values.tolist() for name, values in scores.items()}
    nulls = {null: {name: values.tolist() for name, values in columns.items()} for null, columns in scores.nulls.items()}
    if isinstance(found, LabelEstimate):
        return judge_labels(metrics, nulls, scores.details["chance"], found.certified, attempts)
    if isinstance(found, FeatureEstimate):
        return judge_features(metrics, nulls, int(found.certified.sum()), scores.details.get("false_certificates", 0))
    return judge_inputs(metrics, nulls)


def _objective_at_truth(found: Estimate, truth: Batch) -> dict[str, float]:
    """The attack's own objective at the private batch, to tell under-optimisation from impossibility."""
    if not isinstance(found, Reconstruction) or found.objective_at is None or len(found.inputs) != len(truth.inputs):
        return {}  # of some of the samples, as behind a filter, it says nothing
    return {"objective_at_truth": found.objective_at(truth.inputs, truth.targets)}


def _shortfalls(found: Estimate, details: dict[str, Any]) -> list[str]:
    if found.outcome is Outcome.DIVERGED:
        return [f"diverged, so that what is scored is no answer: {found.message}"]
    reached, at_truth = details.get("objective"), details.get("objective_at_truth")
    if reached is None or at_truth is None or not reached > at_truth:
        return []
    ends = f"the attack ended at objective {reached:.3g}, the true batch has {at_truth:.3g}"
    return [f"under-optimised: {ends}; more steps or restarts may show more"]


def _counters(measurement: Measurement, exposure: Exposure) -> dict[str, list[str]]:
    """What the method does about the defenses in force, or that it does nothing though it could."""
    assert measurement.method is not None
    if not measurement.defenses:
        return {}
    adapted = adapt(measurement.method, exposure)
    return {"counters": list(adapted.notes) if measurement.adaptive or not adapted.changed else ["not adapted to the defenses"]}


def _identified(exposure: Exposure, found: Estimate) -> dict[str, list[str]]:
    """What the head's gradient can determine at all, beside what was recovered from it."""
    return {"identifiability": [identifiability(exposure).sentence]} if isinstance(found, FeatureEstimate) else {}


def _details(found: Estimate, scores: Scores) -> dict[str, Any]:
    details: dict[str, Any] = {"message": found.message} | dict(scores.details)
    if scores.unavailable:
        details["unavailable"] = scores.unavailable
    if isinstance(found, LabelEstimate):
        details |= {"counts": found.counts.tolist(), "certified": found.certified, "confidence": found.confidence}
    elif isinstance(found, FeatureEstimate):
        details |= {"certified": int(found.certified.sum()), "complete": found.complete, "batch_size": found.batch_size}
    else:
        details |= {"objective": found.objective, "distance": found.distance, "restarts": list(found.restarts)}
    return details


def failed(subject: Subject, measurement: Measurement, outcome: Outcome, reason: str) -> Record:
    """The record of a measurement that gave nothing to score."""
    verdict = Verdict.IMPOSSIBLE if outcome is Outcome.IMPOSSIBLE else Verdict.NOT_MEASURED
    return Record(
        **_identity(subject, measurement),
        metrics={},
        nulls={},
        outcome=outcome.value,
        verdict=verdict.value,
        reason=reason,
        warnings=[],
        seconds=0.0,
    )


def _identity(subject: Subject, measurement: Measurement) -> dict[str, Any]:
    method = measurement.method
    assert method is not None
    config = _config(subject, measurement)
    return {
        "key": digest(config),
        "config": config,
        "surface": measurement.surface,
        "method": method.name,
        "seed": measurement.seed,
        "threat_model": _threat_model(subject, measurement),
        "versions": versions(),
    }


def _config(subject: Subject, measurement: Measurement) -> dict[str, Any]:
    return {"subject": describe(subject.description), **describe(measurement)}


def facts_of(subject: Subject, setting: Setting) -> dict[str, Any]:
    """The part of the threat model that all methods of one setting share."""
    return {
        **subject.description,
        "mode": "train" if subject.model.training else "eval",
        "input_shape": list(subject.batch.inputs.shape[1:]),
        "batch_size": len(subject.batch.inputs),
        "batch_size_declared": setting.declare_batch_size,
        "training": describe(setting.training),
        "loss": describe(setting.loss),
        "defenses": describe(setting.defenses),
    }


def versions() -> dict[str, str]:
    return {"dosimeter": __version__, "torch": torch.__version__, "python": platform.python_version()}


def _threat_model(subject: Subject, measurement: Measurement) -> dict[str, Any]:
    """Everything a reader must know to weigh the figures (DESIGN: labels, mode, accuracy, stage and steps are always said)."""
    method, labels = measurement.method, measurement.labels
    assert method is not None
    return {
        **facts_of(subject, measurement),
        "labels": f"recovered by {labels.name}" if isinstance(labels, LabelRecovery) else labels,
        "auxiliary": 0 if subject.auxiliary is None else len(subject.auxiliary.inputs),
        "needs": sorted(need.value for need in method.needs),
    }


def _pictures(subject: Subject, found: Estimate, foreign: Estimate | None, scores: Scores) -> list[dict[str, Any]]:
    if not isinstance(found, Reconstruction) or found.inputs.ndim != 4 or found.inputs.shape[1] not in (1, 3):
        return []
    rival = foreign if isinstance(foreign, Reconstruction) else None
    return picture_rows(found, subject.batch, rival, subject.auxiliary or subject.reference, scores)
