"""Figures of analyses: as parts of a page, and as SVG files that stand alone."""

import math
import re
from collections.abc import Sequence
from importlib import resources

from markupsafe import Markup, escape

from frostglass.analyses import _files
from frostglass.analyses._result import Axis, Cell, Curve, Figure, Table
from frostglass.report import parts
from frostglass.report.plot import (
    COLOURS,
    MARKS,
    NARROW,
    WIDE,
    Plot,
    Point,
    Series,
    draw,
    key,
)
from frostglass.report.plot import Axis as PlotAxis
from frostglass.report.text import number

CROWDED = 60  # points; more have a legend below the drawing instead of names in it
LONG = 14  # rows of a table that scrolls
MARGIN = 0.04  # of the range of values, on both sides
ROW, TOP = 22, 34  # pixels of a line of a legend, and above a drawing


def analysis_section(record: _files.Record) -> parts.Section:
    """Return the section of a page that shows an analysis."""
    analysis = record.analysis
    content: list[parts.Part] = [parts.Note(text) for text in analysis.notes]
    for figure in analysis.figures:
        plot = plot_of(figure)
        css = "legend" if plot.legend else "legend narrow"
        content += [
            parts.Heading(figure.title),
            parts.Figure(figure.title, draw(plot) + draw(plot, NARROW)),
            parts.Items([key(series) for series in plot.series], css),
        ]
    content += [part for table in analysis.tables for part in _table(table)]
    title = record.title[0].upper() + record.title[1:]
    return parts.Section(f"Analysis: {record.title}", f"Analysis: {title}", content)


def standalone(figure: Figure) -> str:
    """Draw a figure as an SVG file, with its title above and its curves named below."""
    plot = plot_of(figure)
    height = TOP + WIDE.height + ROW * math.ceil(len(plot.series) / 2) * plot.legend
    inner = str(draw(plot)).replace(
        '<svg class="plot wide"',
        f'<svg class="plot wide" y="{TOP}" width="{WIDE.width}" height="{WIDE.height}"',
        1,
    )
    names = [_legend_line(series, place) for place, series in enumerate(plot.series)]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDE.width} {height}" '
        f'width="{WIDE.width}" height="{height}"><style>{_style()}</style>'
        f'<rect width="100%" height="100%" fill="var(--card)"/>'
        f'<g class="plot"><text class="title" x="16" y="22">{escape(figure.title)}</text></g>'
        f"{inner}{''.join(names) if plot.legend else ''}</svg>\n"
    )


def plot_of(figure: Figure) -> Plot:
    """Return an analysis' figure as a plot."""
    points = sum(len(curve.x) for curve in figure.curves)
    series = []
    for place, curve in enumerate(figure.curves):
        colour, mark = place % COLOURS + 1, MARKS[place % len(MARKS)]
        series.append(Series(curve.name, _points(figure, curve), colour, mark, curve.joined))
    across = _axis(figure.across, [value for curve in figure.curves for value in curve.x])
    heights = [v for c in figure.curves for v in (*c.y, *c.low, *c.high)]
    upward = _axis(figure.upward, heights)
    legend = points > CROWDED or len(figure.curves) > COLOURS
    return Plot(figure.title, across, upward, (), series, legend)


def _points(figure: Figure, curve: Curve) -> tuple[Point, ...]:
    ends = zip(curve.low or curve.y, curve.high or curve.y, strict=True)
    result = []
    for x, y, (low, high) in zip(curve.x, curve.y, ends, strict=True):
        title = f"{curve.name}: {_text(figure.across, x)}, {_text(figure.upward, y)}"
        reach = (_scaled(figure.upward, low), _scaled(figure.upward, high))
        place = _scaled(figure.across, x), _scaled(figure.upward, y)
        result.append(Point(*place, reach, title, hollow=False))
    return tuple(result)


def _text(axis: Axis, value: float) -> str:
    return number(value, "percent" if axis.percent else "plain")


def _scaled(axis: Axis, value: float) -> float:
    # The interval of a value on a log scale may reach 0.
    return math.log10(max(value, 1e-300)) if axis.log else value


def _axis(axis: Axis, values: Sequence[float]) -> PlotAxis:
    scaled = [_scaled(axis, value) for value in values]
    low, high = min(scaled), max(scaled)
    margin = MARGIN * (high - low) or 0.05 * max(abs(high), 1e-9)
    title = f"log₁₀ of {axis.title}" if axis.log else axis.title
    unit = "percent" if axis.percent and not axis.log else "plain"
    return PlotAxis(low - margin, high + margin, str(escape(title)), unit)  # type: ignore[arg-type]


def _table(table: Table) -> list[parts.Part]:
    rows = [[_cell(cell) for cell in row] for row in table.rows]
    long = len(rows) > LONG
    return [
        parts.Heading(table.title),
        parts.Table(table.title, list(table.head), rows, long=long),
    ]


def _cell(cell: Cell) -> str:
    return cell if isinstance(cell, str) else number(cell)


def _legend_line(series: Series, place: int) -> str:
    x, y = 70 + 390 * (place % 2), TOP + WIDE.height + 8 + ROW * (place // 2)
    return (
        f'<g class="c{series.colour} plot"><g class="point" transform="translate({x} {y})">'
        f'<path d="{series.mark}"/></g><text x="{x + 16}" y="{y + 4}">{escape(series.name)}</text>'
        "</g>"
    )


def _style() -> Markup:
    """Return the rules of the page's style that drawings use: colours and plots."""
    text = resources.files("frostglass.report").joinpath("style.css").read_text(encoding="utf-8")
    roots = re.findall(r"^:root \{.*?^\}", text, re.MULTILINE | re.DOTALL)
    lines = [line for line in text.splitlines() if line.startswith((".plot", ".c0 "))]
    # On a page a drawing fills its box; here it has its own size, below the title.
    own = f".plot.wide {{ width: {WIDE.width}px; height: {WIDE.height}px; }}"
    return Markup("\n".join([*roots, *lines, own]))
