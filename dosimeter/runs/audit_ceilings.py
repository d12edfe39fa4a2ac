"""The ceilings of an audit: what no attacker can exceed, in the records beside what the methods reached."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

from dosimeter.interfaces import Bound
from dosimeter.network.leftovers import nothing_kept
from dosimeter.registry import BOUNDS, METRICS
from dosimeter.runs.ceilings import Ceilings, ceilings
from dosimeter.runs.measurement import AuditedClient, Measurement, Protocol
from dosimeter.types import Ceiling, Record, Refused

KEY = "ceiling"  # of a record's details
LARGEST_PSNR = 300.0  # dB; float64 itself ends there, and a record holds no infinity
STEPS_A_PRODUCT = 2.6  # a product with JᵀJ in float64 takes as long as so many steps of matching on one sample
FEWEST_LANCZOS_STEPS = 4


class AuditCeilings:
    """The ceilings of one client behind one protocol, computed when the first record asks for them.

    Of the bounds on one metric, the first in `preferred` that does not refuse counts: a theorem goes before an estimate.
    `seconds` limits each bound, counted in operations (`seconds_a_step`); `step` is such a count for one step on the whole batch.
    """

    preferred = (("van_trees", "hidden_directions"), ("reconstruction_robustness",), ("label_robustness",), ("membership_tradeoff",))

    def __init__(self, client: AuditedClient, protocol: Protocol, *, seconds: float | None, step: float) -> None:
        self.client, self.protocol, self.seconds, self.step = client, protocol, seconds, step
        self._known: dict[str, dict[str, Any]] | None = None

    def attach(self, record: Record, measurement: Measurement) -> Record:
        """The record with the ceilings of its surface. A dishonest server changes the model, for which they do not hold."""
        bounded = {BOUNDS.build(name).surface for group in self.preferred for name in group}
        if record.surface not in bounded or measurement.tampering is not None or not self.client.has_truth:
            return record
        if self._known is None:
            self._known = self._compute()
        found = self._known.get(record.surface)
        return record if found is None else replace(record, details=record.details | {KEY: found})

    def _compute(self) -> dict[str, dict[str, Any]]:
        """The ceilings by surface, as a record holds them."""
        began = time.perf_counter()
        found: list[Ceiling] = []
        refused: dict[str, str] = {}
        for group in self.preferred:
            for name in group:
                result = self._by(name)
                found += result.found
                refused |= result.refused
                if result.found:
                    break
        known: dict[str, dict[str, Any]] = {}
        for surface in {BOUNDS.build(name).surface for group in self.preferred for name in group}:
            mine = [ceiling for ceiling in found if ceiling.surface == surface]
            known[surface] = {
                **{ceiling.metric: plain_values(ceiling) for ceiling in mine},
                "bounds": {ceiling.metric: _facts(ceiling) for ceiling in mine},
                "refused": {name: reason for name, reason in refused.items() if BOUNDS.build(name).surface == surface},
                "seconds": time.perf_counter() - began,
            }
        return known

    def _by(self, name: str) -> Ceilings:
        client, protocol = self.client, self.protocol
        try:
            bound = self._within_budget(BOUNDS.build(name))
            with nothing_kept(client.model, bound):  # the truth goes through the model
                return ceilings(
                    client.model,
                    client.batch,
                    training=protocol.training,
                    defenses=protocol.defenses,
                    loss=protocol.loss,
                    normalization=client.normalization,
                    auxiliary=client.auxiliary or client.reference,
                    bounds=[bound],
                    seed=protocol.seed,
                )
        except Refused as reason:
            return Ceilings(found=(), refused={name: str(reason)})
        except Exception as error:  # as for a method: one bound's defect must not cost the audit
            return Ceilings(found=(), refused={name: f"crashed with {type(error).__name__}: {error}"})

    def _within_budget(self, bound: Bound) -> Bound:
        """The bound with as many Lanczos steps as the time allows."""
        steps, products = getattr(bound, "steps", None), getattr(bound, "products_a_step", None)
        if self.seconds is None or not self.step or products is None or not isinstance(steps, int):
            return bound
        allowed = int(self.seconds / (products * STEPS_A_PRODUCT * self.step))
        if allowed < FEWEST_LANCZOS_STEPS:
            raise Refused(f"{bound.name} would take longer than an attack may take here; dm.ceilings computes it")
        return bound if steps <= allowed else replace(bound, steps=allowed)  # pyright: ignore[reportCallIssue]


def plain_values(ceiling: Ceiling) -> list[float | None]:
    """One number a sample, or one where the metric is of the batch. An infinite PSNR, which limits nobody, is the largest; None stands for
    no number at all.
    """
    of_batch = ceiling.metric in METRICS and METRICS.build(ceiling.metric).per_batch
    values = ceiling.values[:1] if of_batch else ceiling.values
    return [None if math.isnan(value) else min(value, LARGEST_PSNR) for value in values.tolist()]


def _facts(ceiling: Ceiling) -> dict[str, Any]:
    return {"bound": ceiling.bound, "proved": ceiling.proved, "assumptions": list(ceiling.assumptions), **ceiling.details}
