"""A paper's table as TOML describes it: rows with their settings, published numbers, laws and departures."""

from __future__ import annotations

import copy
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from dosimeter.config import construct, read_toml
from dosimeter.data.samplers import Random
from dosimeter.engines.decoder.settings import DecoderSettings
from dosimeter.interfaces import Sampler
from dosimeter.models.loading import ModelConfig
from dosimeter.options import Fraction, NonNegativeFloat, NonNegativeInt, OptionError, PositiveFloat, PositiveInt, check_fields, check_value
from dosimeter.runs.measurement import Measurement
from dosimeter.runs.reproduction.studies.study import Study
from dosimeter.types import Normalization

Published = dict[str, dict[str, Any]]  # column -> quantity -> number, or one for each value that is varied
SOURCE = Path(__file__).resolve().parents[3]
SCHEMES = (sysconfig.get_default_scheme(), sysconfig.get_preferred_scheme("user"))
FOLDERS = (  # of the installation: beside the package's source, or where pip puts a wheel's data; never the working directory
    *((SOURCE / "papers",) if (SOURCE / "pyproject.toml").is_file() else ()),
    *(Path(sysconfig.get_path("data", scheme)) / "share" / "dosimeter" / "papers" for scheme in SCHEMES),
)


@dataclass(frozen=True, kw_only=True)
class Softening:
    """How labels are made soft before training: each sample draws a weight from U(low, high) for smoothing or mixup."""

    kind: Literal["one_hot", "smoothing", "mixup"]
    low: Fraction = 0.0
    high: Fraction = 1.0

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class Granted:
    """The auxiliary samples that the server is granted, equally many of each class as far as the data reach."""

    name: str | None = None  # another data set than the client's
    stand_in: str | None = None
    part: Literal["train", "test", "all", "rest"] = "test"  # rest: of the client's own part, what is not in the batch
    per_class: PositiveInt | None = None
    total: PositiveInt | None = None  # where `per_class` is not given, spread over the classes

    def __post_init__(self) -> None:
        check_fields(self)
        if (self.per_class is None) == (self.total is None):
            raise OptionError("", "expected either per_class or total")


@dataclass(frozen=True, kw_only=True)
class RowData:
    """Which images a row draws its private batches from, and how."""

    name: str
    stand_in: str | None = None  # a bundled set that replaces it where the data folder lacks it; the result says so
    part: Literal["train", "test", "all"] = "train"
    size: PositiveInt | None = None
    channels: PositiveInt | None = None
    batch_size: PositiveInt
    sampler: Sampler = field(default_factory=Random)
    softening: Softening | None = None
    auxiliary: Granted | None = None
    normalization: Normalization = field(default_factory=Normalization)
    relabelled: PositiveInt | None = None  # random labels from this many of the model's classes replace the true ones
    trained_on: PositiveInt | None = None  # a model with epochs is trained on this many images alone

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class Targets:
    """The target samples of an active attack, in a batch whose other samples have other classes."""

    count: PositiveInt
    classes: Literal["one", "own"] = "one"  # one class for all target samples, or a class of its own for each

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One setting, the methods run in it, and what the paper printed for them."""

    name: str
    model: ModelConfig
    data: RowData
    methods: dict[str, Measurement]  # by the column's name
    published: dict[str, dict[str, float]]  # column -> quantity -> number
    studies: dict[str, Study] = field(default_factory=dict)  # by the column's name: what is shown of the client itself
    show: tuple[str, ...] = ()  # quantities measured for every column, published or not
    repeats: PositiveInt
    tolerance: NonNegativeFloat  # what still counts as reproduced, for quantities between 0 and 1
    factor: PositiveFloat = 10.0  # the same for errors, which are compared by their ratio
    targets: Targets | None = None  # their classes, drawn for each batch, replace the `targets` of a method
    one_model: bool = False  # one model, drawn from its own seed, and one auxiliary set for all batches
    backbone: str | None = None  # weights of all layers but the head, which stays as it was drawn
    decoder: DecoderSettings | None = None  # of a decoder trained on the auxiliary images, for attacks that decode features
    foreign: bool = False  # add the null of the same attack on another batch's gradient
    reference: NonNegativeInt = 0  # images outside the batch for the nulls, where the server has no auxiliary images
    departures: tuple[str, ...] = ()
    optional: bool = False  # left out where its weights are not at hand
    skip: str = ""  # why the row is left out

    @property
    def columns(self) -> tuple[str, ...]:
        return (*self.methods, *self.studies)


@dataclass(frozen=True, kw_only=True)
class Law:
    """What a figure shows where no number is printed: a bound, an order along the rows, or a column that beats others."""

    says: str
    quantity: str
    column: str
    rows: str = "*"  # a pattern of row names
    at_least: float | None = None
    at_most: float | None = None
    order: Literal["rising", "falling"] | None = None  # along the rows as they are listed
    above: tuple[str, ...] = ()  # columns that this column beats in every row
    slack: NonNegativeFloat = 0.0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.at_least is None and self.at_most is None and self.order is None and not self.above:
            raise OptionError("", "expected one of at_least, at_most, order or above")


@dataclass(frozen=True, kw_only=True)
class Table:
    """A whole table in one profile."""

    key: str  # paper/table
    title: str
    source: str
    published: str  # what the printed numbers are
    departures: tuple[str, ...]
    rows: tuple[Row, ...]
    laws: tuple[Law, ...]
    profile: Literal["full", "quick"]
    seed: int = 0


def table_files() -> dict[str, Path]:
    """The file of every table, by its key `paper/table`."""
    files: dict[str, Path] = {}
    for folder in FOLDERS:
        for file in sorted(folder.glob("*/*.toml")):
            files.setdefault(f"{file.parent.name}/{file.stem}", file)
    return files


def summaries() -> list[dict[str, str]]:
    """The key, title and source of each table. No table at all is an error, since tables come with the package."""
    if not table_files():
        raise FileNotFoundError(f"no tables, <paper>/<table>.toml, in {_search_path()}")
    contents = {key: read_toml(file) for key, file in table_files().items()}
    return [{"table": key, "title": data.get("title", key), "source": data.get("source", "")} for key, data in contents.items()]


def read_table(key: str, *, quick: bool = False) -> Table:
    """The table of a key, which comes with the installation, or of the user's own file, whose path ends in .toml."""
    files = table_files()
    path = files.get(key) or Path(key)
    if key not in files and not (path.suffix == ".toml" and path.is_file()):
        raise FileNotFoundError(f"{key}: no such table; {_there_is(key, list(files))}")
    try:
        return parse_table(read_toml(path), key if key in files else f"{path.resolve().parent.name or 'own'}/{path.stem}", quick=quick)
    except OptionError as error:
        raise OptionError(f"{path}: {error.path}", error.problem) from None


