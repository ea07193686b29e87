"""The first sentences of a page about features: what leaves the device, what can be rebuilt from it, and what a protection changes and costs."""

import math
from collections.abc import Sequence
from typing import Literal

from frostglass.audit.features import FeatureJudging
from frostglass.metrics._stats import interval
from frostglass.report.charts import listed, number
from frostglass.report.feature_runs import Usefulness
from frostglass.report.feature_study import UNPROTECTED, Attempt, FeatureStudy, Protection, named
from frostglass.report.runs import Measured

MOST_COMPARED = 4  # protections that are compared one by one
BROKE_OFF = "search broke off"  # in the reason of a vacuous audit


def feature_answer(study: FeatureStudy) -> dict[str, list[str]]:
    """`vacuous` says what proves nothing (in red), `sentences` what leaves, what is rebuilt and what a protection changes."""
    sound = [protection for protection in study.protections if not protection.vacuous]
    hollow = [protection for protection in study.protections if protection.vacuous]
    sentences = [_leaving_sentence(study)]
    if sound:
        bases = [protection for protection in sound if protection.plain]
        lead = max(bases or sound, key=lambda protection: protection.strongest.similarity.value)
        others = [protection for protection in sound if protection is not lead]
        sentences += [_leak_sentence(study, lead), _change_sentence(others, lead, bases)]
    return {
        "vacuous": _hollow_sentences(study, hollow, everything=not sound),
        "sentences": sentences,
    }


def reach(score: Measured) -> str:
    """An interval of similarities, which may be negative: "0.38 to 0.52"."""
    return f"{number(score.low, 'decimal')} to {number(score.high, 'decimal')}".replace(
        " ", "\u00a0"
    )


def sized(shape: Sequence[int]) -> str:
    """A shape as people write it: "32×16×16"."""
    return "×".join(map(str, shape))


def feature_notes(study: FeatureStudy) -> list[str]:
    """What a reader must know besides: what is missing, and what the sentences leave out."""
    notes = [f"This audit failed and is missing here: {reason}" for reason in study.failed]
    for protection in study.protections:
        best = max(protection.attempts, key=lambda attempt: attempt.similarity.value)
        if best is not protection.strongest and best.vacuous:
            notes.append(
                f"On {protection.name} a vacuous audit ({best.method}) scores more than the strongest sound one, "
                f"{number(best.similarity.value, 'decimal')}: a leak is a leak all the same."
            )
    notes += [
        f"No sound attack of these kinds was run on {names}: {kinds}. A protection may stop one kind and not another."
        for kinds, names in study.untried.items()
    ]
    return notes


def _hollow_sentences(
    study: FeatureStudy, protections: Sequence[Protection], *, everything: bool
) -> list[str]:
    if not protections:
        return []
    subject = (
        "This audit is VACUOUS" if everything else f"For {named(protections)} this audit is VACUOUS"
    )
    if study.blind_embedder:
        return [
            f"{subject}: the network that compares faces hardly tells people apart, so no similarity on this page means anything.",
            "A low number means a blind judge here, not a safe feature.",
        ]
    reasons: dict[str, list[str]] = {}
    for attempt in (attempt for protection in protections for attempt in protection.attempts):
        reasons.setdefault(_why(attempt), []).append(attempt.method)
    several = {
        reason: f"{reason} ({listed(list(dict.fromkeys(methods)))})"
        for reason, methods in reasons.items()
    }
    told = "; ".join(several.values() if len(several) > 1 else several)
    leaks = [
        p.strongest
        for p in protections
        if p.strongest.facts.controls.lift["similarity"].low > FeatureJudging().margin
    ]
    return [
        f"{subject}: {told}.",
        "A low number means a weak attack here, not a safe feature.",
        *(
            f"A high number is a leak all the same: {_found(attempt)} for {attempt.label}."
            for attempt in leaks
        ),
    ]


