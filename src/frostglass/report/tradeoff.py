"""Utility against leakage: a point for each model, so that it can be seen what each defense buys and what it costs."""

import json
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from frostglass.report.arrange import Aim, Study, distinct
from frostglass.report.charts import number, span
from frostglass.report.plot import (
    BOTTOM,
    TOP,
    Point,
    Series,
    dashed,
    drawing,
    frame,
    marked,
    named_settings,
    ticks,
    x_of,
)

FEWEST = 3  # models; two are compared in a sentence


def tradeoff(study: Study) -> Markup:
    """Held-out accuracy across, share recognised upwards, the strongest attack on each model; nothing for fewer than three models."""
    if len(study.aims) < FEWEST:
        return Markup("")
    low, high = _range([aim.accuracy for aim in study.aims])
    levels = sorted(
        {aim.strongest.facts.prior_only[aim.strongest.strictest].value for aim in study.aims}
    )
    return drawing(
        _spoken(study),
        _axes(low, high),
        _guessing(levels),
        _series(study, low, high),
        [_y(level) for level in levels],
    )


def _series(study: Study, low: float, high: float) -> list[Series]:
    """Models that differ in nothing but their defense's strength, together."""
    groups: dict[str, list[Aim]] = {}
    for aim in study.aims:
        groups.setdefault(json.dumps([aim.kind, aim.strongest.defense, _choices(aim)]), []).append(
            aim
        )
    heads = [members[0] for members in groups.values()]
    names = distinct([head.strongest.defense for head in heads], [_choices(head) for head in heads])
    return marked(
        (name, members[0].kind == "undefended", [_point(aim, low, high) for aim in members])
        for name, members in zip(names, groups.values(), strict=True)
    )


def _choices(aim: Aim) -> dict[str, Any]:
    """What makes a defense another defense and not just a stronger one: settings with named values, and how the model was trained."""
    return {"defense": named_settings(aim.strongest.facts.defenses), "recipe": aim.recipe}


def _point(aim: Aim, low: float, high: float) -> Point:
    leak = aim.strongest.leak
    return Point(
        x_of(aim.accuracy, low, high),
        _y(leak.value),
        _y(leak.low),
        _y(leak.high),
        _said(aim),
        aim.vacuous,
    )


def _range(values: Sequence[float]) -> tuple[float, float]:
    """The accuracies shown: those of the data and a margin, at least two points wide."""
    low, high = min(values), max(values)
    margin = max(0.04 * (high - low), 0.01 - (high - low) / 2)
    return max(low - margin, 0.0), min(high + margin, 1.0)


def _y(share: float) -> float:
    return BOTTOM - min(max(share, 0.0), 1.0) * (BOTTOM - TOP - 8)


def _axes(low: float, high: float) -> str:
    across = [(x_of(at, low, high), number(at, "percent")) for at in ticks(low, high)]
    upwards = [(_y(at), number(at, "percent")) for at in (0, 0.25, 0.5, 0.75, 1)]
    return frame(across, upwards, "model is right on held-out pictures →", "share recognised →")


def _guessing(levels: Sequence[float]) -> str:
    """What random pictures reach: a dashed line, or the lowest and the highest where the strictest judges of the models differ."""
    rows = [_y(level) for level in levels]
    alike = f"{rows[0]:.1f}" == f"{rows[-1]:.1f}"
    said = (
        number(levels[-1], "percent")
        if alike
        else f"{number(levels[0], 'points')}–{number(levels[-1], 'percent')}"
    )
    return dashed(rows, "guessing", said)


def _said(aim: Aim) -> str:
    leak = aim.strongest.leak
    vacuous = " (vacuous)" if aim.vacuous else ""
    return f"{aim.name}{vacuous}: right on {number(aim.accuracy, 'percent')}, recognised {number(leak.value, 'percent')} ({span(leak)})"


def _spoken(study: Study) -> str:
    return (
        f"Accuracy on held-out pictures and share of people recognised, for {len(study.aims)} models. "
        + "; ".join(map(_said, study.aims))
    )