def _there_is(key: str, tables: list[str]) -> str:
    """The tables of the paper that a key names, or the papers."""
    if not tables:
        return f"there are none in {_search_path()}"
    near = [table for table in tables if table.split("/")[0] == key.split("/")[0]]
    if near:
        return f"there are: {', '.join(near)}"
    papers = dict.fromkeys(table.split("/")[0] for table in tables)
    return f"there are tables of {', '.join(papers)}, such as {tables[0]}; `dosimeter reproduce` lists them"


def parse_table(data: dict[str, Any], key: str, *, quick: bool = False) -> Table:
    """The table that TOML data describe. A row's own keys override the defaults; in the quick profile the quick keys override both."""
    data = copy.deepcopy(data)
    short, laws = data.pop("quick", {}), data.pop("laws", [])
    defaults, rows = data.pop("defaults", {}), data.pop("rows", [])
    known = {"title", "source", "published", "departures", "seed"}
    if unknown := sorted(data.keys() - known):
        raise OptionError(unknown[0], f"no such key in {key}; keys are: {', '.join(sorted(known))}, defaults, quick, rows, laws")
    if not rows or not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise OptionError("rows", f"expected [[rows]] tables in {key}, got {'none' if not rows else type(rows).__name__}")
    for name, value in (("quick", short), ("defaults", defaults)):
        check_value(dict[str, Any], value, name)
    check_value(list[dict[str, Any]], laws, "laws")
    for name, kind in (("title", str), ("source", str), ("published", str), ("departures", list[str]), ("seed", int)):
        check_value(kind, data.get(name, kind()), name)
    check_value(list[str], short.get("departures", []), "quick.departures")
    departures = [*data.get("departures", []), *(short.pop("departures", []) if quick else [])]
    built: list[Row] = []
    for position, own in enumerate(rows):
        own_short = check_value(dict[str, Any], own.pop("quick", {}), f"rows[{position}].quick")
        for table, path in ((own, f"rows[{position}]"), (own_short, f"rows[{position}].quick")):
            check_value(list[str], table.get("departures", []), f"{path}.departures")
        merged = _merge(_merge(defaults, own), _merge(short, own_short)) if quick else _merge(defaults, own)
        merged["departures"] = [*own.get("departures", []), *(own_short.get("departures", []) if quick else [])]
        built += [_row(varied, f"rows[{position}]") for varied in _expand_variants(merged, f"rows[{position}]")]
    return Table(
        key=key,
        title=data.get("title", key),
        source=data.get("source", ""),
        published=data.get("published", ""),
        departures=tuple(departures),
        rows=tuple(built),
        laws=tuple(construct(Law, law, f"laws[{position}]") for position, law in enumerate(laws)),
        profile="quick" if quick else "full",
        seed=data.get("seed", 0),
    )


