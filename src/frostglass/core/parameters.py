"""Parameters of a method: a frozen, keyword-only dataclass that validates its values."""

import functools
from collections.abc import Mapping
from typing import Any, TypeVar, dataclass_transform

import pydantic.dataclasses
from pydantic import ConfigDict, ValidationError
from pydantic.fields import FieldInfo

from frostglass.core.errors import ConfigError
from frostglass.core.registry import nearest

T = TypeVar("T")
RANGES = {
    "greater_than_equal": "at least",
    "greater_than": "more than",
    "less_than_equal": "at most",
    "less_than": "less than",
}


def problems(error: ValidationError, known: Mapping[str, FieldInfo] = {}) -> list[str]:
    """Return a line per problem: where, what was expected and given, a default or nearest name."""
    return [_line(problem, known) for problem in error.errors(include_url=False)]


def _line(problem: Any, known: Mapping[str, FieldInfo]) -> str:
    where, kind = ".".join(map(str, problem["loc"])), problem["type"]
    if kind == "unexpected_keyword_argument":
        return f"{where}: no such parameter" + (f"; {nearest(where, known)}" if known else "")
    if kind == "value_error":  # raised by the class's own __post_init__, which says it all
        return ": ".join(filter(None, [where, str(problem["ctx"]["error"])]))
    if kind.startswith("missing"):
        return f"{where}: required, and not given"
    if kind in RANGES:
        (bound,) = problem["ctx"].values()
        expected = f"expected {RANGES[kind]} {int(bound) if bound == int(bound) else bound}"
    else:
        expected = problem["msg"].replace("Input should be", "expected", 1)
        expected = expected[0].lower() + expected[1:]
    return f"{where}: {expected}, got {problem['input']!r}{_default(problem['loc'], known)}"


def _default(place: tuple[int | str, ...], known: Mapping[str, FieldInfo]) -> str:
    """Return the default value, if short enough to print."""
    field = known.get(str(place[0])) if place else None
    value = None if field is None or field.is_required() else field.default
    return f"; the default is {value!r}" if isinstance(value, int | float | str | tuple) else ""


@dataclass_transform(frozen_default=True, kw_only_default=True)
def parameters(cls: type[T]) -> type[T]:
    """Make a class of annotated values a frozen, keyword-only, validated dataclass.

    Give ranges as `Annotated[int, Field(ge=1)]`, and conditions over several values in
    `__post_init__`. Construction raises one ConfigError that lists every problem. Unknown names
    are errors.
    """
    validated = pydantic.dataclasses.dataclass(
        frozen=True, kw_only=True, config=ConfigDict(extra="forbid")
    )(cls)
    build = validated.__init__

    @functools.wraps(build)
    def checked(self: Any, /, *args: Any, **values: Any) -> None:
        try:
            build(self, *args, **values)
        except ValidationError as error:
            lines = problems(error, validated.__pydantic_fields__)
            raise ConfigError([f"{validated.__name__}: {line}" for line in lines]) from None

    validated.__init__ = checked  # type: ignore[method-assign, assignment]
    return validated  # type: ignore[return-value]
