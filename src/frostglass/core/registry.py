"""One registry class for every kind of method; a method's name is the name of its file."""

import difflib
import importlib
import inspect
import pkgutil
from collections.abc import Iterable
from typing import Any, TypeVar

from frostglass.core.errors import ConfigError

M = TypeVar("M")


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for an unknown name: the closest known one, and all of them."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}known: {', '.join(known)}"


class Registry:
    """Names to methods of one kind, found by importing every module of `package` on first use."""

    def __init__(self, kind: str, *packages: str):
        self.kind = kind
        self.packages = packages
        self._methods: dict[str, Any] = {}
        self._loaded = False

    def register(self, method: M, name: str | None = None) -> M:
        """Add a method under its file's name; used as a decorator."""
        name = name or inspect.getmodule(method).__name__.rsplit(".", 1)[-1]  # type: ignore[arg-type, union-attr]
        if name in self._methods:
            raise ConfigError(f"two {self.kind} methods are named {name!r}: rename one")
        self._methods[name] = method
        method.name = name  # type: ignore[attr-defined]
        return method

    def names(self) -> list[str]:
        self._load()
        return sorted(self._methods)

    def get(self, name: str) -> Any:
        self._load()
        if name not in self._methods:
            raise ConfigError(f"no {self.kind} named {name!r}: {nearest(name, self._methods)}")
        return self._methods[name]

    def _load(self) -> None:
        if not self._loaded:
            self._loaded = True
            for package in self.packages:
                for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
                    if not module.name.startswith("_"):
                        importlib.import_module(f"{package}.{module.name}")
