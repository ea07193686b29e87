"""Expands a config with a [grid] into one plain config per combination of its values."""

import copy
import itertools
from collections.abc import Mapping
from typing import Any

from frostglass.core.errors import ConfigError
from frostglass.core.method import Method

NO_GRID = "audit"  # the label of an experiment without a grid
# Names of models without a defense: one that was given, one trained here, the positive control.
GIVEN, UNDEFENDED, CONTROL = "given model", "undefended", "undefended control"


def expand(values: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return (label, plain config) for each combination of the values listed in [grid]."""
    plain = {key: value for key, value in values.items() if key != "grid"}
    grid = flat_grid(values.get("grid", {}))
    _check(plain, grid)
    configs = []
    for combination in itertools.product(*grid.values()):
        chosen = dict(zip(grid, combination, strict=True))
        # First: a case that came later would replace tables in which other values were set.
        config = merge(plain, chosen.get("case", {}))
        for path, value in chosen.items():
            if path != "case":
                assign(config, path, copy.deepcopy(value))
        given = _is_given(config.get("target"))
        label = ", ".join(_label(path, value, grid[path], given) for path, value in chosen.items())
        configs.append((label or NO_GRID, config))
    return configs


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge tables value by value, `above` first; a method's table is replaced as a whole."""
    merged = copy.deepcopy({**below, **above})
    for key, value in above.items():
        if isinstance(below.get(key), Mapping) and not _is_whole(value):
            merged[key] = merge(below[key], value)
    return merged


def _check(plain: Mapping[str, Any], grid: Any) -> None:
    """Refuse a grid that is malformed, or that sets a value in two places."""
    if not isinstance(grid, Mapping) or not all(
        isinstance(choices, list) and choices for choices in grid.values()
    ):
        raise ConfigError(
            "grid: expected a table of non-empty lists, for example grid.seed = [0, 1], "
            "or [[grid.case]] with two brackets"
        )
    if "defenses" in plain and "defenses" in grid:
        raise ConfigError("defenses: set both alone and in [grid]: remove one of the two")
    cases = [_case(value) for value in grid.get("case", [])]
    ignored = [key for key in plain if cases and all(_is_whole(case.get(key)) for case in cases)]
    if ignored:
        raise ConfigError([
            f"{key}: set alone, and every case of the grid sets its own: set grid.case.0.{key} "
            "and so on instead"
            for key in ignored
        ])  # fmt: skip
    names = [case["case"] for case in cases]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"grid.case: two cases are named {repeated[0]!r}: rename one")
    if both := sorted({path for path in grid for case in cases if path != "case" and path in case}):
        raise ConfigError(f"{both[0]}: set both in [grid] and in a case: remove one of the two")


def flat_grid(grid: Any) -> Any:
    """Return nested tables with dotted names: grid.attack.loss is "attack.loss" in [grid]."""
    if not isinstance(grid, Mapping):
        return grid
    flat: dict[str, Any] = {}
    for name, value in grid.items():
        inner = flat_grid(value)
        if isinstance(inner, Mapping):
            flat |= {f"{name}.{path}": choices for path, choices in inner.items()}
        else:
            flat[name] = inner
    return flat


def _case(value: Any) -> Mapping[str, Any]:
    """Check an entry of grid.case: a name, and sections that belong together under it."""
    if isinstance(value, Mapping) and isinstance(value.get("case"), str) and value["case"]:
        return value
    got = f"one without a name ({', '.join(value)})" if isinstance(value, Mapping) else repr(value)
    raise ConfigError(
        'grid.case: expected tables with a name, such as { case = "KED-MI", prior = { ... }, '
        f"attack = {{ ... }} }}, got {got}"
    )


def _is_whole(value: Any) -> bool:
    """Whether a value replaces another: a method's table has a name, others are merged."""
    return value is not None and not (isinstance(value, Mapping) and "name" not in value)


def _is_given(target: Any) -> bool:
    """Whether the plain values of a target name weights to load."""
    return isinstance(target, Mapping) and bool(target.get("weights"))


def _label(path: str, value: Any, choices: list[Any], given: bool) -> str:
    if path == "case":
        return str(value["case"])
    if path != "defenses":
        return f"{path}={value}"
    if value == []:
        return GIVEN if given else UNDEFENDED
    names = [defense_names(choice, full=False) for choice in choices]
    return defense_names(value, full=names.count(defense_names(value, full=False)) > 1)


def defense_names(value: Any, *, full: bool) -> str:
    """Name a list of defenses, with parameters where names alone do not differ in a grid."""
    if not isinstance(value, list):
        return str(value)  # parsing reports it
    return " + ".join(_defense_name(defense, full=full) for defense in value)


def _defense_name(defense: Any, *, full: bool) -> str:
    if isinstance(defense, Method):
        return repr(defense) if full else defense.name
    if not isinstance(defense, Mapping) or "name" not in defense:
        return str(defense)  # parsing reports it
    given = ", ".join(f"{key}={value}" for key, value in defense.items() if key != "name")
    return f"{defense['name']}({given})" if full and given else str(defense["name"])


def assign(config: dict[str, Any], path: str, value: Any) -> None:
    """Set `a.b.c` in nested tables, creating tables on the way; a number indexes a list."""
    *parents, last = path.split(".")
    place: Any = config
    for part in parents:
        place = _item(place, part, path) if isinstance(place, list) else place.setdefault(part, {})
        if not isinstance(place, dict | list):
            raise ConfigError(f"{path}: {part!r} is a value, not a table")
    if isinstance(place, list):
        _item(place, last, path)
        place[int(last)] = value
    else:
        place[last] = value


def _item(place: list[Any], part: str, path: str) -> Any:
    if not part.isdecimal() or int(part) >= len(place):
        raise ConfigError(f"{path}: expected a list index below {len(place)}, got {part!r}")
    return place[int(part)]
