"""The sections of further measures: what a config asked for, and what a defense gains."""

from frostglass.metrics.base import SHARES
from frostglass.report import parts
from frostglass.report.entry import Entry
from frostglass.report.facts import Measured
from frostglass.report.measures import explained, further_scores, gains
from frostglass.report.panels import common
from frostglass.report.study import Study
from frostglass.report.text import Kind, number

GAIN_NOTE = (
    "Points of attack accuracy (top-1 of the first evaluator, mean over people) that a defense "
    "takes from the same attack on the undefended model, for each point of accuracy that it costs "
    "the model: TL-DMI’s Δ. The interval is over people and takes the accuracies as exact. Where "
    "a defense costs no accuracy the ratio is undefined; where it costs less than a few points, it "
    "means little. A ratio says nothing about how much still leaks."
)


def measures_sections(study: Study) -> list[parts.Section]:
    """Return the further measures, if there are any."""
    content = [*_further(study), *(_gains(study) if study.surface == "model" else [])]
    return [parts.Section("Measures", "Further measures", content)] if content else []


def _further(study: Study) -> list[parts.Part]:
    scores = {entry.label: further_scores(entry) for entry in study.entries}
    names = list(dict.fromkeys(name for own in scores.values() for name in own))
    if not names:
        return []

    def row(entry: Entry) -> list[parts.Cell | str]:
        own = scores[entry.label]
        cells = [_cell(name, *own[name]) if name in own else parts.Cell("–") for name in names]
        return [common.entry_cell(entry), *cells]

    asked = [each for run in study.runs for each in run.facts.settings.get("metrics") or []]
    lines = dict.fromkeys(explained(asked))
    head = ["audit", *(name.replace("_", " ") for name in names)]
    rows = [row(entry) for entry in study.entries]
    content: list[parts.Part] = [
        parts.Table("Further measures of each audit", head, rows, long=study.many),
        parts.Note(
            "Small figures: 95 % interval over people, then the prior-only baseline. The command "
            "“frostglass show” with the name of a metric explains each."
        ),
    ]
    if lines:
        items = [common.bold(name, f": {text}") for name, text in lines]
        content.append(parts.Items(items, "plain note"))
    return content


def _cell(name: str, score: Measured, baseline: Measured) -> parts.Cell:
    kind: Kind = "percent" if name.startswith(SHARES) else "plain"
    small = [
        f"{number(score.low, kind)} to {number(score.high, kind)}",
        f"prior only {number(baseline.value, kind)}",
    ]
    return parts.Cell(number(score.value, kind), small)


def _gains(study: Study) -> list[parts.Part]:
    rows: list[list[parts.Cell | str]] = []
    for entry, cost, ratio in gains(study):
        cell = parts.Cell("–", ["costs no accuracy"])
        if ratio is not None:
            value, low, high = map(number, ratio)
            cell = parts.Cell(value, [f"{low} to {high}"])
        rows.append([common.entry_cell(entry), f"{number(cost, 'points')} points", cell])
    if not rows:
        return []
    head = ["audit", "accuracy lost", "Δ attack accuracy / Δ accuracy"]
    return [
        parts.Table("Gain of each defense for its cost", head, rows, long=study.many),
        parts.Note(GAIN_NOTE),
    ]
