"""Builds the grid of a published table: small, from a world of the package, or as published."""

import copy
import json
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from frostglass.auditing.config_file import read_config
from frostglass.auditing.expand import assign, expand
from frostglass.core.errors import ConfigError
from frostglass.core.registry import nearest
from frostglass.defenses.base import defenses as registry
from frostglass.published.reading import FOLDER, Part, Row, Table
from frostglass.published.strengths import Method, published_methods, small_methods
from frostglass.report.seeds import without_seed

Scale = Literal["small", "published"]
SCALES: tuple[Scale, ...] = ("small", "published")
ATTACKS = {
    "KEDMI": "KED-MI",
    "BREPMI": "BREP-MI",
    "MIRROR": "Mirror",
    "LOMMA": "LOMMA on KED-MI",
    "LOMMA+GMI": "LOMMA on GMI",
    "LOMMA+KED-MI": "LOMMA on KED-MI",
    "white-box (GAN latent)": "white box",
    "black-box (decoder)": "black box",
}
Settings = dict[str, Any]


@dataclass(frozen=True)
class Grid:
    """Settings that can be run, and the rows of the table by the label of their audits.

    `world` says which data stands for the published one; "" at the published scale. `config` is
    the file that the settings come from, if it is one. `missing` are rows without an experiment.
    """

    settings: Settings
    rows: Mapping[str, tuple[Row, ...]]
    part: Part
    seeds: int = 1
    world: str = ""
    config: Path | None = None
    missing: tuple[str, ...] = ()

    @property
    def runs(self) -> list[Settings]:
        """The configs to run: audits of features cannot differ in their seed within one."""
        if "seed" in self.settings["grid"]:
            return [self.settings]
        return [self.settings | {"seed": seed} for seed in range(self.seeds)]


def grids(
    table: Table, scale: str, *, seeds: int | None = None, configs: Path | None = None
) -> list[Grid]:
    """Return the grids of a published table; raises ConfigError if there is nothing to run.

    `configs` is the folder of published settings, by default that of the source tree.
    """
    if scale not in SCALES:
        raise ConfigError(f"--scale: expected small or published, got {scale!r}")
    if table.entry.nothing:
        raise ConfigError(f"{table.name} has nothing to run: {table.entry.nothing}")
    parts = table.entry.parts
    built = [
        grid
        for part in parts
        for grid in (
            [_small(table, part, seeds)]
            if scale == "small"
            else _published(table, part, seeds, configs_folder(configs))
        )
    ]
    for number, grid in enumerate(built, 1):
        suffix = f"-{number}" if len(built) > 1 else ""
        grid.settings["name"] = f"{table.name}-{scale}{suffix}"
    return built


def part_of(built: list[Grid], number: int | None) -> list[Grid]:
    """Return the grid with this number, from 1 on; all without one."""
    if number is None:
        return built
    if not 1 <= number <= len(built):
        raise ConfigError(f"--part: expected 1 to {len(built)}, got {number}")
    return [built[number - 1]]


def configs_folder(given: Path | None) -> Path:
    """Return the folder of published settings; a wheel does not have it."""
    folder = given or Path(__file__).resolve().parents[3] / "configs"
    if not (folder / "celeba").is_dir():
        raise ConfigError(
            "published settings are in the folder `configs` of the source tree, which "
            f"{folder} is not: give it with --configs"
        )
    return folder


