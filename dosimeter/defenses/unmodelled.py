"""A change of the update that is declared and not described."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Generator

from dosimeter.defenses.outgoing import OutgoingDefense
from dosimeter.registry import DEFENSES
from dosimeter.types import Update


@DEFENSES.register("unmodelled")
@dataclass(frozen=True, kw_only=True)
class Unmodelled(OutgoingDefense):
    """Declares that what was sent differs from what training gave, in a way that nobody describes.

    Ours; in no paper. For updates of real clients behind a filter of which Dosimeter has no model: methods read the update as it is, and
    nothing is proved. A simulated client sends its update unchanged.
    """

    promise: ClassVar[str] = "nothing: it says that a change was made, and not which"
    breaks: ClassVar[str] = "every proof"

    def distorts(self) -> bool:
        return True

    def protect(self, update: Update, rng: Generator) -> Update:
        return dict(update)
