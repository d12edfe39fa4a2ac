"""Bias gradients stay with the client."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from torch import Generator, nn

from dosimeter.defenses.outgoing import names_of
from dosimeter.interfaces import Client, Defense
from dosimeter.network.head import locate_head
from dosimeter.registry import DEFENSES
from dosimeter.types import Update


@DEFENSES.register("bias_withheld")
@dataclass(frozen=True, kw_only=True)
class BiasWithheld(Defense):
    """Sends the update without the biases of the head, of all linear layers, or of all layers.

    Scheliga, Mäder & Seeland, "Combining Variational Modeling with Partial Gradient Perturbation to Prevent Deep Gradient
    Leakage", 2022, as in thesis Section 4.2.3: attacks that divide a weight's gradient by its bias's have nothing to divide by.
    Departure: the biases stay in the model and are not sent. `bias_free_head` removes the head's bias from the model.
    """

    side: ClassVar = "update"
    continuous: ClassVar[bool] = True
    promise: ClassVar[str] = "bias gradients are not seen; the weights' own gradients determine the features without them"
    breaks: ClassVar[str] = "training of the biases that are withheld"

    scope: Literal["head", "linear", "all"] = "linear"

    def distorts(self) -> bool:
        return False

    def scaling(self) -> Literal["none"]:
        return "none"

    def __call__(self, client: Client, rng: Generator) -> Client:
        withheld = self._names(client)

        def without_biases(update: Update) -> Update:
            return {name: change for name, change in update.items() if name not in withheld}

        return replace(client, outgoing=(*client.outgoing, without_biases))

    def _names(self, client: Client) -> set[str]:
        if self.scope == "all":
            return {name for name, _ in client.model.named_parameters() if name.rpartition(".")[2] == "bias"}
        head, _ = locate_head(client.model, tuple(client.batch.inputs.shape[1:]), client.loss.shift_invariant)
        linear = [name for name, module in client.model.named_modules() if isinstance(module, nn.Linear)]
        layers = {head} if self.scope == "head" else {head, *linear}
        return names_of((getattr(client.model.get_submodule(name), "bias", None) for name in layers), client.model)
