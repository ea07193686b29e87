"""Public names of a package that are imported on first use."""

import ast
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

Exports = tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]


def lazy_exports(package: str, file: str) -> Exports:
    """Return `__all__`, `__getattr__` and `__dir__` of a package with lazy imports.

    Its public names are those that `file`, its `__init__.py`, imports under `if TYPE_CHECKING`:

        __all__, __getattr__, __dir__ = lazy_exports(__name__, __file__)
    """
    homes = {
        alias.name: node.module
        for block in ast.parse(Path(file).read_text(encoding="utf-8")).body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    names = sorted(homes)

    def load(name: str) -> Any:
        if name not in homes:
            known = ", ".join(names)
            raise AttributeError(f"{package} has no public name {name!r}; it has {known}")
        return getattr(importlib.import_module(homes[name]), name)

    return names, load, lambda: list(names)
