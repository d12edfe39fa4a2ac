"""RLU: counts from clients that the server simulates over their local epochs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Generator, Tensor

from dosimeter.client.training import FedAvg
from dosimeter.engines.counting.counts import estimate_of, nearest_counts
from dosimeter.engines.counting.regression import regress_counts
from dosimeter.engines.counting.simulation import Simulator
from dosimeter.interfaces import Exposure, LabelRecovery
from dosimeter.options import PositiveInt
from dosimeter.registry import LABELS
from dosimeter.types import Knowledge, LabelEstimate, Refused

PASSES_A_STEP = 3  # forward and backward
CERTAINTY = 2.0  # of later rounds: counts vary about half as much as those of a sample of shares


@LABELS.register("rlu")
@dataclass(frozen=True, kw_only=True)
class RLU(LabelRecovery):
    """Counts each class by simulating clients with known labels, over all local steps, until one's update resembles the client's.

    Chen & Vikalo, "Recovering Labels from Local Updates in Federated Learning", ICML 2024: the update of the output layer is linear in the
    labels and in the model's erroneous confidence, which changes from step to step and is followed by Monte Carlo on auxiliary samples.
    Departures: whole clients are simulated with the declared training, so that any optimiser serves. Counts come from a regression of the
    simulated clients' counts on what their updates show (the head's bias and rows, and how the logits of auxiliary samples change) in
    place of least squares in the head's update. Later rounds simulate clients whose labels are like the estimate.
    """

    needs = frozenset({Knowledge.AUXILIARY, Knowledge.BATCH_SIZE})
    reads_any_update = True
    trust = 45
    quick: ClassVar[dict[str, Any]] = {"simulations": 32, "rounds": 1}

    simulations: PositiveInt = 96
    rounds: PositiveInt = 2
    probes: PositiveInt = 200  # auxiliary samples, at most, on which the model after a simulated training is compared with the model before

    def __call__(self, exposure: Exposure, rng: Generator) -> LabelEstimate:
        simulator = Simulator(exposure, rng, self.probes)
        if int(simulator.seen.sum()) < 2:
            raise Refused("rlu needs auxiliary samples of at least two classes")
        sent = _finite(simulator.statistics(exposure.update), "with the client's update")
        counts = errors = None
        for _ in range(self.rounds):
            drawn = simulator.draw_counts(self.simulations, _shares(counts), CERTAINTY * simulator.size)
            counts, errors = regress_counts(_finite(simulator.simulate(drawn), "of simulated clients"), drawn, sent)
        assert counts is not None
        assert errors is not None
        missing = (~simulator.seen).nonzero().flatten().tolist()
        message = f"no auxiliary sample of class {missing[0]}, which counts as absent" if missing else ""
        whole = nearest_counts(counts.where(simulator.seen, -float(simulator.size)), simulator.size)
        device = next(iter(exposure.update.values())).device
        return estimate_of(whole.to(device), scores=counts.to(device), message=message, details={"count_error": errors})

    def forwards(self, exposure: Exposure) -> tuple[float, float]:
        """How many forward passes of one sample a call takes: for all probes, and for the simulated training."""
        public, known = exposure.public, exposure.auxiliary
        if known is None or public.batch_size is None:
            return 0.0, 0.0
        clients = self.simulations * self.rounds
        training = public.training
        visits = public.batch_size
        if isinstance(training, FedAvg):
            visits = (training.local_batches(public.batch_size) or 1) * min(training.mini_batch or visits, visits)
        return float((clients + 1) * min(self.probes, len(known.targets))), float(clients * PASSES_A_STEP * visits)


def _finite(statistics: Tensor, whose: str) -> Tensor:
    if not bool(statistics.isfinite().all()):
        raise Refused(f"rlu compares logits before and after the update, and the model {whose} has logits that are no finite numbers")
    return statistics


def _shares(counts: Tensor | None) -> Tensor | None:
    """Shares of the batch, none below zero."""
    if counts is None:
        return None
    positive = counts.clamp_min(0)
    return positive / positive.sum()
