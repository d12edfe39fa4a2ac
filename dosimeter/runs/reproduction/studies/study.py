"""What a study is, and the registry that finds each by its name in a table's file."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import Generator

from dosimeter.interfaces import Method
from dosimeter.registry import Registry
from dosimeter.runs.measurement import AuditedClient


@dataclass(frozen=True, kw_only=True)
class Study(Method):
    """Numbers about a trial's client: its batch, its model, or how an approximation holds there. A study sees the truth."""

    quantities: ClassVar[dict[str, bool]] = {}  # name -> whether it is an error of no fixed scale, which is compared by its ratio

    @abstractmethod
    def __call__(self, client: AuditedClient, rng: Generator) -> dict[str, float | None]:
        """A number for each quantity, None where this trial has none. Nothing is mutated."""

    @classmethod
    def definition_error(cls) -> str:
        return "" if cls.quantities else "it names no quantities"


STUDIES: Registry[Study] = Registry("study", "dosimeter.runs.reproduction.studies", Study)


def studied_quantities() -> dict[str, bool]:
    """Every quantity of every study, with whether it is an error."""
    return {quantity: error for name in STUDIES for quantity, error in _quantities(name).items()}


def _quantities(name: str) -> dict[str, bool]:
    entry = STUDIES.entry(name)
    assert isinstance(entry, type)
    assert issubclass(entry, Study)
    return entry.quantities