def _row(data: dict[str, Any], path: str) -> Row:
    methods = check_value(dict[str, dict[str, Any]], data.pop("methods", {}), f"{path}.methods")
    studies = check_value(dict[str, Any], data.pop("studies", {}), f"{path}.studies")
    setting = check_value(dict[str, Any], data.pop("setting", {}), f"{path}.setting")
    known = {**methods, **studies}
    wanted = check_value(list[str], data.pop("columns", list(known)), f"{path}.columns")
    check_value(Published, data.get("published", {}), f"{path}.published")
    if twice := sorted(methods.keys() & studies.keys()):
        raise OptionError(f"{path}.studies.{twice[0]}", "is the name of a method's column too")
    if strangers := sorted({*wanted, *data.get("published", {})} - known.keys()):
        raise OptionError(f"{path}.methods", f"no column {strangers[0]!r}; there are: {', '.join(known)}")
    chosen = {column: _merge(setting, methods[column]) for column in wanted if column in methods}
    data["methods"] = {column: construct(Measurement, settings, f"{path}.methods.{column}") for column, settings in chosen.items()}
    data["studies"] = {column: studies[column] for column in wanted if column in studies}
    data["published"] = {column: numbers for column, numbers in data.get("published", {}).items() if column in wanted}
    return construct(Row, data, path)


def _expand_variants(data: dict[str, Any], path: str) -> list[dict[str, Any]]:
    """One row for each value of `vary = {"dotted.key" = [...]}`, or for those in `keep`. A list of published numbers has one a row."""
    vary, keep = data.pop("vary", None), data.pop("keep", None)
    if vary is None:
        return [data]
    check_value(dict[str, list[Any]], vary, f"{path}.vary")
    check_value(Published, data.get("published", {}), f"{path}.published")
    if len(vary) != 1 or not isinstance(keep, (list, type(None))):
        raise OptionError(f"{path}.vary", "expected one key with a list of values, and `keep` as a list")
    ((key, values),) = vary.items()
    for column, quantities in data.get("published", {}).items():
        for quantity, numbers in quantities.items():
            if isinstance(numbers, list) and len(numbers) != len(values):
                raise OptionError(f"{path}.published.{column}.{quantity}", f"expected {len(values)} numbers, got {len(numbers)}")
    rows = []
    for position, value in enumerate(values):
        word = _word(value)
        if keep is not None and word not in keep:
            continue
        row = copy.deepcopy(data)
        _set(row, key.split("."), value)
        row["name"] = f"{data.get('name', '')}, {key.rpartition('.')[2].replace('_', ' ')} {word}".lstrip(", ")
        row["published"] = {
            column: {quantity: numbers[position] if isinstance(numbers, list) else numbers for quantity, numbers in quantities.items()}
            for column, quantities in row.get("published", {}).items()
        }
        rows.append(row)
    return rows


def _word(value: Any) -> Any:
    """A value as it stands in a row's name: a table as its name and options, a list as its members."""
    if isinstance(value, dict):
        return " ".join(str(part) for key, item in value.items() for part in ((item,) if key == "name" else (key, item)))
    return " and ".join(str(_word(item)) for item in value) or "none" if isinstance(value, list) else value


def _set(table: dict[str, Any], keys: list[str], value: Any) -> None:
    for key in keys[:-1]:
        table = table.setdefault(key, {})
        if not isinstance(table, dict):
            raise OptionError(key, f"is not a table, so {keys[-1]!r} cannot be varied in it")
    table[keys[-1]] = value


def _merge(below: Any, above: Any) -> Any:
    """Tables merged key by key, `above` winning."""
    if not isinstance(below, dict) or not isinstance(above, dict):
        return copy.deepcopy(above)
    result = copy.deepcopy(below)
    for key, value in above.items():
        result[key] = _merge(result[key], value) if key in result else copy.deepcopy(value)
    return result


def _search_path() -> str:
    return " or ".join(str(folder) for folder in FOLDERS)
