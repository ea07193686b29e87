"""Who would be recognised, in words: verification first, top-1 beside it under its own name."""

from collections.abc import Sequence

from frostglass.evaluators.embedder import PUBLIC, SHIPPED
from frostglass.report.entry import Entry
from frostglass.report.networks import EvaluatorFacts
from frostglass.report.study import Subject, named
from frostglass.report.text import listed, number, span

ATTACKERS = {
    "gradients": "an attacker with its weights and public images of other people",
    "scores": "an attacker who can query its scores and has public images of other people",
    "labels": "an attacker who sees only predicted labels and has public images of other people",
}


def acquaintance(evaluator: EvaluatorFacts) -> str:
    """Say whether an evaluator knows the private people from training."""
    if evaluator.kind == "classifier":
        return "trained on the private people"
    if evaluator.trained_on == PUBLIC or evaluator.model == SHIPPED:
        return "never trained on these people"
    return "trained elsewhere, on people this audit does not know"


def verifier_name(entry: Entry) -> str:
    """Name the face verifier that decides, with what it knows."""
    evaluator = entry.evaluators[entry.verifier - 1]
    return f"evaluator {entry.verifier}, {evaluator.model}, {acquaintance(evaluator)}"


def rate(entry: Entry) -> str:
    """The false-accept rate of the headline."""
    return number(entry.evaluators[entry.verifier - 1].verifier.rates[0], "rate")


def recognised(entry: Entry) -> str:
    """Say how many people would be recognised, by whom and at which false-accept rate."""
    people, candidates = entry.reconstructions.shape[:2]
    score, baseline = entry.facts.scores[entry.verified], entry.facts.prior_only[entry.verified]
    share, count = number(score.value, "percent"), number(people, "count")
    reach = f"interval {span(score)}; prior-only baseline {number(baseline.value, 'percent')}"
    verifier = f"a face verifier ({verifier_name(entry)}) accepts the reconstruction"
    if candidates == 1:
        hits = number(round(score.value * people), "count")
        opening = f"{hits} of {count} people ({share}; {reach}) would be recognised"
    else:
        images = number(people * candidates, "count")
        opening = (
            f"By {share} of {images} reconstructions, {candidates} of each of {count} people "
            f"({reach}), the person would be recognised"
        )
    return f"{opening}: {verifier} at a false-accept rate of {rate(entry)}."


def origin(subject: Subject) -> str:
    """Say who made the reconstructions from which model, and what classifiers make of them."""
    entry = subject.strongest
    _, opening, details = subject.name.partition(" (")
    model = f"the {subject.kind} model{opening}{details}"
    if subject.kind == "defended":
        model = f"the model defended with {subject.name}"
    who = ATTACKERS.get(entry.access, "an attacker with public images of other people")
    return f"The reconstructions were made from {model} by {who}. {top1_sentence(entry)}"


def top1_sentence(entry: Entry) -> str:
    shares = [
        f"{number(entry.facts.scores[name].value, 'percent')} by {_classifier(entry, name)}"
        for name in entry.top1
    ]
    return f"Top-1, which is not recognition: {listed(shares)}."


def _classifier(entry: Entry, name: str) -> str:
    place = int(name.rpartition("_")[2])
    return f"evaluator {place} ({entry.evaluators[place - 1].model})"


def top1_short(entry: Entry) -> str:
    """Top-1 of all classifiers in a few words."""
    shares = [number(entry.facts.scores[name].value, "percent") for name in entry.top1]
    return f"top-1 {' and '.join(dict.fromkeys(shares))}"


def fooled_sentence(subjects: Sequence[Subject]) -> list[str]:
    """Say in one sentence that classifiers name the person where the verifier does not."""
    fooled = [subject for subject in subjects if subject.strongest.facts.controls.fooled]
    if not fooled:
        return []
    entries = [subject.strongest for subject in fooled]
    most = max(entry.facts.scores[name].value for entry in entries for name in entry.top1)
    verified = max(entry.facts.scores[entry.verified].value for entry in entries)
    where = f" (for {named(fooled)})" if len(fooled) < len(subjects) else ""
    several = "at most " if len(fooled) > 1 else ""
    return [
        f"The classifiers are fooled{where}: they rank the attacked person first in up to "
        f"{number(most, 'percent')} of the reconstructions, and the face verifier accepts "
        f"{several}{number(verified, 'percent')} of them."
    ]
