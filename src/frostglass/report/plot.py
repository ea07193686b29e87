"""Scatter plots as SVG, with names that cover neither each other nor points."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from markupsafe import Markup, escape

from frostglass.report.charts import PATHS
from frostglass.report.text import Kind, number

INSET = 16  # pixels between the outermost points and the field's sides
COLOURS = 8
LETTER, LINE = 7.6, 15.0  # size of a label's letters in a wide font

# More shapes than colours, so that a ninth series has a mark of its own; the shapes and colours
# of the first evaluators come last.
MARKS = (
    *PATHS[2:],
    "M0 6.5L-6.5-5L6.5-5z",
    "M-2.3-6.5H2.3V-2.3H6.5V2.3H2.3V6.5H-2.3V2.3H-6.5V-2.3H-2.3z",
    "M0-7.5L1.8-2.4L7.1-2.3L2.9 .9L4.4 6.1L0 3L-4.4 6.1L-2.9 .9L-7.1-2.3L-1.8-2.4z",
    "M-6.5 0L-3.3-5.6H3.3L6.5 0L3.3 5.6H-3.3z",
    "M-6-6H6L2 0L6 6H-6L-2 0z",
    "M-6.3-3.3L-3.3-6.3L0-3L3.3-6.3L6.3-3.3L3 0L6.3 3.3L3.3 6.3L0 3L-3.3 6.3L-6.3 3.3L-3 0z",
    "M6-6.5V6.5L-6 0z",
    *PATHS[:2],
)
PLAIN = "M-5 0a5 5 0 1 0 10 0a5 5 0 1 0-10 0z"
RING = '<circle class="ring" r="9"/>'
Span = tuple[float, float]
# Distances between ticks; shares may have them at quarters.
STEPS = (
    *(each * 10.0**power for power in range(-12, -3) for each in (1, 2, 5)),
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.25, 0.5, 1.0),
    *(each * 10.0**power for power in range(6) for each in (2, 5, 10)),
)


@dataclass(frozen=True)
class Field:
    """The size of a drawing, and the rectangle in it that holds the points."""

    width: int
    height: int
    left: int
    right: int
    top: int
    bottom: int
    ticks: int
    narrow: bool = False  # titles and names of levels go inside, series into a legend below


WIDE = Field(860, 500, 62, 748, 16, 446, ticks=9)
NARROW = Field(340, 370, 46, 338, 28, 314, ticks=4, narrow=True)


@dataclass(frozen=True)
class Axis:
    """The range of values shown along an axis, and how they are written."""

    low: float
    high: float
    title: str
    unit: Kind

    def ticks(self, most: int) -> Iterator[tuple[float, str]]:
        step = next((step for step in STEPS if (self.high - self.low) / step <= most), None)
        if step is None:  # far larger than any score
            step = 10.0 ** math.ceil(math.log10((self.high - self.low) / most))
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        for place in range(first, last + 1):
            yield place * step, number(place * step, self.unit)


@dataclass(frozen=True)
class Point:
    """A point with its title; `reach` is a vertical interval, `across` a horizontal one."""

    x: float
    y: float
    reach: Span
    title: str
    hollow: bool
    across: Span | None = None


@dataclass(frozen=True)
class Series:
    """Points, perhaps joined in their order; colour 0 is what has no defense."""

    name: str
    points: tuple[Point, ...]
    colour: int
    mark: str
    joined: bool = True


@dataclass(frozen=True)
class Level:
    """Dashed lines at the lowest and highest of some heights, named once."""

    heights: Sequence[float]
    name: str
    text: str


@dataclass(frozen=True)
class Plot:
    """A scatter plot in its own units; `description` is for screen readers.

    With `legend`, series are named in a legend beside it and not in the drawing.
    """

    description: str
    across: Axis
    upward: Axis
    levels: Sequence[Level]
    series: Sequence[Series]
    legend: bool = False


@dataclass(frozen=True)
class Box:
    """A rectangle on the drawing."""

    left: float
    top: float
    right: float
    bottom: float

    def shared(self, other: "Box") -> float:
        """Return the area that both cover."""
        wide = min(self.right, other.right) - max(self.left, other.left)
        high = min(self.bottom, other.bottom) - max(self.top, other.top)
        return max(wide, 0.0) * max(high, 0.0)


@dataclass(frozen=True)
class Label:
    """A series' name: right of a point (1), left of it (-1), or above or below it (0)."""

    box: Box
    point: Point
    side: int

    @property
    def far(self) -> bool:
        """Is it so far from its point that a line must join them?"""
        box, x, y = self.box, self.point.x, self.point.y
        return max(box.left - x, x - box.right, box.top - y, y - box.bottom) > 16


