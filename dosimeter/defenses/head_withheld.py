"""The last linear layer stays with the client."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from torch import Generator

from dosimeter.defenses.outgoing import names_of
from dosimeter.interfaces import Client, Defense
from dosimeter.network.head import locate_head
from dosimeter.registry import DEFENSES
from dosimeter.types import Update


@DEFENSES.register("head_withheld")
@dataclass(frozen=True, kw_only=True)
class HeadWithheld(Defense):
    """Sends every layer but the last linear one, weight and bias.

    Sotthiwat et al., "Partially Encrypted Multi-Party Computation for Federated Learning", CCGrid 2021 (PE-MPC), and Mei et al.,
    "FedVF: Personalized Federated Learning Based on Layer-wise Parameter Updates with Variable Frequency", IPCCC 2021, as
    in thesis Section 4.2.3. To the server, an encrypted layer and one kept at home look the same: absent.
    A weight that the head shares with another layer stays at home for both.
    """

    side: ClassVar = "update"
    hides_head: ClassVar[bool] = True
    continuous: ClassVar[bool] = True
    promise: ClassVar[str] = "the head's gradient is not seen; the layers below carry it on (thesis chapter 4 bridges the gap)"
    breaks: ClassVar[str] = "a shared classifier: each client keeps its own head, or pays for encrypting it"

    def distorts(self) -> bool:
        return False

    def scaling(self) -> Literal["none"]:
        return "none"

    def __call__(self, client: Client, rng: Generator) -> Client:
        name, _ = locate_head(client.model, tuple(client.batch.inputs.shape[1:]), client.loss.shift_invariant)
        withheld = names_of(client.model.get_submodule(name).parameters(), client.model)

        def without_head(update: Update) -> Update:
            return {name: change for name, change in update.items() if name not in withheld}

        return replace(client, outgoing=(*client.outgoing, without_head))
