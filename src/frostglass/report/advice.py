"""What to do next, after an answer; figures are those of docs/results.md."""

from collections.abc import Sequence

from frostglass.report.outcome import Answer, Outcome
from frostglass.report.study import Study, named
from frostglass.report.text import listed, number

FIX = (
    "Fix what you accept before the next run, in the config ([thresholds] max_first = 0.1) or with "
    "frostglass audit --max-first 0.1, so that the answer can be pass or fail."
)
DECOYS = (
    "Harden the model with decoys (frostglass harden CONFIG --accuracy 0.95): expected cost 0.4 to "
    "2 points of accuracy. Measured with three seeds on embedded faces, 31 decoys for each person "
    "lowered recognition by the first guess from 94 % to 6 %, and 7 decoys in a harder world from "
    "92 % to 12 %. Your data may differ, and an attacker with many guesses finds more."
)
QUERIES = (
    "Limit how often one client may ask the model: this attack used {} queries for each person. "
    "That slows an attacker down and is no protection once the weights are out."
)
FEATURES = (
    "Tune a protection (frostglass harden CONFIG --protect --utility 0.75) or cut the network "
    "later. Expect a price: with three seeds on embedded faces the best protection measured "
    "(Crafter, β 2) cost 0.18 of MCC and still left 65 % recognised."
)
KEEP = (
    "Keep this page, its JSON and the run folder together, and repeat the audit after each "
    "retraining and when stronger attacks are published. A pass holds for the attacks listed here."
)


def next_steps(study: Study, answers: Sequence[Answer]) -> list[str]:
    """Return what the reader can do, most urgent first."""
    outcomes: set[Outcome] = {answer.outcome for answer in answers}
    steps = []
    if study.partial:
        steps.append("Run the same command again: it goes on where it stopped.")
    steps += _vacuous(study)
    leaking = not study.vacuous and _leaks(study)
    if "fail" in outcomes or (leaking and "pass" not in outcomes):
        steps += _hardening(study)
    steps += _more_people(answers)
    if study.untried:
        kinds = listed(list(study.untried))
        steps.append(f"Try the kinds of attack that are missing: {kinds}.")
    if not answers:
        steps.append(FIX)
    if outcomes == {"pass"}:
        steps.append(KEEP)
    return steps or [KEEP]


def _leaks(study: Study) -> bool:
    """Does the strongest attack on some subject find more than luck does?"""
    entries = [subject.strongest for subject in study.subjects if not subject.vacuous]
    return any(entry.facts.controls.lift[entry.measure].low > 0 for entry in entries)


def _vacuous(study: Study) -> list[str]:
    subjects = [subject for subject in study.subjects if subject.vacuous]
    if not subjects:
        return []
    needed = [
        each
        for subject in subjects
        for each in (entry.facts.controls.people_needed for entry in subject.entries)
        if each
    ]
    more = f" About {number(max(needed), 'count')} attacked people would do." if needed else ""
    return [
        f"Repeat the audit of {named(subjects)}, which is vacuous: give the attacker a better "
        f"prior, a longer search or more people, or use better evaluators.{more}"
    ]


def _hardening(study: Study) -> list[str]:
    if study.surface == "features":
        return [FEATURES]
    used = {str(d.get("name")) for s in study.subjects for d in s.facts.defenses}
    steps = [] if "decoys" in used else [DECOYS]
    if "decoys" in used:
        steps.append(
            "Use more decoys for each person, or train longer (frostglass harden CONFIG "
            "--defenses decoys): with 31 decoys the first guess was right for 6 % of the people."
        )
    asked = [e for s in study.subjects for e in s.entries if e.access in ("scores", "labels")]
    if asked:
        entry = asked[0]
        each = number(entry.facts.queries / len(entry.reconstructions), "count")
        steps.append(QUERIES.format(each))
    return steps


def _more_people(answers: Sequence[Answer]) -> list[str]:
    needed = [
        check.people_needed
        for answer in answers
        if answer.outcome == "inconclusive"
        for check in answer.checks
        if check.outcome == "inconclusive" and check.people_needed
    ]
    if not needed:
        return []
    count = number(max(needed), "count")
    return [f"Attack more people (judging.identities): about {count} would settle the answer."]