def draw(plot: Plot, field: Field = WIDE) -> Markup:
    """Draw a plot; equal plots give equal bytes."""
    series = [_placed(each, plot, field) for each in plot.series]
    rows = [_y(h, plot.upward, field) for level in plot.levels for h in level.heights]
    css = "plot narrow" if field.narrow else "plot wide"
    view = f'viewBox="0 0 {field.width} {field.height}"'
    parts = [
        f'<svg class="{css}" {view} role="img"><title>{escape(plot.description)}</title>',
        _axes(plot, field),
        *(_level(level, plot.upward, field) for level in plot.levels),
        *(_guides(each.points, field) for each in series if not each.colour),
        *map(_lines, series),
        *map(_points, series),
    ]
    if not field.narrow and not plot.legend:
        labels = _labels(series, rows, field)
        parts += [_named(each, label) for each, label in zip(series, labels, strict=True)]
    return Markup("".join([*parts, "</svg>"]))


def key(series: Series) -> Markup:
    """Draw a series' mark and name for a legend."""
    ring = RING if not series.colour else ""
    mark = f'<svg viewBox="-10 -10 20 20" aria-hidden="true">{ring}<path d="{series.mark}"/></svg>'
    return Markup(f'<span class="c{series.colour}">{mark}</span> {escape(series.name)}')


def _x(value: float, axis: Axis, field: Field) -> float:
    share = (value - axis.low) / (axis.high - axis.low)
    return field.left + INSET + share * (field.right - field.left - 2 * INSET)


def _y(value: float, axis: Axis, field: Field) -> float:
    share = (value - axis.low) / (axis.high - axis.low)
    return field.bottom - share * (field.bottom - field.top)


def _placed(series: Series, plot: Plot, field: Field) -> Series:
    """Convert a series to the drawing's coordinates."""

    def placed(p: Point) -> Point:
        low, high = (_y(value, plot.upward, field) for value in p.reach)
        across = p.across and (
            _x(p.across[0], plot.across, field),
            _x(p.across[1], plot.across, field),
        )
        x, y = _x(p.x, plot.across, field), _y(p.y, plot.upward, field)
        return Point(x, y, (low, high), p.title, p.hollow, across)

    return replace(series, points=tuple(map(placed, series.points)))


def _axes(plot: Plot, field: Field) -> str:
    below = "".join(
        f'<line class="rule" x1="{x:.1f}" x2="{x:.1f}" y1="{field.bottom}"'
        f' y2="{field.bottom + 5}"/>'
        f'<text x="{x:.1f}" y="{field.bottom + 20}" text-anchor="middle">{text}</text>'
        for x, text in (
            (_x(at, plot.across, field), text) for at, text in plot.across.ticks(field.ticks)
        )
    )
    beside = "".join(
        f'<line class="rule" x1="{field.left}" x2="{field.right}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text x="{field.left - 8}" y="{y + 4:.1f}" text-anchor="end">{text}</text>'
        for y, text in (
            (_y(at, plot.upward, field), text) for at, text in plot.upward.ticks(field.ticks)
        )
    )
    middle = (field.top + field.bottom) / 2
    turned = f'x="14" y="{middle:.1f}" text-anchor="middle" transform="rotate(-90 14 {middle:.1f})"'
    place = 'x="2" y="12"' if field.narrow else turned
    return (
        f'<g aria-hidden="true">{below}{beside}'
        f'<text class="title" x="{(field.left + field.right) / 2:.1f}" y="{field.height - 12}"'
        f' text-anchor="middle">{plot.across.title}</text>'
        f'<text class="title" {place}>{plot.upward.title}</text></g>'
    )


def _level(level: Level, axis: Axis, field: Field) -> str:
    ends = [_y(height, axis, field) for height in (level.heights[0], level.heights[-1])]
    lines = "".join(
        f'<line class="guess" x1="{field.left}" x2="{field.right}" y1="{y}" y2="{y}"/>'
        for y in dict.fromkeys(f"{y:.1f}" for y in ends)
    )
    if field.narrow:
        x, y = field.right - 2, min(ends) - 4
        return (
            f'{lines}<text x="{x}" y="{y:.1f}" text-anchor="end">{level.name} {level.text}</text>'
        )
    x, y = field.right + 8, min(sum(ends) / 2, field.bottom - 10) - 3
    second = f'<tspan x="{x}" dy="15">{level.text}</tspan>'
    return f'{lines}<text x="{x}" y="{y:.1f}">{level.name}{second}</text>'


def _guides(points: Sequence[Point], field: Field) -> str:
    """Thin lines through the undefended subject: left of them costs utility, below leaks less."""
    return "".join(
        f'<path class="guide" d="M{field.left} {point.y:.1f}H{field.right}'
        f'M{point.x:.1f} {field.top}V{field.bottom}"/>'
        for point in points
    )


def _lines(series: Series) -> str:
    """The intervals, and a line through the points."""
    bars = "".join(
        f'<path class="reach" d="M{p.x:.1f} {p.reach[0]:.1f}V{p.reach[1]:.1f}"/>'
        for p in series.points
    )
    bars += "".join(
        f'<path class="reach" d="M{p.across[0]:.1f} {p.y:.1f}H{p.across[1]:.1f}"/>'
        for p in series.points
        if p.across
    )
    route = " ".join(f"{point.x:.1f},{point.y:.1f}" for point in series.points)
    is_line = series.joined and len(series.points) > 1
    joined = f'<polyline class="route" points="{route}"/>' if is_line else ""
    return f'<g class="c{series.colour}" aria-hidden="true">{bars}{joined}</g>'


