"""Our numbers beside the published ones: does a defense change them in the same direction?"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Literal

from frostglass.published.grids import Grid
from frostglass.published.metrics import ACCURACY, LEAKS, METRICS, UTILITIES
from frostglass.published.reading import WORLD, Row, Table
from frostglass.report.seeds import SeedRow, Share

Agreement = Literal["agrees", "disagrees", "open"]


@dataclass(frozen=True)
class Line:
    """A row of the table and the audit that stands for it; `ours` is None if that one failed."""

    row: Row
    attack: str
    label: str
    leak: float | None
    utility: float | None
    ours: SeedRow | None
    our_leak: Share | None
    our_utility: Share | None
    direction: Agreement | None = None

    @property
    def group(self) -> tuple[str, ...]:
        """What rows must share to be compared: attack, data, network."""
        return tuple(getattr(self.row, name) for name in WORLD)

    @property
    def undefended(self) -> bool:
        return self.row.defense.startswith("none")


@dataclass(frozen=True)
class Comparison:
    """All rows of a table; `order` counts pairs of rows by whether their order is the published."""

    leak: str
    utility: str
    lines: tuple[Line, ...]
    order: Counter[str]

    @property
    def directions(self) -> Counter[str]:
        """How many defenses change leakage as published, compared with the undefended model."""
        return Counter(line.direction for line in self.lines if line.direction)


def measures(table: Table) -> tuple[str, str]:
    """Return the metrics of a table that are compared: of leakage, and of utility.

    A table of accuracy has no other.
    """
    utility = next((name for name in UTILITIES if name in table.metrics), "")
    return next((name for name in LEAKS if name in table.metrics), utility), utility


def compare(table: Table, results: Sequence[tuple[Grid, Sequence[SeedRow]]]) -> Comparison:
    """Return every row of a table beside the audit that stands for it."""
    leak, utility = measures(table)
    lines = []
    for grid, found in results:
        by_label = {row.label: row for row in found}
        for label, rows in grid.rows.items():
            ours = by_label.get(label)
            for row in rows:
                lines.append(
                    Line(
                        row,
                        row.attack,
                        label,
                        row.value(leak),
                        _utility(table, row, utility),
                        ours,
                        _share(ours, leak),
                        _share(ours, utility),
                    )
                )
    return Comparison(leak, utility, *_judged(lines, leak))


def _utility(table: Table, row: Row, metric: str) -> float | None:
    """Return a row's utility; a table may print it once for all attacks."""
    if (value := row.value(metric)) is not None:
        return value
    same = {"defense": row.defense, "setting": row.setting, "attack": ""}
    return next((other.value(metric) for other in table.rows(same)), None)


def _share(row: SeedRow | None, metric: str) -> Share | None:
    if row is None or metric not in METRICS:
        return None
    ours = METRICS[metric].ours
    return next((share for name, share in row.shares.items() if name.startswith(ours)), None)


def _judged(lines: Sequence[Line], leak: str) -> tuple[tuple[Line, ...], Counter[str]]:
    judged: list[Line] = []
    for line in lines:
        reference = next(
            (each for each in lines if each.undefended and each.group == line.group), None
        )
        direction = None
        if reference is not None and not line.undefended:
            direction = agreement(reference, line, leak)
        judged.append(replace(line, direction=direction))
    pairs = [
        agreement(one, other, leak)
        for one, other in combinations(lines, 2)
        if one.group == other.group
    ]
    return tuple(judged), Counter(pair for pair in pairs if pair)


def agreement(one: Line, other: Line, leak: str) -> Agreement | None:
    """Return whether two rows differ in the published direction; None if nothing is to compare.

    Open: our intervals overlap, or accuracy was measured with one seed, so that it has none.
    """
    if one.leak is None or other.leak is None or one.leak == other.leak:
        return None
    if one.our_leak is None or other.our_leak is None:
        return None
    single = one.ours is not None and len(one.ours.seeds) == 1
    if METRICS[leak].ours == ACCURACY and single:
        return "open"
    higher, lower = (
        (other.our_leak, one.our_leak) if other.leak > one.leak else (one.our_leak, other.our_leak)
    )
    if higher.low > lower.high:
        return "agrees"
    return "disagrees" if higher.high < lower.low else "open"