def _why(attempt: Attempt) -> str:
    """Why an audit proves nothing, without its numbers, which are told beside its name."""
    if BROKE_OFF in attempt.vacuous:
        return "the search broke off for most people, so a low number says nothing of the features"
    if not attempt.facts.controls.control_lift:
        return (
            "no positive control was run, so a failed attack cannot be told from a good protection"
        )
    return (
        "the attack fails even on unprotected features, so its failure on any others proves nothing"
    )


def _leaving_sentence(study: FeatureStudy) -> str:
    """What leaves, and what it is for."""
    cuts = {
        (facts.cut, facts.target.model): facts.facts.feature_shape
        for facts in (protection.facts for protection in study.protections)
    }
    parts = [
        f"{number(math.prod(shape), 'count')} numbers ({sized(shape)}), what layer {cut} of {_a(model)} puts out"
        for (cut, model), shape in cuts.items()
    ]
    told = study.protections[0].facts.attributes
    what = (
        f"an attribute of it ({told[0]})"
        if len(told) == 1
        else f"{number(len(told), 'count')} attributes of it"
    )
    where = (
        parts[0]
        if len(parts) == 1
        else f"depending on where the model is cut, {'; or '.join(parts)}"
    )
    return f"In place of each picture its feature leaves the device, so that a server can tell {what}: {where}."


def _leak_sentence(study: FeatureStudy, protection: Protection) -> str:
    attempt, scale = protection.strongest, study.first.references
    tried = len(protection.attempts)
    _, opening, details = protection.name.partition(" (")
    whose = (
        f"{UNPROTECTED} features{opening}{details}"
        if protection.plain
        else f"features protected by {protection.name}"
    )
    who = (
        f"the strongest of {tried} attacks ({attempt.method})"
        if tried > 1
        else f"the attack {attempt.method}"
    )
    read = (
        f"two photos of one person reach {number(scale.same_person, 'decimal')}, photos of two people "
        f"{number(scale.different_people, 'decimal')} and blind draws {number(attempt.blind, 'decimal')}"
    )
    people = f"{number(len(study.first.identities), 'count')} people"
    if attempt.embeds:
        guess = f"guessed who is shown, without making a picture: for {people} with a similarity of {_measured(attempt)}"
        return f"From {whose}, {who} {guess}; {read}."
    judges = len(study.first.evaluators)
    judge = {1: "an independent judge", 2: "the stricter of two judges"}.get(
        judges, f"the strictest of {judges} judges"
    )
    share = number(attempt.facts.scores[attempt.strictest].value, "percent")
    return (
        f"From {whose}, {who} rebuilt pictures of {people} that resemble the true ones with a similarity of {_measured(attempt)}; {read}. "
        f"In {share} of them {judge} recognised the person."
    )


def _change_sentence(
    others: Sequence[Protection], lead: Protection, bases: Sequence[Protection]
) -> str:
    """What protections change, each against the unprotected features that are most like its own."""
    if not bases:
        return _uncompared_sentence(others, lead)
    protected = [
        (protection, _base(protection, bases, lead))
        for protection in others
        if not protection.plain
    ]
    if not protected:
        return "No protected features are part of this report, so it does not say what a protection would change."
    if len(protected) > MOST_COMPARED:
        return _sentence(_range(protected))
    return _sentence("; ".join(_change(protection, base) for protection, base in protected))


def _base(protection: Protection, bases: Sequence[Protection], lead: Protection) -> Protection:
    """Unprotected features of the same layer of the same architecture."""

    def place(each: Protection) -> tuple[str, str]:
        return each.facts.cut, each.facts.target.model

    return next((base for base in bases if place(base) == place(protection)), lead)


