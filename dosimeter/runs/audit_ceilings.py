"""The ceilings of an audit: what no attacker can exceed, in the records beside what the methods reached."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from dosimeter.interfaces import Bound
from dosimeter.network.leftovers import nothing_kept
from dosimeter.registry import BOUNDS, METRICS
from dosimeter.runs.ceilings import Ceilings, ceilings
from dosimeter.runs.measurement import AuditedClient, Measurement, Protocol
from dosimeter.types import Ceiling, Record, Refused

KEY = "ceiling"  # of a record's details
LARGEST_PSNR = 300.0  # dB; float64 itself ends there, and a record holds no infinity
STEPS_A_PRODUCT = 2.6  # a product with JᵀJ in float64 takes as long as so many steps of matching on one sample


@dataclass(frozen=True, kw_only=True)
class Known:
    """The ceilings of a client on all surfaces."""

    found: list[Ceiling]
    refused: dict[str, str]  # by the bound's name
    seconds: float

    def held(self, record: Record) -> dict[str, Any]:
        """Those of the record's surface, as the record holds them."""
        mine = [
            BOUNDS.build(ceiling.bound).as_measured(ceiling, record.details) for ceiling in self.found if ceiling.surface == record.surface
        ]
        return {
            **{ceiling.metric: plain_values(ceiling) for ceiling in mine},
            "bounds": {ceiling.metric: _facts(ceiling) for ceiling in mine},
            "refused": {name: reason for name, reason in self.refused.items() if BOUNDS.build(name).surface == record.surface},
            "seconds": self.seconds,
        }


class AuditCeilings:
    """The ceilings of one client behind one protocol, computed when the first record asks for them.

    Of the bounds on one metric, the first in `preferred` that does not refuse counts: a theorem goes before an estimate.
    A secret that is sent in `rounds` rounds is bounded over all of them, as its ε is; the other bounds are for the update that is audited.
    `seconds` limits each bound, counted in operations (`seconds_a_step`); `step` is such a count for one step on the whole batch.
    """

    preferred = (("van_trees", "hidden_directions"), ("reconstruction_robustness",), ("label_robustness",), ("membership_tradeoff",))

    def __init__(self, client: AuditedClient, protocol: Protocol, *, seconds: float | None, step: float, rounds: int = 1) -> None:
        self.client, self.protocol, self.seconds, self.step, self.rounds = client, protocol, seconds, step, rounds
        self._known: Known | None = None

    def attach(self, record: Record, measurement: Measurement) -> Record:
        """The record with the ceilings of its surface. A dishonest server changes the model, for which they do not hold."""
        bounded = {BOUNDS.build(name).surface for group in self.preferred for name in group}
        if record.surface not in bounded or measurement.tampering is not None or not self.client.has_truth:
            return record
        if self._known is None:
            self._known = self._compute()
        return replace(record, details=record.details | {KEY: self._known.held(record)})

    def _compute(self) -> Known:
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
        return Known(found=found, refused=refused, seconds=time.perf_counter() - began)

    def _by(self, name: str) -> Ceilings:
        client, protocol = self.client, self.protocol
        try:
            options = {"steps": self.rounds} if name == "reconstruction_robustness" else {}
            bound = self._within_budget(BOUNDS.build(name, **options))
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
        """The bound in as many products as the time allows."""
        inputs = self.client.batch.inputs
        if self.seconds is None or not self.step or not isinstance(inputs, Tensor):
            return bound
        return bound.within(self.seconds / (STEPS_A_PRODUCT * self.step), inputs[0].numel())


def plain_values(ceiling: Ceiling) -> list[float | None]:
    """One number a sample, or one where the metric is of the batch. An infinite PSNR, which limits nobody, is the largest; None stands for
    no number at all.
    """
    of_batch = ceiling.metric in METRICS and METRICS.build(ceiling.metric).per_batch
    values = ceiling.values[:1] if of_batch else ceiling.values
    return [None if math.isnan(value) else min(value, LARGEST_PSNR) for value in values.tolist()]


def _facts(ceiling: Ceiling) -> dict[str, Any]:
    return {"bound": ceiling.bound, "proved": ceiling.proved, "assumptions": list(ceiling.assumptions), **ceiling.details}
