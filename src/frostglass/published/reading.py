"""Reads the papers' tables, which ship with the package, and checks them against their schema."""

import csv
import io
import math
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from frostglass.core.errors import ConfigError, DataError
from frostglass.core.parameters import problems
from frostglass.core.registry import nearest
from frostglass.published.metrics import METRICS

FOLDER = resources.files("frostglass.published")
PAPERS = ("advlearn", "bido", "calor", "crafter", "tldmi")
Kind = Literal[
    "attacks", "features", "accuracy", "robustness", "analysis", "settings", "time", "study"
]
M = TypeVar("M", bound=BaseModel)
WORLD = ("attack", "dataset_private", "dataset_public", "pretrain", "architecture")


class Part(BaseModel):
    """How rows of a table are made: the small world and the published configs.

    Args:
        where: rows with these values, or one of these values, in columns of the table.
        world: of the small scale. changes: settings on top of it.
        configs: published settings. published_changes: settings on top of them.
        case: the attack, where the table's own column does not say it.
        strengths: by defense, where the table's own column does not say them.
        seeds: how many trainings of each model.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    where: Mapping[str, str | list[str]] = {}
    world: str
    changes: Mapping[str, Any] = {}
    configs: list[str] = Field(min_length=1)
    published_changes: Mapping[str, Any] = {}
    case: str = ""
    strengths: Mapping[str, str] = {}
    seeds: Annotated[int, Field(ge=1)] = 1


class Entry(BaseModel):
    """What the package says about a table; one with nothing to run says why."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    number: str = Field(min_length=1)
    kind: Kind
    cells: Annotated[int, Field(ge=1)]
    about: str = Field(min_length=1)
    repeats: bool = False  # cells are repeated measurements of the same thing
    nothing: str = ""
    left_out: list[str] = []
    parts: list[Part] = []

    @model_validator(mode="after")
    def _can_be_run_or_says_why_not(self) -> "Entry":
        if bool(self.nothing) == bool(self.parts):
            raise ValueError("expected either parts or nothing")
        return self


class Paper(BaseModel):
    """A paper: its short name, where it appeared, and its tables."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: str = Field(min_length=1)
    source: str = Field(min_length=1)
    tables: Mapping[str, Entry] = Field(min_length=1)


class Cell(BaseModel):
    """One published number; `note` says what is doubtful about it."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    paper: str = Field(min_length=1)
    table: str = Field(min_length=1)
    attack: str
    dataset_private: str
    dataset_public: str
    pretrain: str
    architecture: str
    defense: str
    setting: str
    metric: str = Field(min_length=1)
    value: float | str | None
    std: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None
    unit: str
    note: str


@dataclass(frozen=True)
class Row:
    """One line of a table: a defense in a world under an attack, and its numbers by metric."""

    attack: str
    dataset_private: str
    dataset_public: str
    pretrain: str
    architecture: str
    defense: str
    setting: str
    cells: Mapping[str, Cell]

    @property
    def title(self) -> str:
        """Defense and strength."""
        return " ".join(filter(None, (self.defense, self.setting)))

    def value(self, metric: str) -> float | None:
        """Return a number of this row, if it has it."""
        cell = self.cells.get(metric)
        return cell.value if cell and isinstance(cell.value, float) else None


@dataclass(frozen=True)
class Table:
    """A published table, with its source and how it can be run."""

    name: str
    paper: Paper
    entry: Entry
    cells: tuple[Cell, ...]

    @property
    def source(self) -> str:
        """Paper and number of the table."""
        return f"{self.paper.source}: {self.entry.number}"

    @property
    def metrics(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(cell.metric for cell in self.cells))

    @property
    def notes(self) -> dict[str, list[Cell]]:
        """What is ambiguous, and about which cells."""
        noted: dict[str, list[Cell]] = {}
        for cell in self.cells:
            if cell.note:
                noted.setdefault(cell.note, []).append(cell)
        return noted

    def rows(self, where: Mapping[str, str | list[str]] | None = None) -> list[Row]:
        """Return the lines of the table, or those with these values in columns."""
        grouped: dict[tuple[str, ...], dict[str, Cell]] = {}
        for cell in self.cells:
            if all(_matches(getattr(cell, name), value) for name, value in (where or {}).items()):
                key = tuple(getattr(cell, name) for name in (*WORLD, "defense", "setting"))
                grouped.setdefault(key, {}).setdefault(cell.metric, cell)
        return [_row(key, cells) for key, cells in grouped.items()]


