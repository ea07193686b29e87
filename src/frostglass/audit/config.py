"""An experiment is a frozen set of plain values, read from TOML, every problem reported at once."""

import copy
import itertools
import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field

from frostglass.attacks.base import Attack, attacks
from frostglass.core.errors import ConfigError
from frostglass.core.parameters import parameters
from frostglass.core.registry import Registry, nearest
from frostglass.data.base import Dataset, datasets
from frostglass.defenses.base import Defense, defenses
from frostglass.defenses.compose import conflicts
from frostglass.metrics.base import Metric, metrics
from frostglass.priors.base import PriorMethod, priors
from frostglass.training.settings import Training

E = TypeVar("E")


@parameters
class Fractions:
    """Shares of each private identity's pictures: `test` held out for judging, `validation` for selecting epochs."""

    test: Annotated[float, Field(gt=0, lt=1)] = 0.2
    validation: Annotated[float, Field(gt=0, lt=1)] = 0.1

    def __post_init__(self) -> None:
        if self.test + self.validation >= 1:
            raise ValueError(
                f"test ({self.test}) and validation ({self.validation}) leave nothing to train on: their sum must be below 1"
            )


@parameters
class Judging:
    """What makes an audit believable.

    Args:
        identities: how many private people to attack, from the first on; all by default.
        margin: the positive control counts as broken when attack minus prior-only accuracy is, with 95 % confidence, above this.
        positive_control: attack an undefended model too, and call the audit vacuous if that fails.
    """

    identities: Annotated[int, Field(ge=2)] | None = None
    margin: Annotated[float, Field(ge=0, lt=1)] = 0.2
    positive_control: bool = True


@dataclass(frozen=True)
class Experiment:
    """One audit: data, target with defenses, evaluators, prior, attack and what is measured; `case` is what a grid calls its attack."""

    name: str
    case: str
    seed: int
    data: Dataset
    split: Fractions
    target: Training
    defenses: tuple[Defense, ...]
    evaluators: tuple[Training, ...]
    prior: PriorMethod
    attack: Attack
    metrics: tuple[Metric, ...]
    judging: Judging

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> "Experiment":
        """Build an experiment from nested plain values; raises one ConfigError that lists every problem."""
        reader = Reader(values)
        found = cls(
            name=reader.value("name", str, "audit"),
            case=reader.value("case", str, ""),
            seed=reader.value("seed", int, 0),
            data=reader.method("data", datasets, {"name": "faces"}),
            split=reader.section("split", Fractions),
            target=reader.section("target", Training),
            defenses=reader.methods("defenses", defenses, []),
            evaluators=reader.sections(
                "evaluators", Training, [{"model": "resnet"}, {"model": "convmixer"}]
            ),
            prior=reader.method("prior", priors, {"name": "wgan"}),
            attack=reader.method("attack", attacks, {"name": "gmi"}),
            metrics=reader.methods(
                "metrics",
                metrics,
                [{"name": "accuracy"}, {"name": "distance"}, {"name": "manifold"}],
            ),
            judging=reader.section("judging", Judging),
        )
        reader.problems += [
            f"defenses: {defense.name} acts on features that leave a device, and this target has no cut: set target.cut and target.attributes"
            for defense in found.defenses
            if defense is not None and defense.releases
        ]
        if None not in found.metrics and not any(
            metric.name == "accuracy" for metric in found.metrics
        ):
            reader.problems.append(
                'metrics: accuracy is needed, because the controls are judged by it: add { name = "accuracy" }'
            )
        reader.finish(
            {field.name for field in fields(cls)},
            [defense for defense in found.defenses if defense is not None],
        )
        return found


