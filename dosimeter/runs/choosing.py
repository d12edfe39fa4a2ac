"""Which methods an audit runs: those that are named, or all that need neither a changed model nor an option without a default."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from dosimeter.interfaces import Recovery, Tampering
from dosimeter.options import OptionError
from dosimeter.registry import Registry, options_of, suggestion
from dosimeter.surfaces.surface import surfaces
from dosimeter.types import Knowledge

Budget = Literal["quick", "published"]


def choose_methods(registry: Registry[Any], wanted: Any, budget: Budget) -> tuple[Any, ...]:
    """The methods named; or, for "all", every method that needs neither a tampered model nor an option without a default."""
    if wanted != "all":
        return tuple(wanted)
    entries: dict[str, Any] = {name: registry.entry(name) for name in registry}
    passive = {name: entry for name, entry in entries.items() if not (_is_active(entry) or _has_required_option(entry))}
    return tuple(registry.build(name, **(entry.quick if budget == "quick" else {})) for name, entry in passive.items())


def _is_active(entry: Any) -> bool:
    return issubclass(entry, Tampering) or Knowledge.TAMPERED_MODEL in entry.needs


def _has_required_option(entry: Any) -> bool:
    return any(option.required for option in options_of(entry))


def resolve_methods(wanted: dict[str, Any]) -> dict[str, Any]:
    """The methods that the caller of `audit` names, by the plural key of their surface."""
    registries = {surface.plural: surface.methods for surface in surfaces()}
    for key in wanted:
        if key not in registries:
            raise OptionError(key, f"no such option; {suggestion(key, registries, 'methods are chosen by')}")
    return {key: "all" if names == "all" else _resolve_names(registries[key], names, key) for key, names in wanted.items()}


def _resolve_names(registry: Registry[Any], wanted: Any, key: str) -> tuple[Any, ...]:
    alone = isinstance(wanted, str | Recovery)
    if not alone and not isinstance(wanted, Iterable):
        raise TypeError(f"{key}: expected 'all', a name, a method or a list of these, got {wanted!r}")
    return tuple(registry.resolve(item) for item in ([wanted] if alone else wanted))
