"""Several local steps before anything is sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from torch import Generator

from dosimeter.client.training import FedAvg, FedSGD
from dosimeter.interfaces import Attack, Client, Defense, Replay
from dosimeter.options import PositiveFloat, PositiveInt
from dosimeter.registry import DEFENSES
from dosimeter.types import Refused, Update


@DEFENSES.register("local_iterations")
@dataclass(frozen=True, kw_only=True)
class LocalIterations(Defense):
    """Trains `steps` local steps and sends their sum instead of one gradient.

    Wei et al., "A Framework for Evaluating Gradient Leakage Attacks in Federated Learning", ESORICS 2020 (thesis Section 2.3.2).
    A FedSGD client changes to FedAvg with `learning_rate` on its whole batch. A FedAvg client keeps its settings except for
    `steps` and a given `learning_rate`. One step of FedSGD stays FedSGD.
    """

    side: ClassVar = "training"
    promise: ClassVar[str] = "nothing: the server knows the steps and can replay them"
    breaks: ClassVar[str] = "clients drift apart on unlike data; fewer rounds pay for it"
    strengths: ClassVar = ({"steps": 4, "learning_rate": 0.1}, {"steps": 16, "learning_rate": 0.1})

    steps: PositiveInt
    learning_rate: PositiveFloat | None = None  # None: the client's own, or FedAvg's default

    def replay(self, sent: Update, attack: Attack, later: Sequence[Defense]) -> Replay:
        return Replay(note="replayed with the training, adapted or not")

    def distorts(self) -> bool:
        return False

    def scaling(self) -> Literal["none"]:
        return "none"

    def __call__(self, client: Client, rng: Generator) -> Client:
        training = client.training
        if isinstance(training, FedAvg):
            rate = self.learning_rate or training.learning_rate
            return replace(client, training=replace(training, steps=self.steps, learning_rate=rate))
        if not isinstance(training, FedSGD):
            raise Refused(f"local_iterations needs fedsgd or fedavg training; this client runs {training.name}")
        if self.steps == 1:
            return client
        return replace(client, training=FedAvg(steps=self.steps, learning_rate=self.learning_rate or FedAvg().learning_rate))
