"""Parameters of a method: a frozen, keyword-only dataclass whose values are checked when it is made."""

import functools
from collections.abc import Iterable
from dataclasses import fields
from typing import Any, TypeVar, dataclass_transform

import pydantic.dataclasses
from pydantic import ConfigDict, ValidationError

from frostglass.errors import ConfigError
from frostglass.registry import nearest

T = TypeVar("T")


def problems(error: ValidationError, known: Iterable[str] = ()) -> list[str]:
    """One line for each problem pydantic found: where, what was expected, what came; unknown names get the nearest of `known`."""
    return [_line(problem, tuple(known)) for problem in error.errors(include_url=False)]


def _line(problem: Any, known: tuple[str, ...]) -> str:
    where = ".".join(map(str, problem["loc"]))
    if problem["type"] == "unexpected_keyword_argument":
        return f"{where}: no such parameter; {nearest(where, known)}" if known else f"{where}: no such parameter"
    if problem["type"] == "value_error":  # raised by the class's own __post_init__, which says all there is to say
        return ": ".join(filter(None, [where, str(problem["ctx"]["error"])]))
    if problem["type"].startswith("missing"):
        return f"{where}: required, and not given"
    return f"{where}: {problem['msg'][0].lower()}{problem['msg'][1:]}, got {problem['input']!r}"


@dataclass_transform(frozen_default=True, kw_only_default=True)
def parameters(cls: type[T]) -> type[T]:
    """Make a class of annotated values a frozen, keyword-only, validated dataclass; unknown names are errors.

    Ranges are given as `Annotated[int, Field(ge=1)]`, conditions over several values in `__post_init__`. Direct construction raises
    ConfigError with every problem in one line; inside a pydantic model the problems join those of the model.
    """
    made = pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))(cls)
    build = made.__init__

    @functools.wraps(build)
    def checked(self: Any, *args: Any, **values: Any) -> None:
        try:
            build(self, *args, **values)
        except ValidationError as error:
            found = problems(error, [field.name for field in fields(made)])
            raise ConfigError([f"{made.__name__}: {problem}" for problem in found]) from None

    made.__init__ = checked  # type: ignore[method-assign]
    return made  # type: ignore[return-value]
