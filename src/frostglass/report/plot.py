"""The drawing of a trade-off: utility across, leakage upwards, a point for each model or protection, and names that cover neither each other nor points."""

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, get_origin

from markupsafe import Markup, escape

from frostglass.defenses.base import defenses
from frostglass.report.charts import PATHS

WIDTH, HEIGHT = 860, 500
LEFT, RIGHT, TOP, BOTTOM = (
    62,
    748,
    16,
    446,
)  # of the field that holds the points; guessing is named to the right of it
INSET = 16  # between the outermost points and the field's sides
COLOURS = 8
LETTER, LINE = 7.6, 15.0  # size of a label's letters; fonts differ, and this is a wide one

# More shapes than colours, so that a ninth defense has a mark of its own; the first judges' shapes come last, as their colours do.
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
UNDEFENDED = "M-5 0a5 5 0 1 0 10 0a5 5 0 1 0-10 0z"


@dataclass(frozen=True)
class Box:
    """A rectangle on the drawing."""

    left: float
    top: float
    right: float
    bottom: float

    def shared(self, other: "Box") -> float:
        """The area both cover."""
        wide, high = (
            min(self.right, other.right) - max(self.left, other.left),
            min(self.bottom, other.bottom) - max(self.top, other.top),
        )
        return max(wide, 0.0) * max(high, 0.0)


@dataclass(frozen=True)
class Point:
    """A place on the drawing with an upright bar from `low` to `high`, and what is said of it; `across` is a level bar, if there is one."""

    x: float
    y: float
    low: float
    high: float
    said: str
    hollow: bool
    across: tuple[float, float] | None = None

    @property
    def box(self) -> Box:
        return Box(self.x - 8, self.y - 8, self.x + 8, self.y + 8)

    @property
    def bars(self) -> list[Box]:
        upright = Box(self.x - 1, self.high, self.x + 1, self.low)
        return (
            [upright]
            if self.across is None
            else [upright, Box(self.across[0], self.y - 1, self.across[1], self.y + 1)]
        )


@dataclass(frozen=True)
class Series:
    """One defense at its strengths, in order of utility; colour 0 is no defense."""

    name: str
    points: tuple[Point, ...]
    colour: int
    mark: str


@dataclass(frozen=True)
class Label:
    """A series' name beside one of its points: to the right of it, to the left, or (0) above or below."""

    box: Box
    point: Point
    side: int

    @property
    def far(self) -> bool:
        """Is it so far from its point that a line must join them?"""
        return (
            max(
                self.box.left - self.point.x,
                self.point.x - self.box.right,
                self.box.top - self.point.y,
                self.point.y - self.box.bottom,
            )
            > 16
        )


def drawing(
    spoken: str, axes: str, levels: str, series: Sequence[Series], rows: Sequence[float]
) -> Markup:
    """The whole plot; `spoken` is for readers who cannot see it, `rows` are the heights of the dashed lines that `levels` draws."""
    parts = [
        f'<svg class="plot" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"><title>{escape(spoken)}</title>',
        axes,
        levels,
        *(_guides(each.points) for each in series if not each.colour),
        *map(_lines, series),
        *map(_points, series),
        *(_named(each, label) for each, label in zip(series, _labels(series, rows), strict=True)),
    ]
    return Markup("".join([*parts, "</svg>"]))


def marked(groups: Iterable[tuple[str, bool, Sequence[Point]]]) -> list[Series]:
    """Named groups of points, each with a colour and a shape of its own; a group that is plain, without any defense, has ink and a ring."""
    result, count = [], 0
    for name, plain, members in groups:
        colour, mark = (
            (0, UNDEFENDED) if plain else (count % COLOURS + 1, MARKS[count % len(MARKS)])
        )
        count += not plain
        points = sorted(members, key=lambda point: (point.x, point.y))
        result.append(Series(_shortened(name), tuple(points), colour, mark))
    return result


