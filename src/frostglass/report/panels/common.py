"""Parts that the panels of both surfaces share: matrix, images, controls and settings."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from frostglass.metrics.base import SHARES
from frostglass.report import parts
from frostglass.report.answer import answer
from frostglass.report.charts import shape
from frostglass.report.entry import Entry, strongest
from frostglass.report.load import Run
from frostglass.report.networks import EvaluatorFacts
from frostglass.report.panels.closest import closest_sections
from frostglass.report.panels.images import images_sections
from frostglass.report.panels.people import (
    every_person,
    people_section,
    price_section,
    strata_sections,
)
from frostglass.report.panels.summary import checks_section, files_table, summary
from frostglass.report.panels.threat import (
    cost_section,
    limits_section,
    not_run_section,
    threat_section,
)
from frostglass.report.panels.verification import verification_section
from frostglass.report.plot import NARROW, draw, key
from frostglass.report.recognition import top1_short
from frostglass.report.study import Study, Subject
from frostglass.report.text import Kind, number, slug, span, spoken, toml
from frostglass.report.tradeoff import tradeoff


@dataclass(frozen=True)
class Look:
    """How a page is made: bytes of its images, and runs that its stores do not confirm."""

    image_bytes: int
    distrusted: frozenset[str] = frozenset()


MAX_TILES = 4  # subjects with a tile beside the answer
STAR = Markup(
    '<span class="star" role="img" aria-label="strongest" title="strongest attack on {}">★</span>'
)
TRIED: dict[str, tuple[parts.Status, str]] = {
    "tried": ("ok", "✓ tried"),
    "vacuous": ("void", "tried, vacuous"),
    "missing": ("look", "! missing"),
}


def panel(
    study: Study,
    look: Look,
    notes: Sequence[str],
    findings: Sequence[parts.Section],
    controls: parts.Section,
    appendix: Sequence[parts.Section],
) -> parts.Panel:
    """Put page one before findings, people, controls and limits, and the rest into the appendix."""
    closest, used = closest_sections(study, look.image_bytes // 2)
    sections = [
        *(threat_section(study), *findings, *closest, people_section(study)),
        *(*strata_sections(study), price_section(study), verification_section(study), controls),
        *(cost_section(study), not_run_section(study), limits_section(study)),
    ]
    more = [
        *checks_section(study, look.distrusted),
        *images_sections(study, look.image_bytes - used),
        every_person(study, exposed_items),
        *appendix,
        parts.Section("Files", "Files of the audited models", [files_table(study)]),
        settings_section(study),
    ]
    said, sound = answer(study), [s for s in study.subjects if not s.vacuous]
    tiles = [_tile(study, subject) for subject in sound] if len(sound) <= MAX_TILES else []
    reasons = [(names, reason) for reason, names in study.vacuous_reasons.items()]
    read = [*notes, *shared_notes(study, reasons=not said["vacuous"])]
    first = summary(study, look.distrusted)
    return parts.Panel(
        study.name, first, said["vacuous"], reasons, said["sentences"], tiles, read, sections, more
    )


def _tile(study: Study, subject: Subject) -> parts.Tile:
    accuracy = f"model accuracy {number(subject.accuracy, 'percent')}"
    unit, small = "recognised", f"{top1_short(subject.strongest)} · {accuracy}"
    if study.surface == "features":
        entry, mcc = subject.strongest, number(subject.utility.mean_mcc, "decimal")
        share = number(entry.facts.scores[entry.verified].value, "percent")
        told = "" if entry.embeds else f"recognised {share} · "  # no image to recognise
        unit, small = "similarity", f"{told}server’s MCC {mcc}"
    return parts.Tile(subject.name, number(subject.strongest.score.value, study.unit), unit, small)


def bold(text: str, rest: str) -> Markup:
    return Markup("<b>{}</b>{}").format(text, rest)


# Every attack on every subject


@dataclass(frozen=True)
class Square:
    """One attack on one subject: its strongest audit there, if any, and how many there are."""

    entry: Entry | None
    audits: int
    strongest: bool


def squares(study: Study) -> dict[str, list[Square]]:
    """Return every attack by name, with a square for each subject."""

    def square(subject: Subject, method: str) -> Square:
        entries = [entry for entry in subject.entries if entry.method == method]
        best = strongest(entries) if entries else None
        return Square(best, len(entries), method in winners(subject))

    return {m: [square(subject, m) for subject in study.subjects] for m in study.methods}


def winners(subject: Subject) -> list[str]:
    """Return the strongest attacks: one, several that are equal, or none."""
    best = subject.strongest
    if best.surface == "features":
        return [] if best.vacuous else [best.method]
    value = best.score.value
    methods = [entry.method for entry in subject.entries if entry.score.value == value > 0]
    return list(dict.fromkeys(methods))


def square_cell(square: Square, subject: Subject, small: Sequence[str]) -> parts.Cell:
    entry = square.entry
    if entry is None:
        return parts.Cell(Markup('<span title="not tried">–</span>'))
    tag = "b" if square.strongest else "span"
    share = number(entry.score.value, entry.unit)
    text = Markup(f'<{tag} class="share">{{}}</{tag}>').format(share)
    if square.strongest:
        text += STAR.format(subject.name)
    more = [f"best of {number(square.audits, 'count')}"] if square.audits > 1 else []
    vacuous = ["vacuous"] if entry.vacuous else []
    return parts.Cell(text, (*small, *more, *vacuous), css="hollow" if vacuous else "")


def matrix_legend(study: Study, best: str) -> parts.Items:
    gaps = any(square.entry is None for row in squares(study).values() for square in row)
    items: list[str] = [Markup('<span class="star">★</span> ') + best]
    items += ["Dashed and slanted: vacuous, proves nothing"] * bool(study.vacuous_reasons)
    return parts.Items([*items, *["– not tried"] * gaps], "legend")


def tradeoff_parts(study: Study) -> list[parts.Part]:
    """Return the plot for wide and for narrow screens; nothing for too few subjects."""
    plot = tradeoff(study)
    if plot is None:
        return []
    if study.surface == "model":
        label, point, plain = "Accuracy and leakage of each model", "model", "the undefended model"
        safe, best = "private model", "accurate"
        bars = "Vertical bars are 95 % intervals over people"
    else:
        label, point = "Utility and similarity under each protection", "protection"
        plain, safe, best = "unprotected features", "safe feature", "useful to the server"
        bars = "Bars are 95 % intervals over people"
    text = (
        f"Each point is a {point} under its strongest attack; a line joins the strengths of one "
        f"defense. Right and low is best: {best}, and hard to reconstruct people from."
    )
    if study.vacuous:
        text = f"This audit is vacuous: low points mean a weak attack, not a {safe}."
    text += f" {bars}."
    text += f" Thin lines cross at {plain}." * any(s.plain for s in study.subjects)
    vacuous = any(subject.vacuous for subject in study.subjects)
    text += " Hollow points are vacuous and prove nothing." * vacuous
    return [
        parts.Figure(label, draw(plot) + draw(plot, NARROW)),
        parts.Items([key(series) for series in plot.series], "legend narrow"),
        parts.Note(text),
    ]


# Notes and controls


def shared_notes(study: Study, *, reasons: bool) -> list[str]:
    """Say what the sentences leave out: failures, missing kinds of attack, vacuity, warnings."""
    defense = "defense" if study.surface == "model" else "protection"
    notes = [f"This audit failed and is missing here: {reason}" for reason in study.failed]
    notes += [f"This audit was not run and is missing here: {reason}" for reason in study.not_run]
    notes += [
        f"No sound attack of these kinds was run on {names}: {kinds}. A {defense} may stop one "
        "kind and not another."
        for kinds, names in study.untried.items()
    ]
    if reasons and study.vacuous_reasons:
        text = "; ".join(f"{names} ({why})" for why, names in study.vacuous_reasons.items())
        notes.append(f"These audits are vacuous and prove nothing: {text}.")
    warned = sum(bool(entry.facts.controls.warnings) for entry in study.entries)
    if warned:
        total = number(len(study.entries), "count")
        notes.append(
            f"{number(warned, 'count')} of {total} audits carry warnings; they are listed under "
            "Controls."
        )
    return notes


def strongest_note(study: Study, rule: str) -> list[str]:
    if max(len(subject.entries) for subject in study.subjects) == 1:
        return []
    labels = [spoken(subject.strongest.label) for subject in study.subjects]
    return [f"{rule}{': ' + ', '.join(labels) if len(labels) <= 6 else ''}."]


def evaluator_checks(study: Study) -> list[tuple[str, str, parts.Cell]]:
    """Return name, meaning and verdict of each evaluator's own quality."""

    def check(place: int, network: EvaluatorFacts) -> tuple[str, str, parts.Cell]:
        status: parts.Status = "void" if study.vacuous else "ok"
        accepted = f"accepts {number(network.verifier.true_accepts[0], 'percent')}"
        text, small = accepted, [] if network.accuracy is None else [accepted]
        meaning = f"Share of held-out private images that this verifier ({network.model}) accepts."
        if network.accuracy is not None:
            text = number(network.accuracy.test, "percent")
            meaning = (
                f"Accuracy of this classifier ({network.model}) on held-out private images, and "
                "the share of them that it accepts as their person."
            )
        cell = parts.verdict(text, "look" if network.excluded else status, *small)
        return f"Evaluator {place}", f"{meaning} A weak evaluator overlooks leaks.", cell

    return [check(place, network) for place, network in enumerate(study.first.evaluators, 1)]


