"""Every attack on every model, and what that says about masked gradients."""

from collections import Counter
from collections.abc import Sequence

from frostglass.report.entry import LABEL_ONLY, Entry, strongest
from frostglass.report.panels import common
from frostglass.report.parts import Cell, Note, Part, Section, Table
from frostglass.report.recognition import rate, top1_short
from frostglass.report.study import Study, Subject
from frostglass.report.text import JOINER, listed, number, span, spoken

FEWEST = 2  # models, and attacks; below that the other tables say it all
TELLING = 0.1  # lead of an attack that needs no true gradients that hints at masked ones


def has_matrix(study: Study) -> bool:
    return min(len(study.methods), len(study.subjects)) >= FEWEST


def matrix_section(study: Study) -> Section:
    def small(square: common.Square) -> list[str]:
        return [] if square.entry is None else [top1_short(square.entry)]

    rows: list[list[Cell | str]] = [
        [
            Cell("prior only", ["random images from the attacks' generators"], css="sum"),
            *(Cell(_baseline(subject), css="sum") for subject in study.subjects),
        ]
    ]
    for method, row in common.squares(study).items():
        pairs = zip(row, study.subjects, strict=True)
        rows.append([method, *(common.square_cell(each, s, small(each)) for each, s in pairs)])
    rows.append([Cell("strongest", css="sum"), *map(_strongest, study.subjects)])
    people = "images" if study.candidates > 1 else "people"
    label = "Every attack on every model"
    parts: list[Part] = [
        Note(
            f"Share of {people} recognised at a false-accept rate of {rate(study.entries[0])}; "
            "small: top-1 of the classifiers."
        ),
        Table(label, ["attack", *(subject.name for subject in study.subjects)], rows, "pairs"),
        common.matrix_legend(study, "strongest attack on the model"),
        *(Note(text, "after") for text in attack_notes(study)),
        Note(
            "Attacks that differ by a few points on a model may do so by chance; the table of "
            "scores has the intervals."
        ),
    ]
    return Section("Attacks and models", label, parts)


def _baseline(subject: Subject) -> str:
    """What the priors reach alone; attacks may bring different ones."""
    shares = sorted(entry.baseline for entry in subject.entries)
    low, high = number(shares[0], "percent"), number(shares[-1], "percent")
    return high if low == high else f"{number(shares[0], 'points')}–{JOINER}{high}"


def _strongest(subject: Subject) -> Cell:
    score = subject.strongest.score
    names = common.winners(subject) or ["nobody recognised"]
    small = [span(score), *names, *["vacuous"] * subject.vacuous]
    return Cell(common.bold(number(score.value, "percent"), ""), small, css="sum")


def attack_notes(study: Study) -> list[str]:
    """Say which attack is strongest on how many models, and where gradients may be masked."""
    sound = [subject for subject in study.subjects if not subject.vacuous]
    if not (has_matrix(study) and sound):
        return []
    vacuous = len(sound) < len(study.subjects)
    return [*_strongest_notes(sound, vacuous=vacuous), *_masking_notes(sound)]


def _strongest_notes(subjects: Sequence[Subject], *, vacuous: bool) -> list[str]:
    best = [common.winners(subject) for subject in subjects]
    counts = Counter(method for methods in best for method in methods).most_common()
    notes = []
    if counts:
        (first, most), *others = counts
        models = f"{most} of {len(subjects)} models"
        if len(subjects) == 1:
            models = "the one model"
        elif most == len(subjects):
            models = f"all {most} models"
        models += " whose audits are not vacuous" if vacuous else ""
        parts = [f"{_quoted(first)} is the strongest attack on {models}"]
        parts += [f"{_quoted(method)} on {times}" for method, times in others]
        tied = any(len(methods) > 1 for methods in best)
        ties = "; where attacks are equally strong, each counts" if tied else ""
        notes.append(f"{listed(parts)}{ties}.")
    if unbroken := [s.name for s, methods in zip(subjects, best, strict=True) if not methods]:
        notes.append(
            f"No reconstruction from {listed(unbroken)} would be recognised, whatever the attack."
        )
    return notes


def _masking_notes(subjects: Sequence[Subject]) -> list[str]:
    """Compare sound audits only: an attack that fails without a defense is weak, not masked."""
    compared = [(subject, *pair) for subject in subjects if (pair := _pair(subject))]
    telling = [
        (subject, special, plain)
        for subject, special, plain in compared
        if round(special.score.value - plain.score.value, 6) > TELLING
    ]
    defended = [_compared(*each) for each in telling if not each[0].plain]
    without = [_compared(*each) for each in telling if each[0].plain]
    attack = "An adaptive or label-only attack exceeds"
    limit = f"by more than {number(TELLING, 'points')} points"
    notes = []
    if compared and not telling:
        models = "1 model" if len(compared) == 1 else f"{len(compared)} models"
        notes.append(f"{attack} the others {limit} on none of the {models} with both kinds.")
    if defended:
        notes.append(
            f"{attack} every other one {limit} on {listed(defended)}: a sign of masked gradients."
        )
    if without:
        begins = "It also does so" if defended else f"{attack} every other one {limit}"
        notes.append(
            f"{begins} on {listed(without)}, where no defense masks anything: it may simply be the "
            "stronger attack, and its lead on other models is no proof of masking."
        )
    return notes


def _pair(subject: Subject) -> tuple[Entry, Entry] | None:
    """Return the strongest sound attack that is adaptive or label-only, and that of the others."""
    sound = [entry for entry in subject.entries if not entry.vacuous]
    special = [entry for entry in sound if entry.adaptive or LABEL_ONLY in entry.attack_kinds]
    plain = [entry for entry in sound if entry not in special]
    return (strongest(special), strongest(plain)) if special and plain else None


def _compared(subject: Subject, special: Entry, plain: Entry) -> str:
    shares = [f"{_quoted(e.method)} {number(e.score.value, 'percent')}" for e in (special, plain)]
    return spoken(f"{subject.label} · {' against '.join(shares)}")


def _quoted(method: str) -> str:
    """Quote a name that has commas of its own."""
    return f"“{method}”" if "," in method else method
