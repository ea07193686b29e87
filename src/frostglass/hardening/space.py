"""What is tuned: each defense and each allowed pair, with the ranges of their parameters."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Protocol

from frostglass.attacks.base import Surface
from frostglass.core.errors import ConfigError
from frostglass.core.registry import nearest
from frostglass.defenses.base import Defense, defenses
from frostglass.defenses.compose import conflicts
from frostglass.defenses.strengths import Choice, Range, Whole

DIGITS = 3  # of a real parameter: more would make it no better, and hard to read

Values = dict[str, Any]


class Suggests(Protocol):
    """The part of an Optuna trial that suggests values."""

    def suggest_int(self, name: str, low: int, high: int, *, log: bool) -> int: ...
    def suggest_float(self, name: str, low: float, high: float, *, log: bool) -> float: ...
    def suggest_categorical(self, name: str, choices: Sequence[str]) -> Any: ...


@dataclass(frozen=True, eq=False)
class Candidate:
    """A defense or a pair of them, and the ranges of their parameters: `calor.rank` and so on.

    `bases` are the defenses as a config names them, with the parameters that are not tuned.
    """

    bases: tuple[Values, ...]
    ranges: Mapping[str, Range]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(base["name"] for base in self.bases)

    @property
    def title(self) -> str:
        return " + ".join(self.names)

    @property
    def settings(self) -> float:
        """How many different parameters there are to try; infinity if one is a real number."""
        return math.prod(map(_options, self.ranges.values()))

    def first(self) -> Values:
        """Return the bases' parameters, moved into their ranges: the first ones to try."""
        methods = dict(zip(self.names, built(self.bases), strict=True))
        return {
            key: _inside(getattr(methods[name], parameter), limits)
            for key, limits in self.ranges.items()
            for name, _, parameter in (key.rpartition("."),)
        }

    def suggested(self, trial: Suggests) -> Values:
        """Return the values that a sampler suggests for this trial."""
        return {key: _suggested(trial, key, limits) for key, limits in self.ranges.items()}

    def tables(self, values: Values) -> list[Values]:
        """Return the defenses with these parameters as a config names them."""
        return [
            base
            | {
                key.removeprefix(f"{base['name']}."): value
                for key, value in values.items()
                if key.startswith(f"{base['name']}.")
            }
            for base in self.bases
        ]


def built(tables: Sequence[Values]) -> tuple[Defense, ...]:
    """Return defenses from the tables of a config."""
    return tuple(defenses.build(table) for table in tables)


def described(tables: Sequence[Values]) -> str:
    """Return defenses with their parameters in one line: "calor (rank 10, b 8)"."""
    return " + ".join(map(_described, tables))


def _described(table: Values) -> str:
    """Return a defense with the parameters of its table; where it has none, with all of its own."""
    own = {key: value for key, value in table.items() if key != "name"}
    own = own or vars(*built([table]))
    return f"{table['name']} ({', '.join(f'{key} {value}' for key, value in own.items())})"


@dataclass(frozen=True)
class Tunable:
    """What is tuned: models with this surface, of so many people, with so many secret people."""

    surface: Surface
    classes: int
    secret: int = 0

    def fits(self, method: type[Defense]) -> bool:
        """Whether a defense acts on this surface."""
        return method.takes_attributes if self.surface == "features" else not method.needs_cut

    def ranges(self, name: str) -> Mapping[str, Range]:
        """Return the ranges of a defense's parameters; none if it cannot be tuned here."""
        method = defenses.get(name)
        return method.strengths(self.classes, self.secret) if self.fits(method) else {}


def each_once(names: Sequence[str]) -> None:
    """Refuse a defense that is named twice."""
    if twice := [name for name in names if list(names).count(name) > 1]:
        raise ConfigError(f"defenses: {twice[0]} is named twice: name each once")


def candidates(
    names: Sequence[str], tunable: Tunable, bases: Sequence[Values] = ()
) -> list[Candidate]:
    """Return each defense alone, then every pair that can be combined.

    Those with a base begin from it and keep what is not tuned; the others have their defaults.
    """
    each_once(names)
    ranges = {name: _ranges(name, tunable) for name in names}
    given = {base["name"]: dict(base) for base in bases}
    chosen = [given.get(name, {"name": name}) for name in names]
    pairs = [pair for pair in combinations(chosen, 2) if not conflicts(built(pair))]

    def candidate(*methods: Values) -> Candidate:
        own = {key: limits for base in methods for key, limits in ranges[base["name"]].items()}
        return Candidate(methods, own)

    return [*map(candidate, chosen), *(candidate(*pair) for pair in pairs)]


def _ranges(name: str, tunable: Tunable) -> dict[str, Range]:
    known = [each for each in defenses.names() if tunable.ranges(each)]
    try:
        found, fits = tunable.ranges(name), tunable.fits(defenses.get(name))
    except ConfigError:
        raise ConfigError(f"defenses: no defense named {name!r}; {nearest(name, known)}") from None
    if not fits and tunable.surface == "features":
        raise ConfigError(
            f"defenses: {name} defends whole models and cannot protect features; "
            f"{nearest(name, known)}"
        )
    if not found and not defenses.get(name).moves_cut:  # where to cut is given, and not tuned
        raise ConfigError(
            f"defenses: {name} has no strength to tune on this model and data ({tunable.secret} "
            f"secret people); {nearest(name, known)}"
        )
    return {f"{name}.{key}": limits for key, limits in found.items()}


def _inside(value: Any, limits: Range) -> Any:
    if isinstance(limits, Choice):
        return value if value in limits.options else limits.options[0]
    return min(max(value, limits.low), limits.high)


def _options(limits: Range) -> float:
    if isinstance(limits, Choice):
        return len(limits.options)
    return limits.high - limits.low + 1 if isinstance(limits, Whole) else math.inf


def _suggested(trial: Suggests, key: str, limits: Range) -> Any:
    if isinstance(limits, Choice):
        return trial.suggest_categorical(key, limits.options)
    if isinstance(limits, Whole):
        return trial.suggest_int(key, limits.low, limits.high, log=limits.log)
    value = trial.suggest_float(key, limits.low, limits.high, log=limits.log)
    return float(f"{value:.{DIGITS}g}")
