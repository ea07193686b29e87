"""The papers' tables as data, the protocols that build them, and claims of our own results."""

from typing import TYPE_CHECKING

from frostglass.core.lazy import lazy_exports

if TYPE_CHECKING:
    from frostglass.published.reading import Cell, Paper, Row, Table, names, paper, table, tables

__all__, __getattr__, __dir__ = lazy_exports(__name__, __file__)
