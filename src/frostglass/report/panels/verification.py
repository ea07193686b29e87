"""How often each evaluator accepts real images, strangers, prior-only draws, reconstructions."""

from collections.abc import Sequence

from frostglass.evaluators.verifier import RATES
from frostglass.report.charts import shape
from frostglass.report.entry import Entry
from frostglass.report.networks import EvaluatorFacts
from frostglass.report.parts import Cell, Details, Note, Part, Section, Table, named_cell
from frostglass.report.recognition import acquaintance
from frostglass.report.study import Study
from frostglass.report.text import number

COLUMNS = ("verified", "strict")  # one score for each of RATES
MAX_COLUMNS = 3  # subjects whose shares stand beside each other
PRIOR_ONLY = "prior-only draws"
ABSENT = "–"
FINER = 1.001  # rates above what was asked by less than this are as asked
NOTE = (
    "An evaluator accepts an image as a person if their match exceeds a threshold: the mean of the "
    "best five cosines between its embedding and those of the person’s other images. The threshold "
    "is set on images of strangers, so that at most the false-accept rate of them passes; "
    "“strangers accepted” checks it on other strangers. “Real images accepted” is the true-accept "
    "rate, of held-out images. A share of reconstructions means little where real images are not "
    "accepted, or where prior-only draws are."
)


def verification_section(study: Study) -> Section:
    """Return the table of all evaluators, with the strongest attack on each subject."""
    entries = [subject.strongest for subject in study.subjects]
    beside = entries if len(entries) <= MAX_COLUMNS else entries[:1]
    names = [subject.name for subject in study.subjects[: len(beside)]]
    # Priors that are not tied to a target give the same draws for every subject.
    alike = len({_baselines(study, entry) for entry in beside}) == 1
    drawn = beside[:1] if alike else beside
    head: list[Cell | str] = [
        "evaluator", "false-accept rate", "real images accepted", "strangers accepted",
        *(Cell(f"{PRIOR_ONLY} accepted", [] if alike else [n]) for n in names[: len(drawn)]),
        *(Cell("reconstructions accepted", [name]) for name in names),
    ]  # fmt: skip
    rows = [
        row
        for place, evaluator in enumerate(study.first.evaluators, 1)
        for row in _rows(place, evaluator, drawn, beside)
    ]
    title = "Verification: would the person be recognised?"
    content: list[Part] = [
        Note(NOTE),
        Table("Verification", head, rows, "verified"),
        Note(_guesses(study)),
        *(Note(text) for text in (*coarse_rates(study), *_own_evaluators(study))),
    ]
    if len(entries) > len(beside):
        summary = f"Reconstructions accepted for all {len(entries)} subjects"
        content.append(Details(summary, [_all_subjects(study, entries)]))
    return Section("Verification", title, content)


def _baselines(study: Study, entry: Entry) -> tuple[float, ...]:
    names = [f"{name}_{n + 1}" for name in COLUMNS for n in range(len(study.first.evaluators))]
    scores = entry.facts.prior_only
    return tuple(scores[name].value for name in names if name in scores)


def _guesses(study: Study) -> str:
    if study.candidates == 1:
        return "Reconstructions: one for each person, of the strongest attack."
    return (
        f"Reconstructions: the first of each person, and below it any of the {study.candidates} "
        "kept, of the strongest attack."
    )


def _rows(
    place: int, evaluator: EvaluatorFacts, drawn: Sequence[Entry], entries: Sequence[Entry]
) -> list[list[Cell | str]]:
    """Return a row for each false-accept rate; rates that too few images made equal share one."""
    facts = evaluator.verifier
    rows: list[list[Cell | str]] = []
    for level, (asked, used) in enumerate(zip(RATES, facts.rates, strict=True)):
        if used in facts.rates[:level]:
            continue
        name = f"{COLUMNS[level]}_{place}"
        genuine = [f"of {number(facts.genuine, 'count')}"]
        coarse = [f"{number(asked, 'rate')} asked"] if used > asked * FINER else []
        rows.append(
            [
                _named(place, evaluator) if level == 0 else Cell("", [f"evaluator {place}"]),
                Cell(number(used, "rate"), coarse),
                Cell(number(facts.true_accepts[level], "percent"), genuine),
                number(facts.impostor_share[level], "rate"),
                *(_drawn(entry, name) for entry in drawn),
                *(_accepted(entry, name) for entry in entries),
            ]
        )
    return rows


def _named(place: int, evaluator: EvaluatorFacts) -> Cell:
    facts = evaluator.verifier
    basis = (
        f"{number(facts.comparisons, 'count')} comparisons with {number(facts.impostors, 'count')} "
        "images of strangers"
    )
    text = shape(place - 1) + f" {place}: {evaluator.model}"
    small = [f"{evaluator.kind}, {acquaintance(evaluator)}", basis]
    if evaluator.excluded:
        reason = evaluator.excluded.partition(": ")[2]
        return Cell(text, [*small, reason], "look", "! excluded")
    return Cell(text, small, "ok" if evaluator.decides else None, "decides" * evaluator.decides)


def _drawn(entry: Entry, name: str) -> str:
    """Return the share of prior-only draws; a dash for an evaluator that an audit lacks."""
    scores = entry.facts.prior_only
    return number(scores[name].value, "percent") if name in scores else ABSENT


def _accepted(entry: Entry, name: str) -> Cell:
    if name not in entry.facts.scores:
        return Cell(ABSENT)
    score = entry.facts.scores[name]
    several = entry.reconstructions.shape[1] > 1
    any_guess = [f"any {number(score.any, 'percent')}"] if several else []
    return Cell(number(score.first, "percent"), any_guess)


def _all_subjects(study: Study, entries: Sequence[Entry]) -> Table:
    places = range(1, len(study.first.evaluators) + 1)
    head = ["audit", *(f"evaluator {place}" for place in places)]
    rows: list[list[Cell | str]] = []
    for entry in entries:
        cells: list[Cell | str] = []
        for place in places:
            name = f"verified_{place}"
            cell, baseline = _accepted(entry, name), _drawn(entry, name)
            small = [] if baseline == ABSENT else [f"prior only {baseline}"]
            cells.append(Cell(cell.text, [*cell.small, *small]))
        rows.append([named_cell(entry.label), *cells])
    return Table("Reconstructions accepted", head, rows, long=study.many)


def _own_evaluators(study: Study) -> list[str]:
    """Say that audits with other seeds were calibrated with evaluators of their own."""
    keys = {tuple(each.key for each in entry.evaluators) for entry in study.entries}
    if len(keys) == 1:
        return []
    return [
        "The audits have evaluators of their own, as their seeds or data differ. The first three "
        "figures are those of the first audit that has most evaluators; shares of reconstructions "
        "are each audit’s own."
    ]


def coarse_rates(study: Study) -> list[str]:
    """Say for which evaluators the images do not support a rate that was asked for."""
    notes = []
    for place, evaluator in enumerate(study.first.evaluators, 1):
        facts = evaluator.verifier
        missed = [
            f"{number(asked, 'rate')}, {number(used, 'rate')} is"
            for asked, used in zip(RATES, facts.rates, strict=True)
            if used > asked * FINER
        ]
        if missed:
            notes.append(
                f"Too few images of strangers for evaluator {place}: "
                f"{number(facts.impostors, 'count')} images and "
                f"{number(facts.comparisons, 'count')} comparisons. Instead of a false-accept "
                f"rate of {' and instead of '.join(missed)} used, the finest they support."
            )
    return notes
