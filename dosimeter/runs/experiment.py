"""One experiment, top to bottom: a private batch is trained on, the server attacks what it got, and the truth returns to score it."""

from __future__ import annotations

import time
import warnings
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from dosimeter.client.observe import observe
from dosimeter.engines.adaptation import adapt
from dosimeter.engines.identifiability import identifiability
from dosimeter.interfaces import Defense, Exposure, LabelRecovery
from dosimeter.runs.measurement import AuditedClient, Measurement, Protocol, identity_of
from dosimeter.runs.server import reconstruct, recover_features, recover_labels
from dosimeter.surfaces.pictures import picture_rows
from dosimeter.surfaces.scoring import Scores, score
from dosimeter.surfaces.verdicts import Verdict, judge_features, judge_inputs, judge_labels
from dosimeter.types import Batch, FeatureEstimate, LabelEstimate, Outcome, Reconstruction, Record, Refused

FOREIGN = 1_000_003  # between the seed of a client and that of the foreign one

Estimate = LabelEstimate | FeatureEstimate | Reconstruction


def run(
    subject: AuditedClient,
    measurement: Measurement,
    *,
    raise_refusals: bool = False,
    exposure: Exposure | None = None,
    attempts: int = 1,
) -> Record:
    """Carry out one measurement and return its record. A refusal is a finding, unless it is to be raised.

    `attempts` is how many methods are tried on the same labels, for which the verdict on luck is corrected.
    `exposure` is what `expose` gave of this very subject and protocol, where several measurements share it.
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
        **identity_of(subject, measurement),
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


def expose(subject: AuditedClient, protocol: Protocol, batch: Batch) -> Exposure:
    """What the server gets of a batch in this protocol, after an active attack has changed the model."""
    return observe(
        _sent(subject, protocol),
        batch,
        training=protocol.training,
        defenses=protocol.defenses,
        loss=protocol.loss,
        normalization=subject.normalization,
        auxiliary=subject.auxiliary,
        declare_batch_size=protocol.declare_batch_size,
        seed=protocol.seed,
    )


def _sent(subject: AuditedClient, protocol: Protocol) -> nn.Module:
    """The model that the server sends: a dishonest one's is changed by the attack, which knows what inputs the protocol has."""
    method = protocol.tampering if isinstance(protocol, Measurement) else None
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


def _attack_foreign(subject: AuditedClient, measurement: Measurement) -> Estimate | None:
    """The same attack on another client's gradient: what its score is worth without the private batch."""
    if subject.foreign is None or measurement.surface == "labels":
        return None
    try:
        elsewhere = replace(measurement, seed=measurement.seed + FOREIGN)  # another client draws other noise
        found = _attack(expose(subject, elsewhere, subject.foreign), measurement, subject.foreign.targets)
    except Refused:
        return None
    return None if found.outcome in (Outcome.IMPOSSIBLE, Outcome.CRASHED) else found


def _score(subject: AuditedClient, exposure: Exposure, found: Estimate, foreign: Estimate | None) -> Scores:
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


def failed(subject: AuditedClient, measurement: Measurement, outcome: Outcome, reason: str) -> Record:
    """The record of a measurement that gave nothing to score."""
    verdict = Verdict.IMPOSSIBLE if outcome is Outcome.IMPOSSIBLE else Verdict.NOT_MEASURED
    return Record(
        **identity_of(subject, measurement),
        metrics={},
        nulls={},
        outcome=outcome.value,
        verdict=verdict.value,
        reason=reason,
        warnings=[],
        seconds=0.0,
    )


def _pictures(subject: AuditedClient, found: Estimate, foreign: Estimate | None, scores: Scores) -> list[dict[str, Any]]:
    if not isinstance(found, Reconstruction) or found.inputs.ndim != 4 or found.inputs.shape[1] not in (1, 3):
        return []
    rival = foreign if isinstance(foreign, Reconstruction) else None
    return picture_rows(found, subject.batch, rival, subject.auxiliary or subject.reference, scores)
