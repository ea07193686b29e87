"""Rates over people, the rates of each person, and rates by attribute."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from frostglass.report import parts
from frostglass.report.entry import Entry
from frostglass.report.outcome import accuracy_interval, binomial, leaks, over_people
from frostglass.report.panels.closest import ranked
from frostglass.report.study import Study, Subject
from frostglass.report.text import Kind, number, span

MAX_EXPOSED = 5  # people of each subject in the first table
MAX_TABLES = 3  # subjects with a table of all people
MAX_LISTED = 500  # people in such a table
SMALLEST = 3  # people on each side of a stratum
WAYS = {"max_first": "first guess", "max_any": "any guess", "max_recognised": "mean of guesses"}


def people_section(study: Study) -> parts.Section:
    content: list[parts.Part] = [
        _rates(study),
        parts.Note(
            "Shares recognised by the strongest attack, with 95 % intervals over people. Prior "
            "only: the same for images made without the model."
        ),
        parts.Heading("Most exposed people"),
        *_exposed(study),
    ]
    return parts.Section("People", "Rates over people, and the most exposed", content)


def _rates(study: Study) -> parts.Part:
    model = study.surface == "model"
    ways = WAYS if model else {"max_recognised": "recognised", "max_similarity": "similarity"}
    head = ["subject", "people", *ways.values(), "prior only"]

    def row(subject: Subject) -> list[parts.Cell | str]:
        entry = subject.strongest
        cells = []
        for name in ways:
            score = over_people(leaks(entry, name))
            kind: Kind = "decimal" if name == "max_similarity" else "percent"
            cells.append(parts.Cell(number(score.value, kind), [span(score, kind)]))
        baseline = entry.facts.prior_only[entry.verified]
        many = number(len(entry.reconstructions), "count")
        luck = parts.Cell(number(baseline.value, "percent"), [span(baseline)])
        return [parts.named_cell(subject.label, entry.method), many, *cells, luck]

    rows = [row(subject) for subject in study.subjects]
    table = parts.Table("Rates over people", head, rows, long=study.many)
    return parts.folded_if(study.many, f"Rates of all {len(rows)} subjects", table)


def _exposed(study: Study) -> list[parts.Part]:
    subjects = [s for s in study.subjects if not s.strongest.embeds][:MAX_TABLES]
    rows: list[list[parts.Cell | str]] = []
    for subject in subjects:
        exposed, _ = ranked(subject.strongest)
        rows += [_person(subject, place) for place in exposed[:MAX_EXPOSED]]
    if not rows:
        return [parts.Note("Nobody was recognised.", "")]
    head = ["person", "subject", "guesses recognised", "best match", "attacks that recognise them"]
    return [parts.Table("Most exposed people", head, rows)]


def _person(subject: Subject, place: int) -> list[parts.Cell | str]:
    """Return one person's rate with its exact interval, best match, and attacks that succeed."""
    entry = subject.strongest
    name, values = _row(entry, place)
    hits, total = round(values.sum().item()), len(values)
    low, high = binomial(hits, total)
    limits = f"{number(low, 'points')}–{number(high, 'percent')}"
    successes = sum(_recognised(other, name) for other in subject.entries)
    best = number(entry.match[place].max().item())
    return [
        name,
        parts.named_cell(subject.label),
        parts.Cell(f"{hits} of {total}", [f"interval {limits}"]),
        parts.Cell(best, [f"accepted above {number(entry.threshold)}"]),
        f"{successes} of {len(subject.entries)}",
    ]


def _row(entry: Entry, place: int) -> tuple[str, Tensor]:
    rows = entry.run.rows[entry.number]
    return rows.names[place], rows.columns[entry.verified][place]


def _recognised(entry: Entry, name: str) -> bool:
    rows = entry.run.rows[entry.number]
    if name not in rows.names:
        return False
    return bool(rows.columns[entry.verified][rows.names.index(name)].max() > 0)