def void_note(study: Study) -> list[parts.Part]:
    text = "Void: this check passed, but the audit is vacuous, so it proves nothing."
    return [parts.Note(text)] if study.vacuous_reasons else []


def kinds_table(study: Study) -> parts.Part:
    noun = "model" if study.surface == "model" else "protection"

    def cell(state: str) -> parts.Cell:
        status, text = TRIED.get(state, (None, ""))
        return parts.Cell("", status=status, tag=text) if status else parts.Cell("–")

    rows = [
        [parts.named_cell(subject.label), *map(cell, subject.attack_kinds.values())]
        for subject in study.subjects
    ]
    head = [noun, *study.subjects[0].attack_kinds]
    table = parts.Table(f"Kinds of attack tried on each {noun}", head, rows, long=study.many)
    return parts.folded_if(study.many, f"Kinds of attack on {len(rows)} subjects", table)


def exposed_items(study: Study, entries: Sequence[Entry]) -> parts.Items:
    items = []
    for entry in entries:
        people = Markup(", ").join(
            Markup("<bdi>{}</bdi> ({})").format(name, number(value, study.unit))
            for name, value in entry.exposed
        )
        rest = people or "no reconstruction was recognised"
        vacuous = " (vacuous audit: others may be as exposed)" if entry.vacuous else ""
        items.append(bold(entry.label, Markup(": {}{}").format(rest, vacuous)))
    return parts.Items(items)


