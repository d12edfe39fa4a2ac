"""Where methods are found by name. A registry imports every module of its package once, so that adding a method touches one file."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from typing import Any, Generic, TypeVar

from dosimeter.interfaces import Attack, Defense, FeatureRecovery, LabelRecovery, Loss, Metric, Sampler, Training
from dosimeter.options import OptionError, checked, type_name

Entry = TypeVar("Entry", bound=Callable[..., Any])
Built = TypeVar("Built")


@dataclass(frozen=True)
class Option:
    """One keyword of a registered entry."""

    name: str
    annotation: Any
    default: Any

    @property
    def type_name(self) -> str:
        return type_name(self.annotation)


class Registry(Generic[Built]):
    """Names of one kind of thing, each with the class or function that builds it."""

    def __init__(self, kind: str, where: str, interface: type[Built] | None = None) -> None:
        self.kind, self.where, self.interface = kind, where, interface
        self._entries: dict[str, Callable[..., Built]] = {}
        self._discovered = False

    def register(self, name: str) -> Callable[[Entry], Entry]:
        def decorate(entry: Entry) -> Entry:
            if name in self._entries:
                raise ValueError(f"{self.kind} {name!r} is registered twice: {self._entries[name]} and {entry}")
            if missing := sorted(getattr(entry, "__abstractmethods__", ())):
                raise TypeError(f"{self.kind} {name!r} cannot be registered: it does not say {_asked_of(entry, missing[0])}")
            self._entries[name] = entry
            _give_name(entry, name)
            return entry

        return decorate

    def names(self) -> list[str]:
        self._discover()
        return sorted(self._entries)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __contains__(self, name: object) -> bool:
        self._discover()
        return name in self._entries

    def entry(self, name: str, path: str = "") -> Callable[..., Built]:
        self._discover()
        if name not in self._entries:
            close = get_close_matches(str(name), self._entries, 1)
            hint = f"did you mean {close[0]!r}?" if close else "there are: " + ", ".join(self.names())
            raise OptionError(path, f"no {self.kind} named {name!r}; {hint}")
        return self._entries[name]

    def build(self, name: str, /, **options: Any) -> Built:
        path = self.kind.replace(" ", "_")
        return build(self.entry(name, path), options, path)

    def resolve(self, method: str | Built, **options: Any) -> Built:
        """A name with options, or a ready object (then without options)."""
        if isinstance(method, str):
            return self.build(method, **options)
        if self.interface is not None and not isinstance(method, self.interface):
            raise TypeError(f"expected the name of a {self.kind} or a {self.interface.__name__}, got {method!r}")
        if options:
            raise TypeError(f"options {sorted(options)} go with a name, not with a ready {self.kind}; use dataclasses.replace")
        return method

    def _discover(self) -> None:
        if self._discovered:
            return
        self._discovered = True
        module = importlib.import_module(self.where)
        for found in pkgutil.iter_modules(getattr(module, "__path__", []), self.where + "."):
            importlib.import_module(found.name)


def _asked_of(entry: Any, name: str) -> str:
    """An abstract method and the question that it answers, in its docstring's words."""
    asked = (inspect.getdoc(getattr(entry, name)) or "").partition("\n")[0]
    return f"`{name}`" + (f" ({asked.rstrip('.')})" if asked else "")


def _give_name(entry: Any, name: str) -> None:
    if isinstance(entry, type):
        type.__setattr__(entry, "name", name)


def options_of(entry: Callable[..., Any]) -> list[Option]:
    """The keywords of a method's dataclass or of a function, with their types and defaults."""
    return list(_options_of(entry))


@cache
def _options_of(entry: Callable[..., Any]) -> tuple[Option, ...]:
    target = entry if not inspect.isclass(entry) else entry.__init__
    hints = typing.get_type_hints(entry if inspect.isclass(entry) else target, include_extras=True)
    parameters = inspect.signature(entry).parameters.values()
    return tuple(Option(p.name, hints.get(p.name, Any), p.default) for p in parameters if p.kind is p.KEYWORD_ONLY)


def build(entry: Callable[..., Built], options: dict[str, Any], path: str) -> Built:
    """Call `entry` with `options`, each checked against its type; errors name the path."""
    known = {option.name: option for option in options_of(entry)}
    for name in options:
        if name not in known:
            close = get_close_matches(name, known, 1)
            hint = f"did you mean {close[0]!r}?" if close else ("options are: " + ", ".join(known) if known else "it takes no options")
            raise OptionError(path, f"unknown option {name!r}; {hint}")
    missing = [name for name, option in known.items() if option.default is inspect.Parameter.empty and name not in options]
    if missing:
        raise OptionError(path, f"missing option {missing[0]!r} ({known[missing[0]].type_name})")
    try:
        return entry(**{name: checked(known[name].annotation, value, name) for name, value in options.items()})
    except OptionError as error:
        raise error.under(path) from None


LOSSES: Registry[Loss] = Registry("loss", "dosimeter.client.losses", Loss)
TRAININGS: Registry[Training] = Registry("training", "dosimeter.client.training", Training)
DEFENSES: Registry[Defense] = Registry("defense", "dosimeter.defenses", Defense)
LABELS: Registry[LabelRecovery] = Registry("label recovery", "dosimeter.labels", LabelRecovery)
FEATURES: Registry[FeatureRecovery] = Registry("feature recovery", "dosimeter.features", FeatureRecovery)
ATTACKS: Registry[Attack] = Registry("attack", "dosimeter.attacks", Attack)
METRICS: Registry[Metric] = Registry("metric", "dosimeter.metrics", Metric)
MODELS: Registry[Any] = Registry("model", "dosimeter.models")
DATASETS: Registry[Any] = Registry("data set", "dosimeter.data")
SAMPLERS: Registry[Sampler] = Registry("sampler", "dosimeter.data", Sampler)

METHODS: tuple[Registry[Any], ...] = (LABELS, FEATURES, ATTACKS, DEFENSES, LOSSES, TRAININGS, METRICS)


def attack(name: str, /, **options: Any) -> Attack:
    """An attack by its name in `dosimeter list`, with its options."""
    return ATTACKS.build(name, **options)


def defense(name: str, /, **options: Any) -> Defense:
    """A defense by its name in `dosimeter list`, with its options."""
    return DEFENSES.build(name, **options)


def label_recovery(name: str, /, **options: Any) -> LabelRecovery:
    """A label recovery by its name in `dosimeter list`, with its options."""
    return LABELS.build(name, **options)


def feature_recovery(name: str, /, **options: Any) -> FeatureRecovery:
    """A feature recovery by its name in `dosimeter list`, with its options."""
    return FEATURES.build(name, **options)
