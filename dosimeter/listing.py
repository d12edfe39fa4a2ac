"""What `dosimeter list` says about every method, read from the code."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from dosimeter.config import describe
from dosimeter.registry import (
    ATTACKS,
    DATASETS,
    DEFENSES,
    FEATURES,
    LABELS,
    LOSSES,
    METRICS,
    MODELS,
    SAMPLERS,
    TRAININGS,
    Registry,
    options_of,
)

REGISTRIES: dict[str, Registry[Any]] = {
    "labels": LABELS,
    "features": FEATURES,
    "attacks": ATTACKS,
    "defenses": DEFENSES,
    "losses": LOSSES,
    "trainings": TRAININGS,
    "metrics": METRICS,
    "models": MODELS,
    "data": DATASETS,
    "samplers": SAMPLERS,
}


def catalogue(kinds: Sequence[str]) -> list[dict[str, Any]]:
    """One entry a method: kind, name, idea, source, needs, promise, cost, and options with types and defaults."""
    return [_entry(kind, name, REGISTRIES[kind].entry(name)) for kind in kinds for name in REGISTRIES[kind]]


def _entry(kind: str, name: str, entry: Any) -> dict[str, Any]:
    idea, _, rest = (inspect.getdoc(entry) or "").partition("\n")
    return {
        "kind": kind,
        "name": name,
        "idea": idea.strip(),
        "source": rest.strip(),
        "needs": sorted(need.value for need in getattr(entry, "needs", ())),
        **{said: getattr(entry, said) for said in ("promise", "breaks") if hasattr(entry, said)},  # of a defense
        "options": [
            {
                "name": option.name,
                "type": option.type_name,
                "required": option.required,
                "default": None if option.required else _plain(option.default),
            }
            for option in options_of(entry)
        ],
    }


def _plain(default: Any) -> Any:
    value = describe(default)
    return value if isinstance(value, (int, float, str, bool, list, dict, type(None))) else str(value)