def closing_controls(study: Study) -> list[parts.Part]:
    """Return failed audits, those that were not run, and warnings."""
    content: list[parts.Part] = []
    for heading, missing in (
        ("Audits that failed", study.failed),
        ("Audits that were not run", study.not_run),
    ):
        if missing:
            content += [parts.Heading(heading), parts.Items(missing, "plain warnings")]
    content.append(parts.Heading("Warnings"))
    if not study.warnings:
        return [*content, parts.Note(f"None{', but the audit is vacuous' * study.vacuous}.", "")]
    pairs = study.warnings.items()
    items = [Markup("{}<small>{}</small>").format(warning, names) for warning, names in pairs]
    return [*content, parts.Items(items, "plain warnings")]


def score_cell(entry: Entry, name: str) -> parts.Cell:
    """Return a score with its interval and the prior-only baseline."""
    unit: Kind = "percent" if name.startswith(SHARES) else "decimal"
    score, baseline = entry.facts.scores[name], entry.facts.prior_only[name].value
    small = [span(score, unit), f"prior only {number(baseline, unit)}"]
    return parts.Cell(number(score.value, unit), small)


def recognised_head(study: Study) -> Markup:
    places = study.verifiers
    marks = Markup("").join(shape(place - 1) for place in places)
    numbers = " or ".join(map(str, places))
    return Markup("{} recognised (evaluator\u00a0{})").format(marks, numbers)


