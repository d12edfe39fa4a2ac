"""One experiment from start to end: the client trains on its batch, the server attacks the update, and the truth scores the result."""

from __future__ import annotations

import time
import warnings
from dataclasses import asdict, replace
from typing import Any

from torch import Tensor

from dosimeter.engines.adaptation import adapt
from dosimeter.engines.needs import check_possible
from dosimeter.engines.premises import OF_THE_AUDIT
from dosimeter.interfaces import Exposure, LabelRecovery
from dosimeter.network.leftovers import nothing_kept
from dosimeter.runs.exposures import Expose, expose
from dosimeter.runs.foreign import foreign_batches
from dosimeter.runs.measurement import AuditedClient, Measurement, identity_of
from dosimeter.runs.membership import with_candidates
from dosimeter.runs.server import run_method
from dosimeter.surfaces.limits import PROVED
from dosimeter.surfaces.scores import Comparison, Scores
from dosimeter.surfaces.scoring import score_against
from dosimeter.surfaces.surface import MISFIT, Surface
from dosimeter.surfaces.verdicts import Verdict, refusal_of, verdict_of_failure
from dosimeter.types import Batch, Estimate, Impossible, Outcome, Record, Refused

UNVERIFIED = "the private samples are not at hand, so nothing tells whether this is right"
FOREIGN_SEED_OFFSET = 1_000_003  # between the seed of a client and that of the foreign one


def run(
    client: AuditedClient,
    measurement: Measurement,
    *,
    raise_refusals: bool = False,
    exposure: Exposure | None = None,
    exposing: Expose = expose,
    attempts: int = 1,
    spare: bool = False,
) -> Record:
    """Carry out one measurement and return its record. A refusal gives a record too, unless `raise_refusals` is set.

    `attempts` is the number of methods tried on the same surface. The verdict corrects for it.
    `exposure` is what the server gets, where it is known already. `exposing` makes an exposure, where several measurements share
    them (`Exposures`).
    With `spare`, the foreign null is not made where it cannot change the verdict.
    """
    surface = measurement.surface
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            exposure = exposure or exposing(client, measurement, client.batch)
        except Refused as refusal:
            if raise_refusals or measurement.tampering is None:
                raise
            return refusal_record(client, measurement, refusal)
        started = time.perf_counter()
        try:
            check_possible(exposure)
            if client.has_truth and exposure.public.kind in surface.reads:
                surface.check_scorable(client.batch)
            if surface.asks_about_candidates:
                exposure = with_candidates(client, exposure, measurement.seed)
            found = _attack(exposure, measurement, client.batch.targets)
            if refusal := refusal_of(found):
                raise refusal
        except (Refused, FileNotFoundError) as refusal:  # a file that the method names, such as a decoder's
            if raise_refusals:
                raise
            return refusal_record(client, measurement, refusal)
        if found.outcome is Outcome.CRASHED:
            return failure_record(client, measurement, Outcome.CRASHED, found.message)
        seconds = time.perf_counter() - started
        if not client.has_truth:
            return _unscored_record(client, measurement, exposure, found, seconds, _said(caught))
        comparison = Comparison(
            truth=client.batch,
            auxiliary=client.auxiliary or client.reference,
            exposure=exposure,
            normalization=client.normalization,
        )
        spared: dict[str, Any] = {}
        if surface.has_foreign_null:
            with nothing_kept(exposure.model, measurement.scored):
                needed = not spare or surface.may_leak(found, score_against(found, comparison))
            foreign, refused = _attack_foreign(client, measurement, surface, found, exposing, exposure.candidates) if needed else (None, {})
            comparison = replace(comparison, foreign=foreign, refused=refused)
            spared = {} if needed else {"spared_nulls": ["foreign"]}
        with nothing_kept(exposure.model, measurement.scored):  # the truth goes through the model and the method
            scores = score_against(found, comparison)
            evidence = [asdict(shown) for shown in surface.evidence(found, comparison, scores)]
            details = (
                _details(found, scores)
                | spared
                | surface.details(found, exposure, client.batch)
                | _objective_at_truth(exposure, measurement, found, client.batch)
                | _counters(measurement, exposure)
                | _proved(surface, found, scores)
            )
    verdict, reason = surface.judge(found, scores, attempts)
    short = _shortfalls(surface, found, details)
    if verdict is Verdict.NOT_SHOWN:
        reason = "; ".join([reason, *short])
    metrics, nulls = scores.as_lists()
    return Record(
        **identity_of(client, measurement),
        metrics=metrics,
        nulls=nulls,
        outcome=found.outcome.value,
        verdict=verdict.value,
        reason=reason,
        warnings=list(dict.fromkeys([*_said(caught), *scores.warnings, *short])),
        seconds=seconds,
        details=details,
        evidence=evidence,
    )


def _unscored_record(
    client: AuditedClient, measurement: Measurement, exposure: Exposure, found: Estimate, seconds: float, said: list[str]
) -> Record:
    """The record where the private samples are not at hand: what is proved, what else the method gave, and no score."""
    surface = measurement.surface
    premises = [premise for premise in found.premises if premise != OF_THE_AUDIT]  # the batch is whatever the client trained on
    known = {"message": found.message} | ({"premises": premises} if premises else {})
    misfit = surface.misfit(found, exposure)
    explains = [] if misfit is None else [f"its answer explains the update up to {misfit:.2g} of its norm"]
    known |= {} if misfit is None else {MISFIT: misfit}
    details = known | surface.details(found, exposure, client.batch) | _counters(measurement, exposure)
    short = _shortfalls(surface, found, details)
    proof = surface.proof(found)
    return Record(
        **identity_of(client, measurement),
        metrics={},
        nulls={},
        outcome=found.outcome.value,
        verdict=(Verdict.PROVED if proof else Verdict.UNVERIFIED).value,
        reason=proof or "; ".join([UNVERIFIED, *explains, *filter(None, [found.message])]),
        warnings=list(dict.fromkeys([*said, *short])),
        seconds=seconds,
        details=details,
        evidence=[asdict(shown) for shown in surface.evidence(found)],
    )