def _change(protection: Protection, base: Protection) -> str:
    effect, price = _effect(protection, base), _price(base.utility, protection.utility)
    seen = f"{_found(protection.strongest)} by {protection.strongest.method}"
    if effect == "lowers":
        # "No more than blind draws" is said only of what was lowered, and is no promise: another attack may find more.
        nothing = protection.strongest.facts.controls.lift["similarity"].low <= 0
        text = f"{protection.name} lowers this to {seen}{', not above blind draws beyond chance,' if nothing else ''} and {price}"
    elif effect == "raises":
        text = f"{protection.name} does not lower it but raises it to {seen} and {price}"
    else:
        text = f"{protection.name} does not clearly lower it: {seen}, no difference beyond chance on the same people; it {price}"
    return text


def _effect(protection: Protection, base: Protection) -> Literal["lowers", "raises", "leaves"]:
    """Lowered or raised with 95 % confidence, person by person."""
    low, high = interval(protection.strongest.by_person - base.strongest.by_person)
    return "raises" if low > 0 else "lowers" if high < 0 else "leaves"


def _price(base: Usefulness, protected: Usefulness) -> str:
    # The difference of what is printed, so that a reader who subtracts finds the same.
    before, after = (round(each.mean_mcc, 2) for each in (base, protected))
    shown = f"{number(before, 'decimal')}\u00a0→\u00a0{number(after, 'decimal')}"
    if before == after:
        return f"costs no utility (MCC {shown})"
    return f"{'costs' if after < before else 'gains'} {number(abs(before - after), 'decimal')} of utility (MCC {shown})"


def _range(pairs: Sequence[tuple[Protection, Protection]]) -> str:
    found = sorted(protection.strongest.similarity.value for protection, _ in pairs)
    costs = sorted(
        round(base.utility.mean_mcc, 2) - round(protection.utility.mean_mcc, 2)
        for protection, base in pairs
    )
    failing = [protection for protection, base in pairs if _effect(protection, base) != "lowers"]
    lowest = min(
        (protection for protection, _ in pairs),
        key=lambda protection: protection.strongest.similarity.value,
    )
    text = (
        f"with {len(pairs)} protections it is between {number(found[0], 'decimal')} under {lowest.name} and {number(found[-1], 'decimal')}, and they "
        f"cost between {number(costs[0], 'decimal')} and {number(costs[-1], 'decimal')} of utility (MCC); "
    )
    return text + (
        f"{named(failing)} {'does' if len(failing) == 1 else 'do'} not clearly lower it"
        if failing
        else "all of them lower it"
    )


def _uncompared_sentence(others: Sequence[Protection], lead: Protection) -> str:
    """For a report without unprotected features: all that is known of them is the positive control."""
    control = lead.strongest.facts.controls.control_lift["similarity"]
    text = "; ".join(
        f"for {protection.name} it is {_found(protection.strongest)}"
        for protection in others[:MOST_COMPARED]
    )
    if len(others) > MOST_COMPARED:
        found = sorted(protection.strongest.similarity.value for protection in others)
        text = f"for the {len(others)} others it is between {number(found[0], 'decimal')} and {number(found[-1], 'decimal')}"
    text += "; " if text else ""
    text += (
        f"on {UNPROTECTED} features the same attack scores {number(control.value, 'decimal')} above blind draws "
        f"(at least {number(control.low, 'decimal')}), so it works there; "
    )
    if not (lead.acts_at_release and len(lead.facts.defenses) == 1):
        return _sentence(
            f"{text}those are not part of this report, so what a protection costs cannot be told"
        )
    return _sentence(
        f"{text}beside the plain features of the same network {lead.name} {_price(lead.facts.plain_utility, lead.utility)}"
    )


def _measured(attempt: Attempt) -> str:
    return f"{number(attempt.similarity.value, 'decimal')} (interval {reach(attempt.similarity)})"


def _found(attempt: Attempt) -> str:
    return f"a similarity of {_measured(attempt)}"


def _a(model: str) -> str:
    return f"{'an' if model[:1].lower() in 'aeiou' else 'a'} {model}"


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."