@cache
def _world(name: str) -> Mapping[str, Any]:
    text = FOLDER.joinpath("worlds", f"{name}.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def attack_of(row: Row, part: Part) -> str:
    """Return the name of a row's attack in worlds and configs; "" in tables of accuracy."""
    return part.case or ATTACKS.get(row.attack, row.attack)


def _rows(table: Table, part: Part) -> list[Row]:
    """Return the rows that are attacked; utility alone is no row of its own."""
    rows = table.rows(part.where)
    attacked = [row for row in rows if row.attack]
    return attacked or rows


def _small(table: Table, part: Part, seeds: int | None) -> Grid:
    world = _world(part.world)
    settings = copy.deepcopy(dict(world["settings"]))
    rows = _rows(table, part)
    chosen = _chosen(world["cases"], _names(rows, part), part.world)
    _change(settings, chosen, part.changes)
    wanted = [
        (
            row,
            small_methods(
                row.defense,
                part.strengths.get(row.defense, row.setting),
                world.get("strengths", {}),
                world.get("defenses", {}),
            ),
        )
        for row in rows
    ]
    count = seeds or part.seeds
    settings = _with_grid(settings, chosen, [methods for _, methods in wanted], count)
    return Grid(settings, _labels(settings, wanted, part), part, count, world["about"])


def _names(rows: Sequence[Row], part: Part) -> list[str]:
    return list(dict.fromkeys(attack_of(row, part) for row in rows))


def _chosen(cases: Iterable[Settings], names: Sequence[str], place: str) -> list[Settings]:
    """Return copies of the named cases; for accuracy alone any attack will do."""
    known = {case["case"]: case for case in cases}
    if names == [""]:
        names = list(known)[:1]
    if missing := [name for name in names if name not in known]:
        raise ConfigError(f"{place} has no attack {missing[0]!r}: {nearest(missing[0], known)}")
    return [copy.deepcopy(known[name]) for name in names]


def _change(settings: Settings, cases: Sequence[Settings], changes: Mapping[str, Any]) -> None:
    """Apply nested changes; those of the attack go to every case, which has its own."""
    for path, value in _flat(changes):
        for place in cases if path.startswith("attack.") else [settings]:
            assign(place, path, copy.deepcopy(value))


def _flat(changes: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the values of sections by dotted path."""
    return [
        (f"{section}.{name}", value) if name else (section, value)
        for section, values in changes.items()
        for name, value in (values.items() if isinstance(values, Mapping) else [("", values)])
    ]


def _with_grid(
    settings: Settings, cases: Sequence[Settings], methods: Sequence[list[Method]], seeds: int
) -> Settings:
    """Return settings with a grid of these attacks and defenses; each defense once."""
    unique = {json.dumps(each, sort_keys=True): each for each in methods}
    # A section that every case has is an error beside them.
    for section in ("prior", "attack"):
        if all(section in case for case in cases):
            settings.pop(section, None)
    grid: Settings = {"defenses": list(unique.values()), "case": list(cases)}
    if seeds > 1 and not settings.get("target", {}).get("cut"):
        settings.pop("seed", None)
        grid["seed"] = list(range(seeds))
    return settings | {"grid": grid}


def _labels(
    settings: Settings, wanted: Sequence[tuple[Row, list[Method]]], part: Part
) -> dict[str, tuple[Row, ...]]:
    """Return the rows of each audit by its label without a seed."""
    rows: dict[str, tuple[Row, ...]] = {}
    for label, config in expand(settings):
        rows[without_seed(label, config.get("seed"))] = tuple(
            row
            for row, methods in wanted
            if methods == config["defenses"] and attack_of(row, part) in ("", config["case"])
        )
    return {label: found for label, found in rows.items() if found}


@dataclass(frozen=True)
class _Config:
    """A file of published settings, taken apart."""

    path: Path
    settings: Settings
    cases: Mapping[str, Settings]
    defenses: Sequence[list[Method]]


def _take_apart(path: Path, part: Part, attack: str) -> _Config:
    """Read a config; one with a single attack has it as a case named `attack`."""
    settings = read_config(path)
    grid = settings.pop("grid", {})
    cases = {case["case"]: case for case in grid.get("case", [])}
    if not cases:
        single = {name: settings.pop(name) for name in ("prior", "attack") if name in settings}
        cases = {attack: {"case": attack or str(single["attack"]["name"]), **single}}
    _change(settings, list(cases.values()), part.published_changes)
    return _Config(path, settings, cases, grid.get("defenses", [[]]))


def _published(table: Table, part: Part, seeds: int | None, folder: Path) -> list[Grid]:
    rows = _rows(table, part)
    first = attack_of(rows[0], part)
    files = [_take_apart(folder / f"{name}.toml", part, first) for name in part.configs]
    # An attack that only one of the files has is used with all of them.
    cases = {name: case for file in reversed(files) for name, case in file.cases.items()}
    missing = [name for name in _names(rows, part) if name and name not in cases]
    lacking = tuple(f"{name}: no config of this table has this attack" for name in missing)
    rows = [row for row in rows if attack_of(row, part) not in missing]
    placed: dict[Path, list[tuple[Row, list[Method]]]] = {}
    for row in rows:
        methods = published_methods(row.defense, part.strengths.get(row.defense, row.setting))
        file, entry = _find(files, methods)
        placed.setdefault(file.path, []).append((row, entry))
    built = []
    for file in files:
        if wanted := placed.get(file.path):
            names = _names([row for row, _ in wanted], part)
            chosen = _chosen(
                (file.cases if names == [""] else cases).values(), names, str(file.path)
            )
            count = seeds or part.seeds
            settings = _with_grid(file.settings, chosen, [entry for _, entry in wanted], count)
            labels = _labels(settings, wanted, part)
            built.append(Grid(settings, labels, part, count, config=file.path, missing=lacking))
            lacking = ()
    return built


def _find(files: Sequence[_Config], methods: list[Method]) -> tuple[_Config, list[Method]]:
    """Return the config, and its entry, that has these defenses; else they are added to the first.

    An entry with the same methods and other parameters is taken if it is the only one: a config
    may state a strength in other terms than the table.
    """
    for fits in (_has_parameters, _has_names):
        for file in files:
            entries = [entry for entry in file.defenses if fits(entry, methods)]
            if entries and (fits is _has_parameters or len(entries) == 1):
                return file, entries[0]
    return files[0], methods


def _has_names(entry: Sequence[Method], methods: Sequence[Method]) -> bool:
    # A stated rank, weight or step size is never replaced by another.
    terms = {"name", "measure", "a", "boundary", "parameters"}
    return [each["name"] for each in entry] == [each["name"] for each in methods] and all(
        set(method) <= terms for method in methods
    )


def _has_parameters(entry: Sequence[Method], methods: Sequence[Method]) -> bool:
    if [each["name"] for each in entry] != [each["name"] for each in methods]:
        return False
    return all(
        all(
            getattr(registry.build(each), name) == value
            for name, value in method.items()
            if name not in ("name", "variant")
        )
        for each, method in zip(entry, methods, strict=True)
    )


def preparation(config: Path) -> str:
    """Return what the comment at the top of a config says about its images and weights."""
    lines = config.read_text(encoding="utf-8").splitlines()
    end = next((n for n, line in enumerate(lines) if not line.startswith("#")), len(lines))
    text = "\n".join(line.removeprefix("#").strip() for line in lines[:end])
    # A topic starts a line; what follows belongs to it until the next one.
    topics = re.split(r"\n(?=[A-Z][\w' ]{2,40}:)", text)
    wanted = [topic for topic in topics if re.match(r"(Images|Weights|Generator)\b", topic)]
    return " ".join(" ".join(wanted).split())