class Reader:
    """Reads sections one by one and remembers every problem with its place."""

    def __init__(self, values: Mapping[str, Any]):
        self.values = values
        self.problems: list[str] = []

    def value(self, key: str, kind: type, default: Any) -> Any:
        value = self.values.get(key, default)
        if not isinstance(value, kind) or isinstance(value, bool):
            self.problems.append(f"{key}: expected a {kind.__name__}, got {value!r}")
            return default
        return value

    def section(
        self, key: str, cls: Callable[..., Any], where: str = "", values: Any = None
    ) -> Any:
        values = self.values.get(key, {}) if values is None else values
        where = where or key
        if not isinstance(values, Mapping):
            self.problems.append(f"{where}: expected a table, got {values!r}")
            return None
        try:
            return cls(**values)
        except ConfigError as error:
            self.problems += [f"{where}.{_strip(problem)}" for problem in error.problems]
            return None

    def sections(
        self, key: str, cls: Callable[..., Any], default: Sequence[Any]
    ) -> tuple[Any, ...]:
        return tuple(
            self.section(key, cls, f"{key}[{i}]", values)
            for i, values in enumerate(self._list(key, default))
        )

    def method(
        self,
        key: str,
        registry: Registry,
        default: Mapping[str, Any],
        where: str = "",
        values: Any = None,
    ) -> Any:
        values = self.values.get(key, default) if values is None else values
        where = where or key
        if not isinstance(values, Mapping) or not isinstance(values.get("name"), str):
            self.problems.append(
                f"{where}: expected a table with a name, one of {', '.join(registry.names())}; got {values!r}"
            )
            return None
        try:
            cls = registry.get(values["name"])
        except ConfigError as error:
            self.problems.append(f"{where}.name: {error}")
            return None
        given = {name: value for name, value in values.items() if name != "name"}
        known = getattr(cls, "variants", {})
        if "variant" in given and known:
            variant = given.pop("variant")
            if not isinstance(variant, str) or variant not in known:
                self.problems.append(
                    f"{where}.variant: {values['name']} has no variant {variant!r}; {nearest(str(variant), known)}"
                )
                return None
            given = {**known[variant][1], **given}
        return self.section(key, cls, where, given)

    def methods(self, key: str, registry: Registry, default: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(
            self.method(key, registry, {}, f"{key}[{i}]", values)
            for i, values in enumerate(self._list(key, default))
        )

    def _list(self, key: str, default: Sequence[Any]) -> Sequence[Any]:
        values = self.values.get(key, default)
        if not isinstance(values, Sequence) or isinstance(values, str):
            self.problems.append(f"{key}: expected a list of tables, got {values!r}")
            return []
        if not values and default:
            self.problems.append(f"{key}: at least one is needed")
        return values

    def finish(self, known: set[str], chosen: Sequence[Defense]) -> None:
        """Look at what only the whole can tell, and raise every problem found."""
        if "grid" in self.values:
            self.problems.append(
                "grid: one experiment has none; read a config with a grid by frostglass.audit.config.experiments"
            )
        unknown = [key for key in self.values if key not in known | {"grid"}]
        self.problems += [
            f"{key}: no such section; {nearest(key, known | {'grid'})}" for key in unknown
        ]
        self.problems += [f"defenses: {problem}" for problem in conflicts(chosen)]
        target = self.values.get("target")
        if isinstance(target, Mapping) and target.get("weights"):
            self.problems += [
                f"defenses: {defense.name} acts on training, and target.weights are loaded without any: leave one of the two out"
                for defense in chosen
                if "head" not in defense.replaces() and not defense.releases
            ]
        if self.problems:
            raise ConfigError(list(dict.fromkeys(self.problems)))


def _strip(problem: str) -> str:
    """A parameter class puts its own name first ("Gmi: lr: ..."); in a config the section's name stands there instead."""
    return problem.split(": ", 1)[1] if ": " in problem else problem


def expand(values: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """A config with a [grid] as a list of (label, plain config): one for each combination of the listed values."""
    plain = {key: value for key, value in values.items() if key != "grid"}
    grid = _flat(values.get("grid", {}))
    if not isinstance(grid, Mapping) or not all(
        isinstance(choices, list) and choices for choices in grid.values()
    ):
        raise ConfigError(
            "grid: expected a table of non-empty lists, for example grid.seed = [0, 1], or [[grid.case]] with two brackets"
        )
    if "defenses" in plain and "defenses" in grid:
        raise ConfigError(
            "defenses: given alone and in [grid], and only one can count: leave one of the two out"
        )
    cases = [_case(value) for value in grid.get("case", [])]
    if lost := [
        key for key in plain if cases and all(_stands_alone(case.get(key)) for case in cases)
    ]:
        raise ConfigError(
            [
                f"{key}: given alone, and every case of the grid brings its own: set grid.case.0.{key} and so on instead"
                for key in lost
            ]
        )
    names = [case["case"] for case in cases]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(
            f"grid.case: two cases are named {twice[0]!r}: give each a name of its own"
        )
    if both := sorted({path for path in grid for case in cases if path != "case" and path in case}):
        raise ConfigError(
            f"{both[0]}: given in [grid] and in a case, and only one can count: leave one of the two out"
        )
    result = []
    for combination in itertools.product(*grid.values()):
        chosen = dict(zip(grid, combination, strict=True))
        config = _laid_over(
            plain, chosen.get("case", {})
        )  # first: a case that came later would replace tables other values were set in
        for path, value in chosen.items():
            if path != "case":
                assign(config, path, copy.deepcopy(value))
        label = ", ".join(_label(path, value, grid[path]) for path, value in chosen.items())
        result.append((label or "audit", config))
    return result


def _flat(grid: Any) -> Any:
    """Nested tables as dotted names: grid.attack.loss = [...] is what "attack.loss" = [...] inside [grid] is."""
    if not isinstance(grid, Mapping):
        return grid
    flat: dict[str, Any] = {}
    for name, value in grid.items():
        inner = _flat(value)
        flat |= (
            {f"{name}.{path}": choices for path, choices in inner.items()}
            if isinstance(inner, Mapping)
            else {name: inner}
        )
    return flat


def _case(value: Any) -> Mapping[str, Any]:
    """One entry of grid.case: a name, and the sections that belong together under it, such as an attack and its prior."""
    if (
        not isinstance(value, Mapping)
        or not isinstance(value.get("case"), str)
        or not value["case"]
    ):
        what = (
            f"one without a name ({', '.join(value)})"
            if isinstance(value, Mapping)
            else repr(value)
        )
        raise ConfigError(
            f'grid.case: expected tables with a name, such as {{ case = "KED-MI", prior = {{ ... }}, attack = {{ ... }} }}, got {what}'
        )
    return value


def _laid_over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Tables joined value by value, `above` first; a method's table, which has a name, stands alone: another's parameters would not fit it."""
    joined = copy.deepcopy({**below, **above})
    for key, value in above.items():
        if isinstance(below.get(key), Mapping) and not _stands_alone(value):
            joined[key] = _laid_over(below[key], value)
    return joined


def _stands_alone(value: Any) -> bool:
    return value is not None and not (isinstance(value, Mapping) and "name" not in value)


def _label(path: str, value: Any, choices: list[Any]) -> str:
    if path == "case":
        return str(_case(value)["case"])
    if path != "defenses":
        return f"{path}={value}"
    names = [_defense_names(choice, full=False) for choice in choices]
    return _defense_names(value, full=names.count(_defense_names(value, full=False)) > 1)


def _defense_names(value: Any, *, full: bool) -> str:
    """A list of defenses by name, with their parameters where the names alone do not tell the choices of a grid apart."""
    if not isinstance(value, list) or not all(
        isinstance(defense, Mapping) and "name" in defense for defense in value
    ):
        return str(value)  # not a list of defenses; parsing it will say so
    told = [", ".join(f"{k}={v}" for k, v in defense.items() if k != "name") for defense in value]
    return (
        " + ".join(
            f"{d['name']}({t})" if full and t else str(d["name"])
            for d, t in zip(value, told, strict=True)
        )
        or "undefended"
    )


def assign(config: dict[str, Any], path: str, value: Any) -> None:
    """Set `a.b.c` in nested tables, making tables on the way; a number in the path is a place in a list."""
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
    if not part.isdigit() or int(part) >= len(place):
        raise ConfigError(
            f"{path}: {part!r} should be a number below {len(place)}, a place in the list"
        )
    return place[int(part)]


def read_config(path: Path, settings: Sequence[str] = ()) -> dict[str, Any]:
    """A TOML file as plain values, with `a.b=value` settings (TOML values, or bare words as text) laid over it."""
    try:
        config = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"expected name=value, for example attack.steps=100; got {setting!r}")
        try:
            value = tomllib.loads(f"v = {text}")["v"]
        except tomllib.TOMLDecodeError:
            value = text
        assign(config, key.strip(), value)
    return config


def read_with_generator(
    path: Path,
    settings: Sequence[str],
    source: str | None,
    latent: str | None,
    span: str | None,
    *,
    resize: bool,
) -> dict[str, Any]:
    """`read_config` with a generator of the user's own, if one is given, in place of the config's prior."""
    values = read_config(
        path, [*generator_settings(source, latent, span, resize=resize), *settings]
    )
    cases = values.get("grid", {}).get("case", [])
    own = [str(case.get("case", number)) for number, case in enumerate(cases) if "prior" in case]
    if source is not None and own:
        raise ConfigError(
            f"--prior replaces the prior of the whole config, and its case {own[0]!r} brings its own: remove one of the two"
        )
    return values


def generator_settings(
    source: str | None, latent: str | None, span: str | None, *, resize: bool
) -> list[str]:
    """A generator of the user's own as a setting that replaces the config's [prior]; none where no source is given."""
    if source is None:
        others = [
            name
            for name, value in (("--latent", latent), ("--range", span), ("--resize", resize))
            if value
        ]
        if others:
            raise ConfigError(
                f"{others[0]} tells of a generator, and none is given: name it with --prior, such as --prior onnx:gen.onnx"
            )
        return []
    if latent is None:
        raise ConfigError(
            "--prior needs --latent: what the generator takes, such as --latent normal:512"
        )
    black, _, white = ("-1:1" if span is None else span).partition(":")
    try:
        values = [float(black), float(white)]
    except ValueError:
        raise ConfigError(
            f"--range: expected what the generator puts out for black and white, such as -1:1 or 0:255, got {span!r}"
        ) from None
    text = [
        json.dumps(value, ensure_ascii=False) for value in (source, latent)
    ]  # text in JSON is text in TOML
    flag = str(resize).lower()
    return [
        f'prior={{ name = "generator", source = {text[0]}, latent = {text[1]}, range = {values}, resize = {flag} }}'
    ]


def parsed(
    values: Mapping[str, Any], parse: Callable[[Mapping[str, Any]], E]
) -> tuple[list[tuple[str, E]], list[str]]:
    """All experiments of a config by their labels, and the problems of all of them; one that only part of a grid has comes with its place there."""
    chosen, found = expand(values), []
    problems: dict[str, list[str]] = {}
    for label, config in chosen:
        try:
            found.append((label, parse(config)))
        except ConfigError as error:
            for problem in error.problems:
                problems.setdefault(problem, []).append(label)
    return found, [
        problem + ("" if len(labels) == len(chosen) else _among(labels))
        for problem, labels in problems.items()
    ]


def _among(labels: Sequence[str]) -> str:
    more = f" and {len(labels) - 1} more" if len(labels) > 1 else ""
    return f" (in the grid's {labels[0]!r}{more})"


def experiments(values: Mapping[str, Any]) -> list[tuple[str, Experiment]]:
    """All experiments of a config; the problems of all of them in one error."""
    found, problems = parsed(values, Experiment.parse)
    if len({(exp.metrics, repr(exp.evaluators)) for _, exp in found}) > 1:
        problems.append(
            "grid: metrics and evaluators must be the same in all experiments of one run: use several configs and one report"
        )
    if problems:
        raise ConfigError(problems)
    return found
