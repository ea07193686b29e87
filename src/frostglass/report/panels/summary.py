"""Page one: what was asked of which model, the answer, what to do next, and the words used."""

from collections.abc import Collection, Sequence

from markupsafe import Markup

from frostglass.report import parts
from frostglass.report.advice import next_steps
from frostglass.report.entry import Entry
from frostglass.report.glossary import glossary
from frostglass.report.outcome import Answer, Outcome, answers
from frostglass.report.recognition import ATTACKERS, rate, verifier_name
from frostglass.report.study import Study, Subject
from frostglass.report.text import listed, number, sentence

MAX_FILES = 3  # models whose files are named on page one
MAX_CHECKS = 9  # limits that page one shows; the others are in the appendix
STATUS: dict[Outcome, parts.Status] = {"pass": "ok", "fail": "fail", "inconclusive": "look"}
NO_THRESHOLDS = (
    "No thresholds were fixed before this run, so it says how much leaks and not whether that is "
    "accepted."
)


def summary(study: Study, distrusted: Collection[str]) -> parts.Summary:
    found = answers(study, distrusted)
    return parts.Summary(
        [("Date", _date(study)), ("Asked", asked(study)), *_files(study), *_limits(study)],
        [_verdict(answer) for answer in found] if len(found) <= MAX_CHECKS else _counted(found),
        NO_THRESHOLDS if not found else "",
        [checks_table(found)] if 0 < len(rows(found)) <= MAX_CHECKS else [],
        next_steps(study, found),
        list(glossary(study.surface).items()),
    )


def asked(study: Study) -> str:
    """Return the question of the audit."""
    entry, people = study.entries[0], number(len(study.first.identities), "count")
    verifier = f"by a face verifier ({verifier_name(entry)}) with {rate(entry)} of false alarms"
    if study.surface == "features":
        count = number(study.subjects[0].facts.images_per_person, "count")
        return (
            f"How much of {people} people ({count} images each) can be reconstructed from the "
            f"features that leave a device? Similarity to the true image decides; recognised "
            f"{verifier}."
        )
    who = listed(list(dict.fromkeys(_attacker(each) for each in study.entries)))
    models = "this model" if len(study.subjects) == 1 else f"{len(study.subjects)} models"
    return (
        f"How many of {people} people would be recognised, {verifier}, from what "
        f"{who} reconstructs from {models}?"
    )


def _attacker(entry: Entry) -> str:
    return ATTACKERS.get(entry.access, "an attacker with public images of other people")


def _date(study: Study) -> str:
    dates = dict.fromkeys(run.facts.date for run in study.runs)
    return listed([spoken_date(date) for date in dates])


def spoken_date(date: str) -> str:
    """Return "2026-11-17 13:05 UTC" of an ISO time."""
    return f"{date[:16].replace('T', ' ')} UTC" if date else "not recorded"


def _files(study: Study) -> list[tuple[str, str]]:
    if len(study.subjects) > MAX_FILES:
        count = len(study.subjects)
        return [("Models", f"{count}; their files and hashes are in the appendix.")]
    title = "Model" if len(study.subjects) == 1 else "Models"
    return [(title, Markup("<br>").join(map(_file, study.subjects)))]


def _file(subject: Subject) -> Markup:
    name, digest = file_of(subject)
    shown = Markup("SHA-256 <code>{}</code>").format(digest) if digest else "no file to hash"
    return Markup("<b>{}</b>: <code>{}</code>, {}").format(subject.name, name, shown)


def file_of(subject: Subject) -> tuple[str, str]:
    """Return name and hash of a model's file; "" for no hash."""
    file = subject.strongest.facts.file
    if file is None:
        return "file not recorded", ""
    return file.name, file.sha256 or ""


def files_table(study: Study) -> parts.Table:
    rows: list[list[parts.Cell | str]] = [
        [parts.named_cell(subject.label), *(Markup("<code>{}</code>").format(text or "–")
         for text in file_of(subject))]
        for subject in study.subjects
    ]  # fmt: skip
    head = ["model", "file", "SHA-256"]
    return parts.Table("Files of the audited models", head, rows, "files", long=study.many)


def _limits(study: Study) -> list[tuple[str, str]]:
    fixed = [run.facts.thresholds for run in study.runs if run.facts.thresholds]
    if not fixed:
        return []
    times = listed(sorted({spoken_date(each.recorded) for each in fixed}))
    before = all(each.before_results for each in fixed)
    text = "before any result" if before else "not before the results: they decide nothing"
    others = max(each.others for each in fixed)
    more = f"; the store has {others} other sets for runs of this name" if others else ""
    return [("Thresholds", f"recorded {times}, {text}{more}.")]


def _verdict(answer: Answer) -> parts.Verdict:
    text = sentence("; ".join(answer.reasons)) if answer.reasons else ""
    return parts.Verdict(answer.subject, answer.outcome.upper(), STATUS[answer.outcome], text)


def _counted(found: Sequence[Answer]) -> list[parts.Verdict]:
    """Count the answers, where there are too many to show each."""
    outcomes: tuple[Outcome, ...] = ("pass", "fail", "inconclusive")
    result = []
    for outcome in outcomes:
        names = [answer.subject for answer in found if answer.outcome == outcome]
        if names:
            text = f"{len(names)} of {len(found)}; each is in the appendix."
            result.append(parts.Verdict("", outcome.upper(), STATUS[outcome], text))
    return result


def rows(found: Sequence[Answer]) -> list[list[parts.Cell | str]]:
    return [
        [
            parts.named_cell(answer.subject),
            check.title,
            check.accepted,
            check.measured,
            check.attack or "–",
            parts.Cell("", (), STATUS[check.outcome], check.outcome),
        ]
        for answer in found
        for check in answer.checks
    ]


def checks_table(found: Sequence[Answer]) -> parts.Table:
    head = ["subject", "limit of", "accepted", "measured (95 % interval)", "attack", "by itself"]
    return parts.Table("Thresholds and what was measured", head, rows(found), "limits")


def checks_section(study: Study, distrusted: Collection[str]) -> list[parts.Section]:
    """Return all limits, where page one has no room for them."""
    found = answers(study, distrusted)
    if len(rows(found)) <= MAX_CHECKS:
        return []
    each: list[list[parts.Cell | str]] = [
        [answer.subject, parts.Cell("", answer.reasons, STATUS[answer.outcome], answer.outcome)]
        for answer in found
    ]
    table = parts.Table("Answers", ["subject", "answer"], each, long=True)
    content = [table, checks_table(found)]
    return [parts.Section("Thresholds", "Answers against the thresholds", content)]
