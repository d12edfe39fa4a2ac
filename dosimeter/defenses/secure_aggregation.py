"""Secure aggregation: the server sees the mean of several clients' updates and no single one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from torch import Generator

from dosimeter.client.training import MeanOfClients, Replayable
from dosimeter.interfaces import Attack, Client, Defense, Replay, Training
from dosimeter.options import PositiveInt
from dosimeter.registry import DEFENSES
from dosimeter.types import Refused, Update


@DEFENSES.register("secure_aggregation")
@dataclass(frozen=True, kw_only=True)
class SecureAggregation(Defense):
    """Lets the server see only the mean of the updates of `clients` clients.

    Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning", CCS 2017; homomorphic encryption and
    multi-party sums (thesis Table 2.2, aggregation) look the same to the server. The audited batch is that of all clients
    together. It is split in order, as evenly as possible or by `sizes`. Each client trains on its share, and the mean is weighted by the
    sizes of the shares (McMahan et al., AISTATS 2017). With FedSGD and no batch norm, the server sees the gradient of one large batch:
    aggregation hides which client a sample belongs to, and leaks what a batch of that size leaks.
    List it before the defenses of the update, which then act on the mean.
    """

    side: ClassVar = "training"
    promise: ClassVar[str] = "no single client's update is seen, if enough clients are honest; the mean itself is not protected"
    breaks: ClassVar[str] = "checks on single updates (outliers, poisoning); rounds fail when too many clients drop out"

    clients: PositiveInt
    sizes: tuple[PositiveInt, ...] | None = None  # of the clients' shares; None: as equal as possible

    def replay(self, sent: Update, attack: Attack, later: Sequence[Defense]) -> Replay:
        return Replay(note="replayed with the training, adapted or not")

    def distorts(self) -> bool:
        return False

    def scaling(self) -> Literal["none"]:
        return "none"

    def __call__(self, client: Client, rng: Generator) -> Client:
        if self.clients == 1:
            return client
        if client.outgoing:
            raise Refused("secure_aggregation must be listed before the defenses of the update, which would otherwise act on the mean")
        samples = len(client.batch.inputs)
        if samples < self.clients:
            raise Refused(f"secure_aggregation over {self.clients} clients needs a sample for each; the batch has {samples}")
        if self.sizes is not None and (len(self.sizes) != self.clients or sum(self.sizes) != samples):
            raise Refused(f"secure_aggregation.sizes: expected {self.clients} numbers that add up to {samples}, got {list(self.sizes)}")
        return replace(client, training=self.training_behind(client.training))

    def training_behind(self, training: Training) -> Training:
        if not isinstance(training, Replayable):
            raise Refused(f"secure_aggregation needs fedsgd or fedavg training; this client runs {training.name}")
        return training if self.clients == 1 else MeanOfClients(clients=self.clients, each=training, sizes=self.sizes)
