"""The frontier as a drawing: utility and verified leak of every model, with their intervals."""

import re
from collections.abc import Sequence
from importlib import resources

from frostglass.auditing.expand import UNDEFENDED
from frostglass.core.types import HELD_OUT_IMAGES
from frostglass.hardening.final import Model
from frostglass.hardening.goal import Goal
from frostglass.report.plot import COLOURS, MARKS, PLAIN, Axis, Level, Plot, Point, Series, draw
from frostglass.report.seeds import SeedRow
from frostglass.report.text import number
from frostglass.report.tradeoff import accuracy_axis, decimal_axis

NAMESPACE = 'xmlns="http://www.w3.org/2000/svg"'


def frontier(models: Sequence[Model], population: str, goal: Goal) -> str:
    """Return an SVG file of its own; the style is that of the report."""
    baselines = sorted(row.shares["verified, prior only"].value for row in _rows(models))
    low, high = number(baselines[0], "percent"), number(baselines[-1], "percent")
    levels = [
        Level([baselines[0], baselines[-1]], "prior only", low if low == high else f"to {high}")
    ]
    shown = [value for each in models for value in (each.utility.low, each.utility.high)]
    if goal.surface == "model":
        across, verified = accuracy_axis(shown, HELD_OUT_IMAGES), "verified at the first guess"
    else:
        across = decimal_axis(shown, f"utility for the server (mean {goal.title}) →")
        verified = "images verified"
    name = goal.title[0].upper() + goal.title[1:]
    plot = Plot(
        f"{name} and verified leak of {len(models)} models of {population}. "
        + "; ".join(_title(each, goal) for each in models),
        across,
        Axis(0.0, 1.02, f"{verified}, by the strongest attack →", "percent"),
        levels,
        _series(models, goal),
    )
    style = resources.files("frostglass.report").joinpath("style.css").read_text(encoding="utf-8")
    drawn = str(draw(plot)).replace("<svg ", f"<svg {NAMESPACE} ", 1)
    return re.sub(r">", f"><style>{style.replace('<', '&lt;')}</style>", drawn, count=1) + "\n"


def _rows(models: Sequence[Model]) -> list[SeedRow]:
    return [row for model in models for row in model.rows.values()]


def _title(model: Model, goal: Goal) -> str:
    return f"{model.title}: {goal.title} {model.utility}, verified {model.leak} by {model.attack}"


def _series(models: Sequence[Model], goal: Goal) -> list[Series]:
    series, count = [], 0
    for model in models:
        colour, mark = count % COLOURS + 1, MARKS[count % len(MARKS)]
        if model.title == UNDEFENDED:
            colour, mark = 0, PLAIN
        else:
            count += 1
        utility, leak = model.utility, model.leak
        point = Point(
            utility.value,
            leak.value,
            (leak.low, leak.high),
            _title(model, goal),
            False,
            (utility.low, utility.high),
        )
        series.append(Series(model.title, (point,), colour, mark))
    return series