def every_person(
    study: Study, listing: Callable[[Study, Sequence[Entry]], parts.Items]
) -> parts.Section:
    """Return a table of all people for each of a few subjects, and the most exposed by audit."""
    content: list[parts.Part] = []
    head = ["person", "subject", "guesses recognised", "best match", "attacks that recognise them"]
    for subject in study.subjects[:MAX_TABLES]:
        exposed, nearest = ranked(subject.strongest)
        places = [*exposed, *nearest][:MAX_LISTED]
        rows = [_person(subject, place) for place in places]
        label = f"Every person: {subject.name}"
        content.append(parts.Table(label, head, rows, long=True))
    text = (
        "Guesses of the strongest attack, with the exact binomial interval of one person’s share: "
        "a few guesses say little about one person."
    )
    most = [
        parts.Heading("Most exposed people of each audit"),
        parts.Note(
            "At most five, with the share of their images by which they would be recognised, or "
            "with their mean similarity."
        ),
        listing(study, study.entries),
    ]
    return parts.Section("Every person", "Every person", [*content, parts.Note(text), *most])


# Strata


def strata_sections(study: Study) -> list[parts.Section]:
    """Return rates by attribute of the subject that leaks most; none without attributes."""
    subject = max(study.subjects, key=lambda each: each.strongest.score.value)
    rows = _strata(study, subject)
    if not rows:
        return []
    what = "share recognised" if study.surface == "model" else "similarity"
    head = ["attribute", "people with it", what, "people without", what, "difference"]
    text = (
        f"{subject.name[0].upper()}{subject.name[1:]}, strongest attack. A person has an attribute "
        "if most of their training images have it. The difference has the widest interval that "
        f"both allow. Attributes with fewer than {SMALLEST} people on a side are left out; of many "
        "attributes some differ by chance."
    )
    table = parts.Table("Rates by attribute", head, rows, long=len(rows) > 20)
    return [
        parts.Section(
            "Strata", "Who is more exposed: rates by attribute", [table, parts.Note(text)]
        )
    ]


def _strata(study: Study, subject: Subject) -> list[list[parts.Cell | str]]:
    entry = subject.strongest
    facts, names = entry.run.facts, entry.run.rows[entry.number].names
    values = leaks(entry, "max_recognised" if study.surface == "model" else "max_similarity")
    found = []
    for attribute, marks in facts.attributes.items():
        owners = dict(zip(facts.identities, marks, strict=True))
        has = torch.tensor([owners.get(name, False) for name in names])
        if min(int(has.sum()), int((~has).sum())) < SMALLEST:
            continue
        with_it, without = over_people(values[has]), over_people(values[~has])
        gap = with_it.value - without.value
        reach = with_it.low - without.high, with_it.high - without.low
        cells = [
            cell
            for score, count in ((with_it, has.sum()), (without, (~has).sum()))
            for cell in (
                number(int(count), "count"),
                parts.Cell(number(score.value, study.unit), [span(score, study.unit)]),
            )
        ]
        unit: Kind = "gain" if study.surface == "model" else "change"
        small = [" to ".join(number(each, unit) for each in reach)]
        last = parts.Cell(number(gap, unit), small)
        found.append((abs(gap), [attribute.replace("_", " "), *cells, last]))
    return [row for _, row in sorted(found, key=lambda each: -each[0])]


# Utility


def price_section(study: Study) -> parts.Section:
    """Return what each subject is good for beside what it leaks."""
    model = study.surface == "model"
    plain = next((subject for subject in study.subjects if subject.plain), None)
    used = "accuracy" if model else "MCC of the server"
    head = ["subject", used, "against undefended", "leak of the strongest attack"]

    def row(subject: Subject) -> list[parts.Cell | str]:
        value, low, high = _useful(subject)
        unit: Kind = "percent" if model else "decimal"
        change: str = "–"
        if plain is not None and subject is not plain:
            change = number(value - _useful(plain)[0], "gain" if model else "change")
        score = subject.strongest.score
        reach = [span(parts.Reach(low, high), unit)] if low < high else []
        leak = parts.Cell(number(score.value, study.unit), [span(score, study.unit)])
        useful = parts.Cell(number(value, unit), reach)
        return [parts.named_cell(subject.label), useful, change, leak]

    rows = [row(subject) for subject in study.subjects]
    table = parts.Table("Utility and leak", head, rows, long=study.many)
    text = "Mean over attributes, with the interval over people."
    if model:
        text = f"Accuracy on {study.tested_on}, with the exact interval over these images."
    shown = parts.folded_if(study.many, f"Price of all {len(rows)} subjects", table)
    return parts.Section("Price", "What hiding it costs", [shown, parts.Note(text)])


def _useful(subject: Subject) -> tuple[float, float, float]:
    if subject.entries[0].surface == "model":
        return accuracy_interval(subject)
    utility = subject.utility
    return utility.mean_mcc, utility.mean_mcc_low, utility.mean_mcc_high
