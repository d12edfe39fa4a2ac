"""What `dosimeter list` says about every method, read from the code."""

from __future__ import annotations

import inspect
from typing import Any

from dosimeter.config import describe
from dosimeter.options import OptionError
from dosimeter.registry import (
    BOUNDS,
    DATASETS,
    DEFENSES,
    LOSSES,
    METRICS,
    MODELS,
    PRIVACY,
    SAMPLERS,
    TRAININGS,
    Registry,
    options_of,
    suggestion,
)
from dosimeter.surfaces.surface import surfaces

CLIENT_SIDE: dict[str, Registry[Any]] = {
    "bounds": BOUNDS,
    "defenses": DEFENSES,
    "privacy": PRIVACY,
    "losses": LOSSES,
    "trainings": TRAININGS,
    "metrics": METRICS,
    "models": MODELS,
    "data": DATASETS,
    "samplers": SAMPLERS,
}


def registries() -> dict[str, Registry[Any]]:
    """Every kind of method by its name in the list: those of each surface, then the rest."""
    return {surface.plural: surface.methods for surface in surfaces()} | CLIENT_SIDE


def catalogue(kind: str | None = None) -> list[dict[str, Any]]:
    """One entry a method: kind, name, idea, source, needs, promise, cost, and options with types and defaults."""
    known = registries()
    if kind is not None and kind not in known:
        raise OptionError("kind", f"no methods of the kind {kind!r}; {suggestion(kind, known, 'there are')}")
    wanted = known if kind is None else {kind: known[kind]}
    return [_entry(name_of_kind, name, registry.entry(name)) for name_of_kind, registry in wanted.items() for name in registry]


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
