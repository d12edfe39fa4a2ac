"""One layer is shared, the rest is withheld."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from torch import Generator

from dosimeter.interfaces import Client, Defense
from dosimeter.options import OptionError
from dosimeter.registry import DEFENSES
from dosimeter.types import Update


@DEFENSES.register("only_layer")
@dataclass(frozen=True, kw_only=True)
class OnlyLayer(Defense):
    """Sends the parameters of one layer alone.

    Partial sharing taken to its end, as in thesis chapter 4, whose attack recovers labels from one layer at a time.
    `layer` is a module's name ("layer4.1", "fc") or a parameter's ("fc.weight").
    """

    side: ClassVar = "update"
    hides_head: ClassVar[bool] = True  # unless `layer` is the head
    continuous: ClassVar[bool] = True
    promise: ClassVar[str] = "the other layers' gradients are not seen"
    breaks: ClassVar[str] = "training of every other layer"

    layer: str

    def distorts(self) -> bool:
        return False

    def scaling(self) -> Literal["none"]:
        return "none"

    def __call__(self, client: Client, rng: Generator) -> Client:
        parameters = [name for name, _ in client.model.named_parameters()]
        if not any(self._holds(name) for name in parameters):
            raise OptionError("defense.layer", f"the model has no parameters under {self.layer!r}; it has: {', '.join(parameters)}")
        return replace(client, outgoing=(*client.outgoing, self.protect))

    def protect(self, update: Update) -> Update:
        return {name: change for name, change in update.items() if self._holds(name)}

    def _holds(self, name: str) -> bool:
        return name == self.layer or name.startswith(f"{self.layer}.")