def named_settings(chosen: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What makes defenses others and not just stronger: their settings with named values."""
    found = []
    for defense in chosen:
        name = str(defense.get("name"))
        fields = dataclasses.fields(defenses.get(name)) if name in defenses.names() else ()
        named = [
            field.name
            for field in fields
            if field.type is bool or get_origin(field.type) is Literal
        ]
        found.append({key: defense.get(key) for key in named})
    return found


def _shortened(label: str) -> str:
    """ "BiDO · measure=hsic_nocco" as "BiDO hsic nocco"; a number or a yes needs the setting's name before it."""
    name, *details = label.split(" · ")
    return " ".join(
        [
            name,
            *(
                re.sub(r"^\w+=(?!True|False|none)(?=[A-Za-z])", "", detail).replace("_", " ")
                for detail in details
            ),
        ]
    )


def x_of(value: float, low: float, high: float) -> float:
    """Where a utility stands, if the field goes from `low` to `high`."""
    return LEFT + INSET + (value - low) / (high - low) * (RIGHT - LEFT - 2 * INSET)


def ticks(low: float, high: float) -> Iterator[float]:
    step = next(
        step
        for step in (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
        if (high - low) / step <= 9
    )
    yield from (
        place * step
        for place in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
    )


def frame(
    across: Iterable[tuple[float, str]],
    upwards: Iterable[tuple[float, str]],
    across_title: str,
    upward_title: str,
) -> str:
    """The axes: places with their numbers, and what is measured along each."""
    below = "".join(
        f'<line class="rule" x1="{x:.1f}" x2="{x:.1f}" y1="{BOTTOM}" y2="{BOTTOM + 5}"/>'
        f'<text x="{x:.1f}" y="{BOTTOM + 20}" text-anchor="middle">{text}</text>'
        for x, text in across
    )
    beside = "".join(
        f'<line class="rule" x1="{LEFT}" x2="{RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{text}</text>'
        for y, text in upwards
    )
    middle = (TOP + BOTTOM) / 2
    return (
        f'<g aria-hidden="true">{below}{beside}'
        f'<text class="title" x="{(LEFT + RIGHT) / 2:.1f}" y="{HEIGHT - 12}" text-anchor="middle">{across_title}</text>'
        f'<text class="title" x="14" y="{middle:.1f}" text-anchor="middle" transform="rotate(-90 14 {middle:.1f})">{upward_title}</text></g>'
    )


def dashed(rows: Sequence[float], name: str, said: str) -> str:
    """Dashed lines at the lowest and the highest of some heights, named once, to the right of them."""
    ends = dict.fromkeys(f"{y:.1f}" for y in (rows[0], rows[-1]))
    lines = "".join(
        f'<line class="guess" x1="{LEFT}" x2="{RIGHT}" y1="{y}" y2="{y}"/>' for y in ends
    )
    middle = min((rows[0] + rows[-1]) / 2, BOTTOM - 10)
    return f'{lines}<text x="{RIGHT + 8}" y="{middle - 3:.1f}">{name}<tspan x="{RIGHT + 8}" dy="15">{said}</tspan></text>'


def _guides(points: Sequence[Point]) -> str:
    """Thin lines through the undefended model: what lies left of them costs accuracy, what lies below leaks less."""
    return "".join(
        f'<path class="guide" d="M{LEFT} {point.y:.1f}H{RIGHT}M{point.x:.1f} {TOP}V{BOTTOM}"/>'
        for point in points
    )


def _lines(series: Series) -> str:
    """The intervals, and a line through the strengths."""
    bars = "".join(
        f'<path class="reach" d="M{point.x:.1f} {point.low:.1f}V{point.high:.1f}"/>'
        for point in series.points
    )
    bars += "".join(
        f'<path class="reach" d="M{point.across[0]:.1f} {point.y:.1f}H{point.across[1]:.1f}"/>'
        for point in series.points
        if point.across
    )
    route = " ".join(f"{point.x:.1f},{point.y:.1f}" for point in series.points)
    joined = f'<polyline class="route" points="{route}"/>' if len(series.points) > 1 else ""
    return f'<g class="c{series.colour}" aria-hidden="true">{bars}{joined}</g>'


def _points(series: Series) -> str:
    drawn = []
    for point in series.points:
        ring = '<circle class="ring" r="9"/>' if not series.colour else ""
        hollow = " hollow" if point.hollow else ""
        drawn.append(
            f'<g class="point c{series.colour}{hollow}" transform="translate({point.x:.1f} {point.y:.1f})">'
            f'<title>{escape(point.said)}</title>{ring}<path d="{series.mark}"/></g>'
        )
    return "".join(drawn)


def _named(series: Series, label: Label) -> str:
    box, point = label.box, label.point
    leader = ""
    if label.far:
        x, y = min(max(point.x, box.left), box.right), box.top if box.top > point.y else box.bottom
        y = (
            y
            if box.left <= point.x <= box.right or not box.top <= point.y <= box.bottom
            else (box.top + box.bottom) / 2
        )
        leader = f'<path class="leader" d="M{x:.1f} {y:.1f}L{point.x:.1f} {point.y:.1f}"/>'
    # Anchored towards its point, so that in another font it grows away from it.
    anchor, at = {
        1: ("start", box.left),
        -1: ("end", box.right),
        0: ("middle", (box.left + box.right) / 2),
    }[label.side]
    text = f'<text class="name" x="{at:.1f}" y="{box.bottom - 4:.1f}" text-anchor="{anchor}">{escape(series.name)}</text>'
    return f'<g class="c{series.colour}" aria-hidden="true">{leader}{text}</g>'


def _labels(series: Sequence[Series], levels: Sequence[float]) -> list[Label]:
    """A place for each name: near one end of its series, over as little else as possible; each is tried again once the others stand."""
    marks = [(each, point.box) for each in series for point in each.points]
    bars = [bar for each in series for point in each.points for bar in point.bars]
    bars += [
        Box(point.x - 0.5, TOP, point.x + 0.5, BOTTOM)
        for each in series
        if not each.colour
        for point in each.points
    ]
    rows = [*levels, *(point.y for each in series if not each.colour for point in each.points)]
    bars += [Box(LEFT, y - 0.5, RIGHT, y + 0.5) for y in rows]
    dots = [dot for each in series for dot in _along(each.points)]

    def cost(each: Series, place: int, label: Label, others: Sequence[Label]) -> float:
        box = label.box
        covered = (
            sum(box.shared(other.box) for other in others) * 6
            + sum(box.shared(mark) for _, mark in marks) * 4
        )
        crossed = (
            sum(box.shared(bar) for bar in bars) * 1.5 + sum(box.shared(dot) for dot in dots) * 1.5
        )
        outside = (box.right - box.left) * (box.bottom - box.top) - box.shared(
            Box(LEFT + 2, TOP - 8, RIGHT - 2, BOTTOM - 2)
        )
        # Nearest its own end of a line and nobody else's point: a name between two marks could belong to either.
        near = sum(1 for other, mark in marks if other is not each and box.shared(_wider(mark)))
        return covered + crossed + outside * 8 + near * 14 + place * 2

    chosen: list[Label | None] = [None] * len(series)
    for _ in range(4):
        for turn, each in enumerate(series):
            others = [
                label for other, label in enumerate(chosen) if label is not None and other != turn
            ]
            chosen[turn] = min(
                enumerate(_options(each)),
                key=lambda option: cost(each, option[0], option[1], others),
            )[1]
    return [label for label in chosen if label is not None]


def _options(series: Series) -> Iterator[Label]:
    """Places for a name, the best first: close before far, the ends of the series before what lies between."""
    wide = LETTER * len(series.name)
    ends = [series.points[-1], *series.points[:-1]]
    for gap in (10, 22, 36, 54):
        gap += 0 if series.colour else 4  # the undefended mark is larger
        for point in ends:
            for right, down in (
                (1, 0),
                (-1, 0),
                (0, -1),
                (0, 1),
                (1, -1),
                (1, 1),
                (-1, -1),
                (-1, 1),
            ):
                slant = gap if not (right and down) else 0.75 * gap
                left = (
                    point.x + right * slant - (0 if right > 0 else wide if right < 0 else wide / 2)
                )
                top = point.y + down * slant - (0 if down > 0 else LINE if down < 0 else LINE / 2)
                yield Label(Box(left, top, left + wide, top + LINE), point, right)


def _wider(box: Box) -> Box:
    return Box(box.left - 5, box.top - 3, box.right + 5, box.bottom + 3)


def _along(points: Sequence[Point]) -> Iterator[Box]:
    """Small boxes along the line through the points."""
    for one, two in pairwise(points):
        steps = max(1, int(math.hypot(two.x - one.x, two.y - one.y) / 6))
        for step in range(1, steps):
            x, y = one.x + (two.x - one.x) * step / steps, one.y + (two.y - one.y) * step / steps
            yield Box(x - 2, y - 2, x + 2, y + 2)
