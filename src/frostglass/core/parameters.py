"""Parameters of a method: a frozen, keyword-only dataclass whose values are checked when it is made."""

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
    """One line for each problem pydantic found: where, what was expected, what came; of `known` parameters the default, unknown ones get the nearest name."""
    return [_line(problem, known) for problem in error.errors(include_url=False)]


def _line(problem: Any, known: Mapping[str, FieldInfo]) -> str:
    where = ".".join(map(str, problem["loc"]))
    if problem["type"] == "unexpected_keyword_argument":
        return (
            f"{where}: no such parameter; {nearest(where, known)}"
            if known
            else f"{where}: no such parameter"
        )
    if (
        problem["type"] == "value_error"
    ):  # raised by the class's own __post_init__, which says all there is to say
        return ": ".join(filter(None, [where, str(problem["ctx"]["error"])]))
    if problem["type"].startswith("missing"):
        return f"{where}: required, and not given"
    if problem["type"] in RANGES:
        (bound,) = problem["ctx"].values()
        expected = (
            f"expected {RANGES[problem['type']]} {int(bound) if bound == int(bound) else bound}"
        )
    else:
        expected = problem["msg"].replace("Input should be", "expected", 1)
    return f"{where}: {expected[0].lower()}{expected[1:]}, got {problem['input']!r}{_default(problem['loc'], known)}"


def _default(place: tuple[int | str, ...], known: Mapping[str, FieldInfo]) -> str:
    """A value that would do, where a parameter has one that can be said shortly."""
    field = known.get(str(place[0])) if place else None
    value = None if field is None or field.is_required() else field.default
    return f"; the default is {value!r}" if isinstance(value, int | float | str | tuple) else ""


@dataclass_transform(frozen_default=True, kw_only_default=True)
def parameters(cls: type[T]) -> type[T]:
    """Make a class of annotated values a frozen, keyword-only, validated dataclass; unknown names are errors.

    Ranges are given as `Annotated[int, Field(ge=1)]`, conditions over several values in `__post_init__`. Direct construction raises
    ConfigError with every problem in one line; inside a pydantic model the problems join those of the model.
    """
    made = pydantic.dataclasses.dataclass(
        frozen=True, kw_only=True, config=ConfigDict(extra="forbid")
    )(cls)
    build = made.__init__

    @functools.wraps(build)
    def checked(self: Any, *args: Any, **values: Any) -> None:
        try:
            build(self, *args, **values)
        except ValidationError as error:
            found = problems(error, made.__pydantic_fields__)  # type: ignore[attr-defined]
            raise ConfigError([f"{made.__name__}: {problem}" for problem in found]) from None

    made.__init__ = checked  # type: ignore[method-assign]
    return made  # type: ignore[return-value]
