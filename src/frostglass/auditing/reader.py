"""Reads the sections of a config one by one and collects every problem with its place."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

from frostglass.core.errors import ConfigError
from frostglass.core.method import Method
from frostglass.core.registry import Registry

P = TypeVar("P")


class Reader:
    """Turns plain values, or objects of the right class, into the parts of an experiment.

    A part that cannot be read is None, and `problems` says why.
    """

    def __init__(self, values: Mapping[str, Any]):
        self.values = values
        self.problems: list[str] = []

    def value(self, key: str, kind: type, default: Any) -> Any:
        """Read a text or a number."""
        value = self.values.get(key, default)
        if not isinstance(value, kind) or isinstance(value, bool):
            self.problems.append(f"{key}: expected a {kind.__name__}, got {value!r}")
            return default
        return value

    def section(self, key: str, cls: Callable[..., P], where: str = "", values: Any = None) -> P:
        """Read a table as the parameters of `cls`."""
        values = self.values.get(key, {}) if values is None else values
        where = where or key
        if isinstance(cls, type) and isinstance(values, cls):
            return cast(P, values)
        if not isinstance(values, Mapping):
            self.problems.append(f"{where}: expected a table, got {values!r}")
        else:
            try:
                return cls(**values)
            except ConfigError as error:
                self.problems += [f"{where}.{_strip(problem)}" for problem in error.problems]
        return None  # type: ignore[return-value]  # `problems` is raised before anyone uses it

    def kinds(
        self, key: str, classes: Mapping[str, type[P]], default: Sequence[Any]
    ) -> tuple[P, ...]:
        """Read a list of tables, each as the class that its `kind` names; the first by default."""
        values = self._list(key, default)
        return tuple(self._kind(f"{key}[{i}]", classes, one) for i, one in enumerate(values))

    def _kind(self, where: str, classes: Mapping[str, type[P]], values: Any) -> P:
        if isinstance(values, tuple(classes.values())):
            return cast(P, values)
        kind, rest = next(iter(classes)), values
        if isinstance(values, Mapping):
            kind = values.get("kind", kind)
            rest = {name: value for name, value in values.items() if name != "kind"}
        if not isinstance(kind, str) or kind not in classes:
            self.problems.append(f"{where}.kind: expected {' or '.join(classes)}, got {kind!r}")
            return None  # type: ignore[return-value]  # as in `section`
        return self.section(where, classes[kind], where, rest)

    def method(self, key: str, registry: Registry, default: Any, where: str = "") -> Any:
        """Read a method: an object of the registry's kind, or a table with its name."""
        return self._method(self.values.get(key, default), registry, where or key)

    def methods(self, key: str, registry: Registry, default: Sequence[Any]) -> tuple[Any, ...]:
        """Read a list of methods."""
        values = self._list(key, default)
        return tuple(self._method(one, registry, f"{key}[{i}]") for i, one in enumerate(values))

    def _method(self, values: Any, registry: Registry, where: str) -> Any:
        if isinstance(values, Method):
            try:
                registry.check(type(values))
            except ConfigError as error:
                self.problems.append(f"{where}: {error}")
                return None
            return values
        if not isinstance(values, Mapping) or not isinstance(values.get("name"), str):
            known = ", ".join(registry.names())
            self.problems.append(
                f"{where}: expected a table with a name, one of {known}; got {values!r}"
            )
            return None
        parameters = {name: value for name, value in values.items() if name != "name"}
        try:
            build = registry.get(values["name"])
        except ConfigError as error:
            self.problems.append(f"{where}.name: {error}")
            return None
        if "variant" in parameters and build.variants:
            build = build.variant
        return self.section(where, build, where, parameters)

    def _list(self, key: str, default: Sequence[Any]) -> Sequence[Any]:
        values = self.values.get(key, default)
        if not isinstance(values, Sequence) or isinstance(values, str):
            self.problems.append(f"{key}: expected a list of tables, got {values!r}")
            return []
        if not values and default:
            self.problems.append(f"{key}: at least one is needed")
        return values


def _strip(problem: str) -> str:
    """Drop the class name of "Gmi: lr: ...": a config names the section instead."""
    head, _, rest = problem.partition(": ")
    return rest if rest and head[:1].isupper() else problem
