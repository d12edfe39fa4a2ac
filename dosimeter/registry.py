"""Registries, which find methods by name. A registry imports the files of its package, so that a new method is one new file."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import typing
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec
from typing import Any, Generic, TypeVar

from dosimeter.interfaces import (
    Attack,
    Bound,
    Defense,
    FeatureRecovery,
    LabelRecovery,
    Loss,
    MapRecovery,
    MembershipTest,
    Method,
    Metric,
    PrivacySetting,
    Sampler,
    TargetRecovery,
    TokenRecovery,
    Training,
)
from dosimeter.options import OptionError, check_value, type_name

Entry = TypeVar("Entry", bound=Callable[..., Any])
Built = TypeVar("Built")


@dataclass(frozen=True)
class Option:
    """One keyword of a registered entry."""

    name: str
    annotation: Any
    default: Any

    @property
    def required(self) -> bool:
        return self.default is inspect.Parameter.empty

    @property
    def type_name(self) -> str:
        return type_name(self.annotation)


# Names of earlier versions in users' files, and the words for the new ones. Keys: "attack old_name" for a method,
# "attack name.old_option" for an option, "data.old_key" for a key in a table.
RENAMED: dict[str, str] = {
    "attack gradfilt.expected": "an option of the attack 'gradfilt_imprint'",
    "attack gradfilt.bins": "an option of the attack 'gradfilt_imprint'",
    "attack gradfilt.functionals": "an option of the attack 'gradfilt_imprint'",
    "attack gradfilt.normalization": "an option of the attack 'gradfilt_imprint'",
    "attack gradfilt.moments": "an option of the attack 'gradfilt_imprint'",
    "attack gradfilt.round": "an option of the attack 'gradfilt_imprint'",
    "attack gradfilt.threshold": "the choice between the attacks 'gradfilt' and 'gradfilt_imprint'",
    "attack gradfilt.learning_rate": "always 0.1; the attack 'inverting_gradients' has this option",
}


# The registry of each interface, so that a configuration finds the methods of a field by the field's type.
REGISTRY_OF: dict[type, Registry[Any]] = {}


class Registry(Generic[Built]):
    """The names of one kind of method, each with the class or function that builds it.

    A registry first imports the file named like the method. Where that file lacks the method, it imports the whole package.
    """

    def __init__(self, kind: str, where: str, interface: type[Built] | None = None) -> None:
        self.kind, self.where, self.interface = kind, where, interface
        if interface is not None:
            REGISTRY_OF[interface] = self
        self._entries: dict[str, Callable[..., Built]] = {}
        self._complete = False  # whether the whole package is imported

    def register(self, name: str) -> Callable[[Entry], Entry]:
        def decorate(entry: Entry) -> Entry:
            if name in self._entries:
                raise ValueError(f"{self.kind} {name!r} is registered twice: {self._entries[name]} and {entry}")
            if problem := self._problem_of(entry):
                raise ValueError(f"{self.kind} {name!r} cannot be registered: {problem}")
            self._entries[name] = entry
            _give_name(entry, name)
            return entry

        return decorate

    def _problem_of(self, entry: Any) -> str:
        """Why a class cannot be registered here, "" where it can."""
        if self.interface is not None and not (isinstance(entry, type) and issubclass(entry, self.interface)):
            return f"expected a {self.interface.__name__}, got {entry!r}"
        if missing := sorted(getattr(entry, "__abstractmethods__", ())):
            return f"it does not say {_question_of(entry, missing[0])}"
        return entry.definition_error() if isinstance(entry, type) and issubclass(entry, Method) else ""

    def names(self) -> list[str]:
        self._import_all()
        return sorted(self._entries)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __contains__(self, name: object) -> bool:
        if not isinstance(name, str):
            return False
        self._import_file_of(name)
        if name not in self._entries:
            self._import_all()
        return name in self._entries

    def entry(self, name: str, path: str = "") -> Callable[..., Built]:
        """The class or function of this name; an unknown name is refused with the nearest one."""
        if name not in self:
            refuse_renamed(f"{self.kind} {name}", name, path)
            raise OptionError(path, f"no {self.kind} named {name!r}; {suggestion(str(name), self.names(), 'there are')}")
        return self._entries[name]

    def construct(self, name: str, options: dict[str, Any], path: str) -> Built:
        """The method of this name with these options, each checked against its type; errors name the path."""
        entry = self.entry(name, path)
        known = {option.name: option for option in options_of(entry)}
        for option in options:
            if option not in known:
                refuse_renamed(f"{self.kind} {name}.{option}", option, path)
                hint = suggestion(option, known, "options are") if known else "it takes no options"
                raise OptionError(path, f"unknown option {option!r}; {hint}")
        missing = [option.name for option in known.values() if option.required and option.name not in options]
        if missing:
            raise OptionError(path, f"missing option {missing[0]!r} ({known[missing[0]].type_name})")
        try:
            return entry(**{option: check_value(known[option].annotation, value, option) for option, value in options.items()})
        except OptionError as error:
            raise error.under(path) from None

    def build(self, name: str, /, **options: Any) -> Built:
        return self.construct(name, options, self.kind.replace(" ", "_"))

    def resolve(self, method: str | Built, **options: Any) -> Built:
        """A name with options, or a ready object (then without options)."""
        if isinstance(method, str):
            return self.build(method, **options)
        if self.interface is not None and not isinstance(method, self.interface):
            raise TypeError(f"expected the name of {with_article(self.kind)} or {with_article(self.interface.__name__)}, got {method!r}")
        if options:
            raise TypeError(f"options {sorted(options)} go with a name, not with a ready {self.kind}; use dataclasses.replace")
        return method

    def _import_file_of(self, name: str) -> None:
        if name in self._entries or not name.isidentifier():
            return
        package = importlib.import_module(self.where)
        if hasattr(package, "__path__") and find_spec(f"{self.where}.{name}") is not None:
            importlib.import_module(f"{self.where}.{name}")

    def _import_all(self) -> None:
        if self._complete:
            return
        self._complete = True
        package = importlib.import_module(self.where)
        for module in pkgutil.iter_modules(getattr(package, "__path__", []), self.where + "."):
            importlib.import_module(module.name)


def with_article(noun: str) -> str:
    return f"{'an' if noun[:1].lower() in 'aeiou' else 'a'} {noun}"


def suggestion(name: str, known: Collection[str], introduction: str) -> str:
    """A hint for an unknown name: the nearest known name, or all of them."""
    close = get_close_matches(name, known, 1)
    return f"did you mean {close[0]!r}?" if close else f"{introduction}: {', '.join(known)}"


def refuse_renamed(key: str, old: str, path: str) -> None:
    """Refuse a name of an earlier version, with its new name. Do nothing for a name that was never renamed."""
    if key in RENAMED:
        raise OptionError(path, f"{old!r} is now {RENAMED[key]}")


def _question_of(entry: Any, name: str) -> str:
    """The name of an abstract method and the first line of its docstring."""
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


LOSSES: Registry[Loss] = Registry("loss", "dosimeter.client.losses", Loss)
TRAININGS: Registry[Training] = Registry("training", "dosimeter.client.training", Training)
DEFENSES: Registry[Defense] = Registry("defense", "dosimeter.defenses", Defense)
LABELS: Registry[LabelRecovery] = Registry("label recovery", "dosimeter.labels", LabelRecovery)
FEATURES: Registry[FeatureRecovery] = Registry("feature recovery", "dosimeter.features", FeatureRecovery)
MAPS: Registry[MapRecovery] = Registry("map recovery", "dosimeter.maps", MapRecovery)
TARGETS: Registry[TargetRecovery] = Registry("target recovery", "dosimeter.targets", TargetRecovery)
TOKENS: Registry[TokenRecovery] = Registry("token recovery", "dosimeter.tokens", TokenRecovery)
MEMBERSHIP: Registry[MembershipTest] = Registry("membership test", "dosimeter.membership", MembershipTest)
ATTACKS: Registry[Attack] = Registry("attack", "dosimeter.attacks", Attack)
BOUNDS: Registry[Bound] = Registry("bound", "dosimeter.bounds", Bound)
PRIVACY: Registry[PrivacySetting] = Registry("privacy setting", "dosimeter.privacy_settings", PrivacySetting)
METRICS: Registry[Metric] = Registry("metric", "dosimeter.metrics", Metric)
MODELS: Registry[Any] = Registry("model", "dosimeter.models")
DATASETS: Registry[Any] = Registry("data set", "dosimeter.data")
SAMPLERS: Registry[Sampler] = Registry("sampler", "dosimeter.data.samplers", Sampler)

METHODS: tuple[Registry[Any], ...] = (
    LABELS,
    FEATURES,
    TARGETS,
    MAPS,
    TOKENS,
    MEMBERSHIP,
    ATTACKS,
    BOUNDS,
    DEFENSES,
    PRIVACY,
    LOSSES,
    TRAININGS,
    METRICS,
)


def attack(name: str, /, **options: Any) -> Attack:
    """An attack by its name in `dosimeter list`, with its options."""
    return ATTACKS.build(name, **options)


def defense(name: str, /, **options: Any) -> Defense:
    """A defense by its name in `dosimeter list`, with its options."""
    return DEFENSES.build(name, **options)


def privacy(setting: str | PrivacySetting | Any, /, **options: Any) -> PrivacySetting:
    """A privacy setting by its name in `dosimeter list` with its options, or as a framework's own object, such as Flower's `LocalDpMod`."""
    if isinstance(setting, (str, PrivacySetting)):
        return PRIVACY.resolve(setting, **options)
    if (read := privacy_of(setting, **options)) is not None:
        return read
    known = f"a name out of {', '.join(PRIVACY)}, or a framework's own object"
    raise TypeError(f"privacy: expected {known}, got {type(setting).__name__}")


def privacy_of(thing: Any, **options: Any) -> PrivacySetting | None:
    """The privacy setting in a framework's own object; None where it is none that is known."""
    for name in PRIVACY:
        entry: Any = PRIVACY.entry(name)
        if (found := entry.read(thing)) is not None:
            return PRIVACY.build(name, **(found | options))
    return None


def label_recovery(name: str, /, **options: Any) -> LabelRecovery:
    """A label recovery by its name in `dosimeter list`, with its options."""
    return LABELS.build(name, **options)


def feature_recovery(name: str, /, **options: Any) -> FeatureRecovery:
    """A feature recovery by its name in `dosimeter list`, with its options."""
    return FEATURES.build(name, **options)