def top1_head(name: str) -> Markup:
    place = int(name.rpartition("_")[2])
    return Markup("{} top-1 of evaluator\u00a0{}").format(shape(place - 1, False), place)


def entry_cell(entry: Entry) -> parts.Cell:
    return parts.named_cell(entry.label, *["vacuous"] * bool(entry.vacuous))


# Settings


def settings_section(study: Study) -> parts.Section:
    content: list[parts.Part] = []
    for run in study.runs:
        name, file = run.facts.name, f"{slug(run.facts.name)}.toml"
        versions = "\n".join(f"{name} {version}" for name, version in run.facts.versions.items())
        entries = [entry for entry in study.entries if entry.run is run]
        text = Markup("To repeat {}, save its settings as <code>{}</code> and run").format(
            name, file
        )
        content += [
            parts.Note(text),
            parts.Code(f"frostglass run {shlex.quote(file)} --threads {run.facts.threads}"),
            parts.Details(f"Settings of {name}", [parts.Code(toml(run.facts.settings))]),
            parts.Details(
                "Data, versions and hashes",
                [
                    *(parts.Heading("Data"), parts.Code(toml(run.facts.data))),
                    *(parts.Heading("Versions"), parts.Code(versions)),
                    *(parts.Heading("Networks and steps"), _keys_table(study, run, entries)),
                    *(parts.Heading("Every parameter"), *_parameters(entries)),
                ],
            ),
        ]
    return parts.Section("Settings", "Settings, versions and hashes", content)


def _keys_table(study: Study, run: Run, entries: Sequence[Entry]) -> parts.Table:
    facts = run.facts
    names = [f"evaluator {place}" for place in range(1, len(facts.evaluators) + 1)] + ["embedder"]
    rows: list[list[parts.Cell | str]] = [
        [name, "–", net.model, number(net.parameters, "count"), "–", _code(net.key)]
        for name, net in zip(names[: len(facts.networks)], facts.networks, strict=True)
    ]
    for entry in entries:
        own, cut = entry.facts, getattr(entry.facts, "cut", None)
        model = f"{own.target.model}, cut at {cut}" if cut else own.target.model
        keys = Markup("<br>").join(
            Markup("{} {}").format(step, _code(text)) for step, text in own.keys.items() if text
        )
        size = number(own.target.parameters, "count")
        rows.append([entry.label, own.label, model, size, number(own.seed), keys])
    head = ["audit", "in rows.csv", "model", "parameters", "seed", "keys"]
    return parts.Table("Keys of all steps", head, rows, long=study.many)


def _code(text: str) -> Markup:
    return Markup("<code>{}</code>").format(text)


def _parameters(entries: Sequence[Entry]) -> list[parts.Part]:
    content: list[parts.Part] = []
    for entry in entries:
        own = entry.facts
        more = (
            {"prior": own.prior or {}}
            if entry.surface == "model"
            else {"attributes": own.attributes}
        )
        text = toml({"attack": own.attack, "defenses": own.defenses, **more})
        content += [parts.Note(entry.label), parts.Code(text)]
    return content
