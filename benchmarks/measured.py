"""One row of the table: a figure, the goal beside it, and whether the goal was met."""

from dataclasses import dataclass

NAME, VALUE, GOAL, MET = 52, 9, 13, 6  # widths of the columns


@dataclass(frozen=True)
class Measured:
    """A figure with the least and the most it may be; without either it is for information."""

    name: str
    value: float
    note: str = ""
    least: float | None = None
    most: float | None = None

    @property
    def goal(self) -> str:
        if self.least is not None and self.most is not None:
            return f"{self.least:g} to {self.most:g}"
        if self.most is not None:
            return f"≤ {self.most:g}"
        return "" if self.least is None else f"≥ {self.least:g}"

    @property
    def missed(self) -> bool:
        """Whether a goal was missed; so is one whose figure is not a number."""
        above = self.least is None or self.value >= self.least
        below = self.most is None or self.value <= self.most
        return not (above and below)

    @property
    def line(self) -> str:
        met = "" if not self.goal else "MISSED" if self.missed else "met"
        value = f"{self.value:,.0f}" if self.value >= 1000 else f"{self.value:.3g}"
        return row(self.name, value, self.goal, met, self.note)


def row(name: str, value: str, goal: str, met: str, note: str) -> str:
    cells = f"{name:<{NAME}} {value:>{VALUE}}  {goal:<{GOAL}} {met:<{MET}}  {note}"
    return cells.rstrip()


HEADER = row("benchmark", "figure", "goal", "", "measured")
