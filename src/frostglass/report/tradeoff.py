"""Utility against leakage: a point for each model or protection under its strongest attack."""

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, get_origin

from frostglass.defenses.base import defenses
from frostglass.report.labels import distinct, known
from frostglass.report.plot import COLOURS, MARKS, PLAIN, Axis, Level, Plot, Point, Series
from frostglass.report.recognition import rate, top1_short
from frostglass.report.study import Study, Subject
from frostglass.report.text import number, span

FEWEST = {"model": 3, "features": 2}  # subjects; fewer are compared in a sentence
NARROWEST = 0.1  # range of an axis, so that chance does not look like a difference


def tradeoff(study: Study) -> Plot | None:
    """Return utility and score of the strongest attack, or None for too few subjects."""
    subjects, unit = study.subjects, study.unit
    if len(subjects) < FEWEST[study.surface]:
        return None
    baseline = sorted({subject.strongest.baseline for subject in subjects})
    low, high = number(baseline[0], unit), number(baseline[-1], unit)
    joint = "–" if unit == "percent" else " to "
    first = number(baseline[0], "points") if unit == "percent" else low
    levels = [Level(baseline, "prior only", high if low == high else f"{first}{joint}{high}")]
    titles = [_title(subject) for subject in subjects]
    if study.surface == "model":
        across = accuracy_axis([subject.accuracy for subject in subjects], study.tested_on)
        title = f"share recognised (false-accept rate {rate(subjects[0].strongest)}) →"
        upward = Axis(0.0, 1.02, title, "percent")
        opening = f"Accuracy on {study.tested_on} and share recognised of {len(subjects)} models. "
    else:
        same = subjects[0].facts.controls.references.same_person
        levels.append(Level([same], "same person", number(same, "decimal")))
        across = decimal_axis(
            [value for s in subjects for value in (*_mcc(s), s.utility.mean_mcc)],
            "utility for the server (mean MCC) →",
        )
        scores = [s.strongest.score for s in subjects]
        values = [value for s in scores for value in (s.low, s.high, s.value)]
        upward = decimal_axis([0.0, same, *baseline, *values], "similarity to the victim →")
        opening = f"Utility and similarity of reconstructions of {len(subjects)} protections. "
    return Plot(opening + "; ".join(titles), across, upward, levels, _series(study))


def _series(study: Study) -> list[Series]:
    """Join subjects that differ in nothing but the strength of their defense."""
    groups: dict[str, list[Subject]] = {}
    for subject in study.subjects:
        key = [subject.kind, subject.strongest.defense, _choices(subject)]
        groups.setdefault(json.dumps(key), []).append(subject)
    heads = [members[0] for members in groups.values()]
    names = distinct([head.strongest.defense for head in heads], list(map(_choices, heads)))
    result: list[Series] = []
    for name, members in zip(names, groups.values(), strict=True):
        count = sum(bool(each.colour) for each in result)
        colour, mark = count % COLOURS + 1, MARKS[count % len(MARKS)]
        if members[0].plain:
            colour, mark = 0, PLAIN
        points = sorted(map(_point, members), key=lambda point: (point.x, -point.y))
        result.append(Series(_shortened(name), tuple(points), colour, mark))
    return result


def _choices(subject: Subject) -> dict[str, Any]:
    """Return what makes a defense another one and not just a stronger one."""
    facts = subject.strongest.facts
    choices: dict[str, Any] = {"defense": [_named_settings(each) for each in facts.defenses]}
    if facts.surface == "model":
        return choices | {"recipe": subject.recipe}
    place = {"cut": facts.cut, "model": facts.target.model, "attributes": facts.attributes}
    return choices | place


def _named_settings(defense: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a defense whose values are words or yes and no."""
    method = known(defenses, defense)
    fields: Iterable[dataclasses.Field[Any]] = dataclasses.fields(method) if method else ()
    named = [f.name for f in fields if f.type is bool or get_origin(f.type) is Literal]
    return {key: defense.get(key) for key in named}


def _shortened(label: str) -> str:
    """Shorten "BiDO · measure=hsic_nocco" to "BiDO hsic nocco"; numbers keep their setting."""
    name, *details = label.split(" · ")
    words = [re.sub(r"^\w+=(?!True|False|none)(?=[A-Za-z])", "", detail) for detail in details]
    return " ".join([name, *(word.replace("_", " ") for word in words)])


def _point(subject: Subject) -> Point:
    score, title = subject.strongest.score, _title(subject)
    reach = (score.low, score.high)
    if subject.strongest.surface == "model":
        return Point(subject.accuracy, score.value, reach, title, subject.vacuous)
    x = subject.utility.mean_mcc
    return Point(x, score.value, reach, title, subject.vacuous, _mcc(subject))


def _mcc(subject: Subject) -> tuple[float, float]:
    return subject.utility.mean_mcc_low, subject.utility.mean_mcc_high


def _title(subject: Subject) -> str:
    entry, vacuous = subject.strongest, " (vacuous)" if subject.vacuous else ""
    score = entry.score
    if entry.surface == "model":
        right, share = (number(x, "percent") for x in (subject.accuracy, score.value))
        return (
            f"{subject.name}{vacuous}: accuracy {right}, recognised {share} ({span(score)}), "
            f"{top1_short(entry)}"
        )
    low, high = (number(x, "decimal") for x in _mcc(subject))
    return (
        f"{subject.name}{vacuous}: MCC {number(subject.utility.mean_mcc, 'decimal')} ({low} to "
        f"{high}), similarity {number(score.value, 'decimal')} ({span(score, 'decimal')}) by "
        f"{entry.method}"
    )


def accuracy_axis(values: Sequence[float], images: str) -> Axis:
    """Show the accuracies and a margin, at least two points wide."""
    low, high = min(values), max(values)
    margin = max(0.04 * (high - low), 0.01 - (high - low) / 2)
    title = f"accuracy on {images} →"
    return Axis(max(low - margin, 0.0), min(high + margin, 1.0), title, "percent")


def decimal_axis(values: Sequence[float], title: str) -> Axis:
    """Show the values and a margin, at least a tenth wide."""
    low, high = min(values), max(values)
    margin = max(0.04 * (high - low), (NARROWEST - (high - low)) / 2)
    return Axis(low - margin, high + margin, title, "decimal")