def _row(key: tuple[str, ...], cells: Mapping[str, Cell]) -> Row:
    named: dict[str, Any] = dict(zip((*WORLD, "defense", "setting"), key, strict=True))
    return Row(**named, cells=cells)


def _matches(value: str, wanted: str | list[str]) -> bool:
    return value == wanted if isinstance(wanted, str) else value in wanted


@cache
def paper(key: str) -> Paper:
    """Return a paper by its key, such as "bido"."""
    if key not in PAPERS:
        raise ConfigError(f"no paper named {key!r}: {nearest(key, PAPERS)}")
    text = FOLDER.joinpath("papers", f"{key}.toml").read_text(encoding="utf-8")
    return _checked(Paper, tomllib.loads(text), f"papers/{key}.toml")


@cache
def names() -> tuple[str, ...]:
    """Return the names of all tables, paper by paper."""
    return tuple(name for key in PAPERS for name in paper(key).tables)


def tables() -> Iterator[Table]:
    """Yield every published table."""
    return map(table, names())


@cache
def table(name: str) -> Table:
    """Return a published table by its name, such as "bido-table3"."""
    if name not in names():
        raise ConfigError(f"no published table named {name!r}: {nearest(name.lower(), names())}")
    key = name.partition("-")[0]
    entry = paper(key).tables[name]
    text = FOLDER.joinpath("data", f"{name}.csv").read_text(encoding="utf-8")
    return Table(name, paper(key), entry, parse_cells(text, name, key, entry))


def parse_cells(text: str, name: str, key: str, entry: Entry) -> tuple[Cell, ...]:
    """Parse a table and check it against its schema; raises DataError."""
    reader = csv.DictReader(io.StringIO(text, newline=""))
    columns = list(Cell.model_fields)
    if reader.fieldnames != columns:
        raise DataError(f"table {name}: expected the columns {columns}, got {reader.fieldnames}")
    cells = []
    for line, row in enumerate(reader, 2):
        values = dict(row) | {"value": _number(row["value"]), "std": _number(row["std"])}
        cell = _checked(Cell, values, f"table {name}, line {line}")
        if problem := _problem(cell, key, entry):
            raise DataError(f"table {name}, line {line}: {problem}")
        cells.append(cell)
    if len(cells) != entry.cells:
        raise DataError(f"table {name}: expected {entry.cells} cells, got {len(cells)}")
    places = [tuple(getattr(c, n) for n in columns if n not in _MEASURED) for c in cells]
    if not entry.repeats and len(set(places)) < len(places):
        twice = next(place for place in places if places.count(place) > 1)
        raise DataError(f"table {name}: two cells for {', '.join(filter(None, twice))}")
    return tuple(cells)


_MEASURED = ("value", "std", "unit", "note")


def _problem(cell: Cell, key: str, entry: Entry) -> str:
    """Say what is wrong with a cell; "" if nothing is."""
    if cell.paper != key:
        return f"expected paper {key!r}, got {cell.paper!r}"
    if entry.kind == "settings":
        return ""
    if cell.metric not in METRICS:
        return f"metric: {nearest(cell.metric, METRICS)}; got {cell.metric!r}"
    if cell.unit != METRICS[cell.metric].unit:
        return f"{cell.metric}: expected unit {METRICS[cell.metric].unit!r}, got {cell.unit!r}"
    if isinstance(cell.value, str) or (cell.value is None and not cell.note):
        return f"{cell.metric}: expected a number, or a note why there is none, got {cell.value!r}"
    if cell.unit == "percent" and cell.value is not None and not 0 <= cell.value <= 100:
        return f"{cell.metric}: expected 0 to 100 percent, got {cell.value}"
    return ""


def _number(text: str | None) -> float | str | None:
    """Return a cell's number; what is no finite number stays text, an empty cell is None."""
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        return text
    return value if math.isfinite(value) else text


def _checked(model: type[M], values: Any, where: str) -> M:
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise DataError(f"{where}: {problems(error)[0]}") from None