def _points(series: Series) -> str:
    ring = RING if not series.colour else ""
    return "".join(
        f'<g class="point c{series.colour}{" hollow" if point.hollow else ""}"'
        f' transform="translate({point.x:.1f} {point.y:.1f})">'
        f'<title>{escape(point.title)}</title>{ring}<path d="{series.mark}"/></g>'
        for point in series.points
    )


def _named(series: Series, label: Label) -> str:
    box, point = label.box, label.point
    leader = ""
    if label.far:
        x, y = min(max(point.x, box.left), box.right), box.top if box.top > point.y else box.bottom
        if not box.left <= point.x <= box.right and box.top <= point.y <= box.bottom:
            y = (box.top + box.bottom) / 2
        leader = f'<path class="leader" d="M{x:.1f} {y:.1f}L{point.x:.1f} {point.y:.1f}"/>'
    # Anchored towards its point, so that in another font it grows away from it.
    middle = (box.left + box.right) / 2
    anchors = {1: ("start", box.left), -1: ("end", box.right), 0: ("middle", middle)}
    anchor, at = anchors[label.side]
    text = (
        f'<text class="name" x="{at:.1f}" y="{box.bottom - 4:.1f}" text-anchor="{anchor}">'
        f"{escape(series.name)}</text>"
    )
    return f'<g class="c{series.colour}" aria-hidden="true">{leader}{text}</g>'


def _labels(series: Sequence[Series], levels: Sequence[float], field: Field) -> list[Label]:
    """Place each name near an end of its series, over as little else as possible.

    Every name is tried again once the others stand.
    """
    marks = [(each, _mark_box(point)) for each in series for point in each.points]
    plain = [point for each in series if not each.colour for point in each.points]
    rows = [*levels, *(point.y for point in plain)]
    thin = [
        *(bar for each in series for point in each.points for bar in _bars(point)),
        *(Box(point.x - 0.5, field.top, point.x + 0.5, field.bottom) for point in plain),
        *(Box(field.left, y - 0.5, field.right, y + 0.5) for y in rows),
        *(dot for each in series for dot in _along(each.points)),
    ]
    inside = Box(field.left + 2, field.top - 8, field.right - 2, field.bottom - 2)

    def cost(each: Series, place: int, label: Label, others: Sequence[Label]) -> float:
        box = label.box
        covered = sum(box.shared(other.box) for other in others) * 6
        covered += sum(box.shared(mark) for _, mark in marks) * 4
        crossed = sum(box.shared(bar) for bar in thin) * 1.5
        outside = (box.right - box.left) * (box.bottom - box.top) - box.shared(inside)
        # A name between two marks could belong to either: keep away from marks of others.
        near = sum(1 for other, mark in marks if other is not each and box.shared(_wider(mark)))
        return covered + crossed + outside * 8 + near * 14 + place * 2

    chosen: dict[int, Label] = {}
    for _ in range(4):
        for turn, each in enumerate(series):
            others = [label for other, label in chosen.items() if other != turn]
            chosen[turn] = min(
                enumerate(_options(each)),
                key=lambda option: cost(each, option[0], option[1], others),
            )[1]
    return [chosen[turn] for turn in range(len(series))]


def _options(series: Series) -> Iterator[Label]:
    """Places for a name, the best first: close before far, ends of the series before the rest."""
    wide = LETTER * len(series.name)
    ends = [series.points[-1], *series.points[:-1]]
    sides = ((1, 0), (-1, 0), (0, -1), (0, 1), (1, -1), (1, 1), (-1, -1), (-1, 1))
    shift = {1: 0.0, 0: 0.5, -1: 1.0}
    for gap in (10, 22, 36, 54):
        gap += 0 if series.colour else 4  # the undefended mark is larger
        for point in ends:
            for right, down in sides:
                slant = gap if not (right and down) else 0.75 * gap
                left = point.x + right * slant - shift[right] * wide
                top = point.y + down * slant - shift[down] * LINE
                yield Label(Box(left, top, left + wide, top + LINE), point, right)


def _mark_box(point: Point) -> Box:
    return Box(point.x - 8, point.y - 8, point.x + 8, point.y + 8)


def _bars(point: Point) -> list[Box]:
    low, high = point.reach
    across = point.across and [Box(point.across[0], point.y - 1, point.across[1], point.y + 1)]
    return [Box(point.x - 1, high, point.x + 1, low), *(across or [])]


def _wider(box: Box) -> Box:
    return Box(box.left - 5, box.top - 3, box.right + 5, box.bottom + 3)


def _along(points: Sequence[Point]) -> Iterator[Box]:
    """Small boxes along the line through the points."""
    for one, two in pairwise(points):
        steps = max(1, int(math.hypot(two.x - one.x, two.y - one.y) / 6))
        for step in range(1, steps):
            x, y = one.x + (two.x - one.x) * step / steps, one.y + (two.y - one.y) * step / steps
            yield Box(x - 2, y - 2, x + 2, y + 2)
