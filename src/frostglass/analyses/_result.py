"""What analyses return: tables of numbers, and figures of curves."""

import html
import math
from collections.abc import Iterable
from dataclasses import dataclass

from frostglass.core import display
from frostglass.core.errors import RunError

Cell = str | int | float | None
LARGEST = 1e30  # more cannot be drawn


@dataclass(frozen=True)
class Axis:
    """What an axis shows; values may be shares, shown in percent, or need a log scale."""

    title: str
    log: bool = False
    percent: bool = False


@dataclass(frozen=True)
class Curve:
    """Named points of a figure, joined by a line or not; `low` and `high` are intervals of y."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    joined: bool = True

    def __post_init__(self) -> None:
        lengths = {len(self.x), len(self.y), len(self.low or self.x), len(self.high or self.x)}
        if len(lengths) > 1 or not self.x or bool(self.low) != bool(self.high):
            raise RunError(
                f"curve {self.name!r}: expected as many x as y and intervals, got {len(self.x)} x, "
                f"{len(self.y)} y, {len(self.low)} low and {len(self.high)} high"
            )
        _check_finite(f"curve {self.name!r}", (*self.x, *self.y, *self.low, *self.high))


@dataclass(frozen=True)
class Figure:
    """Curves over common axes."""

    title: str
    across: Axis
    upward: Axis
    curves: tuple[Curve, ...]

    def __post_init__(self) -> None:
        if not self.curves:
            raise RunError(f"figure {self.title!r}: expected at least one curve, got none")
        for axis, name in ((self.across, "x"), (self.upward, "y")):
            values = [value for curve in self.curves for value in getattr(curve, name)]
            if axis.log and min(values) <= 0:
                raise RunError(
                    f"figure {self.title!r}: a log scale needs values above 0, got {min(values)}"
                )


@dataclass(frozen=True)
class Table:
    """Rows of numbers and names; a missing number is None."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

    def __post_init__(self) -> None:
        if odd := [row for row in self.rows if len(row) != len(self.head)]:
            raise RunError(
                f"table {self.title!r}: expected {len(self.head)} cells a row, got {len(odd[0])}"
            )
        cells = [cell for row in self.rows for cell in row if isinstance(cell, float)]
        _check_finite(f"table {self.title!r}", cells)


@dataclass(frozen=True)
class Analysis:
    """What an analysis found. It holds no name and no image of a person."""

    tables: tuple[Table, ...]
    figures: tuple[Figure, ...]
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"Analysis({len(self.tables)} tables, {len(self.figures)} figures)"

    def _repr_html_(self) -> str:
        tables = (f"<p>{html.escape(one.title)}</p>{_html(one)}" for one in self.tables)
        return "".join([*tables, *(f"<p>{html.escape(note)}</p>" for note in self.notes)])


def _html(shown: Table) -> str:
    """Return a table with numbers of four digits."""
    rows = (
        [f"{cell:.4g}" if isinstance(cell, float) else "" if cell is None else cell for cell in row]
        for row in shown.rows
    )
    return display.table(shown.head, rows)


def _check_finite(name: str, values: Iterable[float]) -> None:
    if broken := sum(not math.isfinite(value) or abs(value) > LARGEST for value in values):
        raise RunError(f"{name}: {broken} values are not finite or above {LARGEST:g}")
