"""One registry class for every kind of method: built in, from installed packages, or by path."""

import difflib
import importlib
import inspect
import pkgutil
from collections.abc import Iterable, Mapping
from importlib.metadata import entry_points
from typing import Any, TypeVar

from frostglass.core.errors import ConfigError

M = TypeVar("M")


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint for an unknown name: the closest known name, and all of them."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}known: {', '.join(known)}"


def import_path(path: str, kind: str = "method") -> Any:
    """Import `package.module:Class`."""
    module, _, attribute = path.partition(":")
    try:
        if module.startswith("."):
            raise ValueError("a relative name")
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{kind} {path!r} cannot be imported ({error}): expected package.module:Class of an "
            "installed package or the current folder"
        ) from error


class Registry:
    """Maps names to methods of one kind.

    Three sources: modules of `packages` (imported on first use; a method's name is its file's
    name), entry points of installed packages in the group `frostglass.<kind>s` (or `group`), and
    `package.module:Class`. With a `contract`, a method must be a concrete subclass of it.
    """

    def __init__(
        self, kind: str, *packages: str, contract: type | None = None, group: str | None = None
    ):
        self.kind = kind
        self.packages = packages
        self.contract = contract
        self.group = group or f"frostglass.{kind}s"
        self._methods: dict[str, Any] = {}
        self._loaded = False

    def register(self, method: M, name: str | None = None) -> M:
        """Add a method under `name`, by default its file's name; usable as a decorator."""
        self.check(method)
        if name is None:
            module = inspect.getmodule(method)
            name = "" if module is None else module.__name__.rsplit(".", 1)[-1]
        if self._methods.get(name, method) is not method:
            raise ConfigError(f"two {self.kind} methods are named {name!r}: rename one")
        self._methods[name] = method
        if inspect.isclass(method):
            method.name = name  # type: ignore[attr-defined]
        return method

    def check(self, method: Any) -> None:
        """Refuse a class that does not fulfil the contract, naming what is missing."""
        if self.contract is None:
            return
        if not (inspect.isclass(method) and issubclass(method, self.contract)):
            raise ConfigError(
                f"{self.kind}: expected a subclass of {self.contract.__module__}."
                f"{self.contract.__name__}, got {method!r}: inherit from it"
            )
        if missing := sorted(getattr(method, "__abstractmethods__", ())):
            raise ConfigError(
                f"{self.kind} {method.__name__} lacks {', '.join(missing)}: define each of them"
            )

    def names(self) -> list[str]:
        """List the names of built-in methods and of those of installed packages."""
        self._load()
        return sorted(self._methods)

    def get(self, name: str) -> Any:
        """Return the method with this name, or the class at `package.module:Class`."""
        self._load()
        if name in self._methods:
            return self._methods[name]
        if ":" in name:
            return self._import(name)
        raise ConfigError(f"no {self.kind} named {name!r}: {nearest(name, self._methods)}")

    def build(self, table: Mapping[str, Any]) -> Any:
        """Build a method from a table: its `name`, perhaps a `variant`, and parameters."""
        values = {key: value for key, value in table.items() if key != "name"}
        method = self.get(table["name"])
        return (method.variant if "variant" in values and method.variants else method)(**values)

    def _import(self, path: str) -> Any:
        method = import_path(path, self.kind)
        self.check(method)
        return method

    def _load(self) -> None:
        if self._loaded:
            return
        self._loaded = True
        for package in self.packages:
            for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
                if not module.name.startswith("_"):
                    importlib.import_module(f"{package}.{module.name}")
        for entry in entry_points(group=self.group):
            try:
                method = entry.load()
            except (ImportError, AttributeError) as error:
                raise ConfigError(
                    f"the installed {self.kind} {entry.name!r} ({entry.value}) cannot be imported "
                    f"({error}): repair or uninstall its package"
                ) from error
            self.register(method, entry.name)
