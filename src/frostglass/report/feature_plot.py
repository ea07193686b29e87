"""Utility against what can be rebuilt: a point for each protection under its strongest attack."""

import json
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from frostglass.report.arrange import distinct, titled
from frostglass.report.charts import number
from frostglass.report.feature_answer import reach
from frostglass.report.feature_study import UNPROTECTED, FeatureStudy, Protection
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

FEWEST = 2  # protections, the plain features among them
NARROWEST = 0.1  # of what an axis spans, so that chance does not look like a difference
Span = tuple[float, float]


def feature_tradeoff(study: FeatureStudy) -> Markup:
    """Mean MCC across, similarity upwards, with 95 % intervals; nothing for a single protection."""
    if len(study.protections) < FEWEST:
        return Markup("")
    scale = study.first.references
    blind = sorted({protection.strongest.blind for protection in study.protections})
    useful = [
        value
        for p in study.protections
        for value in (p.utility.mean_mcc_low, p.utility.mean_mcc_high, p.utility.mean_mcc)
    ]
    found = [
        value
        for p in study.protections
        for s in [p.strongest.similarity]
        for value in (s.low, s.high, s.value)
    ]
    across = _spanned(useful)
    upwards = _spanned([0.0, scale.same_person, *blind, *found])
    rows, same = [_y(level, upwards) for level in blind], _y(scale.same_person, upwards)
    told = number(blind[-1], "decimal")
    if number(blind[0], "decimal") != told:
        told = f"{number(blind[0], 'decimal')} to {told}"
    levels = dashed(rows, "blind draws", told) + dashed(
        [same], "same person", number(scale.same_person, "decimal")
    )
    return drawing(
        _spoken(study),
        _axes(across, upwards),
        levels,
        _series(study, across, upwards),
        [*rows, same],
    )


def _series(study: FeatureStudy, across: Span, upwards: Span) -> list[Series]:
    """Protections that differ in nothing but their strength, together."""
    groups: dict[str, list[Protection]] = {}
    for protection in study.protections:
        groups.setdefault(json.dumps([_name(protection), _choices(protection)]), []).append(
            protection
        )
    heads = [members[0] for members in groups.values()]
    names = distinct([_name(head) for head in heads], [_choices(head) for head in heads])
    return marked(
        (name, members[0].plain, [_point(protection, across, upwards) for protection in members])
        for name, members in zip(names, groups.values(), strict=True)
    )


def _name(protection: Protection) -> str:
    return (
        " + ".join(titled(str(defense.get("name"))) for defense in protection.facts.defenses)
        or UNPROTECTED
    )


def _choices(protection: Protection) -> dict[str, Any]:
    """What makes a protection another one and not just a stronger one."""
    facts = protection.facts
    return {
        "defense": named_settings(facts.defenses),
        "cut": facts.cut,
        "model": facts.target.model,
        "attributes": facts.attributes,
    }


def _point(protection: Protection, across: Span, upwards: Span) -> Point:
    useful, found = protection.utility, protection.strongest.similarity
    y, low, high = (_y(value, upwards) for value in (found.value, found.low, found.high))
    bar = (x_of(useful.mean_mcc_low, *across), x_of(useful.mean_mcc_high, *across))
    return Point(
        x_of(useful.mean_mcc, *across), y, low, high, _said(protection), protection.vacuous, bar
    )


def _spanned(values: Sequence[float]) -> Span:
    """The values shown: those of the data and a margin."""
    low, high = min(values), max(values)
    margin = max(0.04 * (high - low), (NARROWEST - (high - low)) / 2)
    return low - margin, high + margin


def _y(value: float, upwards: Span) -> float:
    low, high = upwards
    return BOTTOM - (value - low) / (high - low) * (BOTTOM - TOP)


def _axes(across: Span, upwards: Span) -> str:
    return frame(
        [(x_of(at, *across), number(at, "decimal")) for at in ticks(*across)],
        [(_y(at, upwards), number(at, "decimal")) for at in ticks(*upwards)],
        "what the server still tells (mean MCC) →",
        "similarity to the victim →",
    )


def _said(protection: Protection) -> str:
    attempt, useful = protection.strongest, protection.utility
    vacuous = " (vacuous)" if protection.vacuous else ""
    return (
        f"{protection.name}{vacuous}: MCC {number(useful.mean_mcc, 'decimal')} ({number(useful.mean_mcc_low, 'decimal')} to "
        f"{number(useful.mean_mcc_high, 'decimal')}), similarity {number(attempt.similarity.value, 'decimal')} ({reach(attempt.similarity)}) by {attempt.method}"
    )


def _spoken(study: FeatureStudy) -> str:
    return (
        f"What the server still tells and what an attacker rebuilds, for {len(study.protections)} protections. "
        + "; ".join(map(_said, study.protections))
    )