def _said(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(warning.message) for warning in caught if issubclass(warning.category, UserWarning)]


def _attack(exposure: Exposure, measurement: Measurement, given: Tensor) -> Estimate:
    """What the server recovers. It sees the true labels `given` only where the threat model grants them; the record says so."""
    method, seed = measurement.scored, measurement.seed
    if isinstance(measurement.labels, LabelRecovery):
        labels = run_method(exposure, measurement.labels, None, seed)
        if method is measurement.labels:
            return labels
    else:
        labels = given if measurement.labels == "given" else None
    if measurement.adaptive:
        adapted = adapt(method, exposure)
        method, exposure = adapted.method, adapted.exposure
    return run_method(exposure, method, labels, seed)


def _attack_foreign(
    client: AuditedClient, measurement: Measurement, surface: Surface[Any], found: Estimate, exposing: Expose, candidates: Batch | None
) -> tuple[Estimate | None, dict[str, str]]:
    """The same attack on other clients' gradients, until it has as many guesses as `found`; and why there is none.

    It is the null for what the attack invents by itself.
    """
    if client.foreign is None:
        return None, {"foreign": "no foreign batch was given"}
    wanted, estimates, refusals = surface.count_guesses(found), [], []
    for draw, batch in enumerate(foreign_batches(client, measurement.seed)):
        try:
            elsewhere = replace(measurement, seed=measurement.seed + (draw + 1) * FOREIGN_SEED_OFFSET)  # others draw other noise
            theirs = replace(exposing(client, elsewhere, batch), candidates=candidates)  # the server asks of it what it asks of the client
            recovered = _attack(theirs, measurement, batch.targets)
        except Refused as refusal:
            refusals.append(str(refusal))
            continue
        if refusal_of(recovered) or recovered.outcome is Outcome.CRASHED:
            refusals.append(recovered.message)
            continue
        estimates.append(recovered)
        if sum(map(surface.count_guesses, estimates)) >= wanted:
            break
    if not estimates:
        return None, {"foreign": f"the method refused each of {len(refusals)} foreign gradients: {refusals[0]}"}
    return surface.merge(estimates, wanted), {}


def _objective_at_truth(exposure: Exposure, measurement: Measurement, found: Estimate, truth: Batch) -> dict[str, float]:
    """The attack's own objective at the private batch, to tell under-optimisation from impossibility."""
    if measurement.adaptive:
        exposure = adapt(measurement.scored, exposure).exposure
    value = measurement.surface.objective_at_truth(measurement.scored, exposure, found, truth)
    return {} if value is None else {"objective_at_truth": value}


def _shortfalls(surface: Surface[Any], found: Estimate, details: dict[str, Any]) -> list[str]:
    if found.outcome is Outcome.DIVERGED:
        return [f"diverged, so that what is scored is no answer: {found.message}"]
    return surface.shortfalls(details)


def _counters(measurement: Measurement, exposure: Exposure) -> dict[str, list[str]]:
    """What the method does about the defenses, or that it could counter them and does not."""
    if not measurement.defenses:
        return {}
    adapted = adapt(measurement.scored, exposure)
    return {"counters": list(adapted.notes) if measurement.adaptive or not adapted.changed else ["not adapted to the defenses"]}


def _proved(surface: Surface[Any], found: Estimate, scores: Scores) -> dict[str, list[bool]]:
    """Which scores are proved, where any is."""
    sure = surface.proved_samples(found, scores) if surface.proves(found) else []
    return {PROVED: sure} if any(sure) else {}


def _details(found: Estimate, scores: Scores) -> dict[str, Any]:
    unavailable = {"unavailable": scores.unavailable} if scores.unavailable else {}
    premises = {"premises": list(found.premises)} if found.premises else {}
    return {"message": found.message} | scores.details | unavailable | premises


def refusal_record(client: AuditedClient, measurement: Measurement, refusal: Refused | FileNotFoundError) -> Record:
    """The record of a method that does not run here, or of a proof that none can."""
    if isinstance(refusal, Impossible):
        return failure_record(client, measurement, Outcome.IMPOSSIBLE, str(refusal), refusal.theorem)
    record = failure_record(client, measurement, Outcome.NOT_ATTEMPTED, str(refusal))
    return replace(record, details=record.details | dict(getattr(refusal, "details", {})))


def failure_record(
    client: AuditedClient, measurement: Measurement, outcome: Outcome, reason: str, theorem: str = "", *, left_out: bool = False
) -> Record:
    """The record of a measurement that gave nothing to score; `left_out`, of one that had no time."""
    return Record(
        **identity_of(client, measurement),
        metrics={},
        nulls={},
        outcome=outcome.value,
        verdict=verdict_of_failure(outcome, theorem).value,
        reason=reason,
        warnings=[],
        seconds=0.0,
        details=({"theorem": theorem} if theorem else {}) | ({"left_out": True} if left_out else {}),
    )
