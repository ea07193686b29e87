"""The first sentences of a page: what leaks, and what a defense or protection changes and costs."""

import math
from collections.abc import Sequence
from typing import Literal

import torch

from frostglass.auditing.controls import MOST_PARTIAL, OWN_CONTROL
from frostglass.metrics._significance import LEVEL
from frostglass.metrics._stats import interval
from frostglass.report.entry import UNPROTECTED, Entry
from frostglass.report.labels import accuracy_images
from frostglass.report.recognition import (
    fooled_sentence,
    origin,
    rate,
    recognised,
    top1_short,
    verifier_name,
)
from frostglass.report.study import Study, Subject, named
from frostglass.report.text import listed, number, sentence, span

MASKED = "which may be masked gradients and not privacy"
MAX_COMPARED = 4  # subjects that are compared one by one


def answer(study: Study) -> dict[str, list[str]]:
    """Return `vacuous`, sentences about what proves nothing, and `sentences`, the findings."""
    sound = [subject for subject in study.subjects if not subject.vacuous]
    vacuous = [subject for subject in study.subjects if subject.vacuous]
    sentences = [_release_sentence(study)] if study.surface == "features" else []
    if sound:
        bases = [subject for subject in sound if subject.plain]
        lead = max(bases or sound, key=lambda subject: subject.strongest.score.value)
        others = [subject for subject in sound if subject is not lead]
        if study.surface == "model":
            sentences += [recognised(lead.strongest), origin(lead)]
        else:
            sentences.append(_feature_leak(study, lead))
        sentences.append(_change_sentence(study, others, lead, bases))
    if study.surface == "model":
        sentences += fooled_sentence(study.subjects)
    return {
        "vacuous": _vacuous_sentences(study, vacuous, everything=not sound),
        "sentences": sentences,
    }


def _vacuous_sentences(study: Study, subjects: Sequence[Subject], *, everything: bool) -> list[str]:
    if not subjects:
        return []
    whole = "This audit is VACUOUS"
    opening = whole if everything else f"For {named(subjects)} this audit is VACUOUS"
    if study.weak_embedder:
        return [
            f"{opening}: the network that compares faces hardly tells people apart, so no "
            "similarity on this page means anything.",
            "A low number means a weak embedder here, not a safe feature.",
        ]
    reasons: dict[str, list[str]] = {}
    for entry in (entry for subject in subjects for entry in subject.entries):
        reasons.setdefault(_why(entry), []).append(entry.method)
    if len(reasons) > 1:
        reasons = {f"{r} ({listed(list(dict.fromkeys(m)))})": m for r, m in reasons.items()}
    safe = "model" if study.surface == "model" else "feature"
    # A broken model is broken, whatever the controls lack.
    leaks = [
        subject
        for subject in subjects
        if _lift(subject.strongest) > subject.strongest.facts.controls.margin
    ]
    return [
        f"{opening}: {'; '.join(reasons)}.",
        f"A low number means a weak attack here, not a safe {safe}.",
        *(
            f"A high number is a leak all the same: {_scored(subject.strongest)} for "
            f"{subject.name if study.surface == 'model' else subject.strongest.label}."
            for subject in leaks
        ),
    ]


def _lift(entry: Entry) -> float:
    """Return the lower end of the lift above the prior-only baseline."""
    return entry.facts.controls.lift[entry.measure].low


def _broken(entry: Entry) -> bool:
    """Return whether the same attack breaks the undefended model, beyond chance."""
    controls = entry.facts.controls
    lift = controls.control_lift[entry.measure].value
    return (controls.p_value or 0.0) < LEVEL and lift >= controls.margin


def _why(entry: Entry) -> str:
    """Say why an audit proves nothing, without the numbers, which stand beside its name."""
    features = entry.surface == "features"
    if len(entry.facts.partial) > MOST_PARTIAL * len(entry.reconstructions):
        about = "features" if features else "model"
        return (
            "the search stopped early for most people, so a low number says nothing about the "
            f"{about}"
        )
    if not entry.facts.controls.control_lift:
        good = "protection" if features else "defense"
        return (
            "no positive control was run, so a failed attack cannot be distinguished from a good "
            f"{good}"
        )
    untrusted = all(evaluator.excluded for evaluator in entry.evaluators)
    if untrusted or (not features and _broken(entry)):
        return entry.vacuous  # the positive control is fine, so it is something else
    if features:
        return (
            "the attack fails even on unprotected features, so its failure on others proves nothing"
        )
    return (
        "the attack fails even on a model without any defense, so its failure on any other model "
        "proves nothing"
    )


def _release_sentence(study: Study) -> str:
    """Say what leaves the device, and what for."""
    cuts = {
        (facts.cut, facts.target.model): facts.facts.feature_shape
        for facts in (subject.facts for subject in study.subjects)
    }
    parts = [
        f"{number(math.prod(shape), 'count')} numbers ({'×'.join(map(str, shape))}), the output "
        f"of layer {cut} of {'an' if model[:1].lower() in 'aeiou' else 'a'} {model}"
        for (cut, model), shape in cuts.items()
    ]
    names = study.subjects[0].facts.attributes
    count = number(len(names), "count")
    what = f"one attribute ({names[0]})" if len(names) == 1 else f"{count} attributes"
    where = f"depending on the cut, {'; or '.join(parts)}" if len(parts) > 1 else parts[0]
    return (
        "Instead of each image, its feature leaves the device, so that a server can predict "
        f"{what}: {where}."
    )


def _details(subject: Subject) -> str:
    """Return the part of a name in parentheses."""
    _, opening, details = subject.name.partition(" (")
    return f"{opening}{details}"


def _feature_leak(study: Study, subject: Subject) -> str:
    entry, scale = subject.strongest, subject.facts.controls.references
    features = f"features protected by {subject.name}"
    if subject.plain:
        features = f"{UNPROTECTED} features{_details(subject)}"
    who = f"the attack {entry.method}"
    if len(subject.entries) > 1:
        who = f"the strongest of {len(subject.entries)} attacks ({entry.method})"
    same, other = (number(x, "decimal") for x in (scale.same_person, scale.different_people))
    references = (
        f"two photos of one person reach {same}, photos of two people {other} and the prior-only "
        f"baseline {number(entry.baseline, 'decimal')}"
    )
    people = f"{number(len(study.first.identities), 'count')} people"
    if entry.embeds:
        return (
            f"From {features}, {who} predicted face embeddings, without making an image: for "
            f"{people} with {_scored(entry)}; {references}."
        )
    verified, baseline = (
        number(scores[entry.verified].value, "percent")
        for scores in (entry.facts.scores, entry.facts.prior_only)
    )
    return (
        f"From {features}, {who} reconstructed images of {people} that resemble the true ones "
        f"with {_scored(entry)}; {references}. By {verified} of them the person would be "
        f"recognised (prior-only baseline {baseline}): a face verifier ({verifier_name(entry)}) "
        f"accepts them at a false-accept rate of {rate(entry)}."
    )


def _change_sentence(
    study: Study, others: Sequence[Subject], lead: Subject, bases: Sequence[Subject]
) -> str:
    """Compare each defended subject with the undefended one that is most like it."""
    if not bases:
        return (_uncompared_models if study.surface == "model" else _uncompared_features)(
            others, lead
        )
    defended = [subject for subject in others if not subject.plain]
    if not defended and study.surface == "model":
        return (
            "No defended model is part of this report, so it does not say what a defense would "
            "change."
        )
    if not defended:
        return (
            "No protected features are part of this report, so it does not say what a protection "
            "would change."
        )
    pairs = [(subject, _base(subject, bases, lead)) for subject in defended]
    if len(pairs) > MAX_COMPARED:
        return sentence(_range(study, pairs))
    return sentence("; ".join(_change(subject, base) for subject, base in pairs))


def _base(subject: Subject, bases: Sequence[Subject], lead: Subject) -> Subject:
    """Return the undefended subject of the same recipe, else layer and architecture, else lead."""

    def place(each: Subject) -> tuple[str, str]:
        return getattr(each.facts, "cut", ""), each.strongest.facts.target.model

    alike = [base for base in bases if place(base) == place(subject)]
    if lead.entries[0].surface == "model":
        alike = [base for base in bases if base.recipe == subject.recipe] or alike
    return next(iter(alike), lead)


def _change(subject: Subject, base: Subject) -> str:
    entry, effect, price = subject.strongest, _effect(subject, base), _price(subject, base)
    features = entry.surface == "features"
    name = f"the {subject.name}" if subject.kind == "given" else subject.name
    score = f"{_scored(entry)} by {entry.method}" if features else _scored(entry)
    if effect == "lowers":
        # No promise: another attack may find more.
        nothing = features and _lift(entry) <= 0
        extra = ", not above the prior-only baseline beyond chance," if nothing else ""
        text = f"{name} lowers this to {score}{extra} and {price}"
    elif effect == "raises":
        text = f"{name} does not lower it but raises it to {score} and {price}"
    else:
        chance = "no difference beyond chance on the same people"
        text = f"{name} does not clearly lower it: {score}, {chance}; it {price}"
    if subject.stalled:
        accepted = number(entry.facts.scores["target_top1"].value, "percent")
        text += (
            f", but the attack did not converge there (the model itself accepts {accepted} of the "
            f"images), {MASKED}"
        )
    return text


def _effect(subject: Subject, base: Subject) -> Literal["lowers", "raises", "leaves"]:
    """Say lowered or raised only with 95 % confidence."""
    entry, other = subject.strongest, base.strongest
    if entry.surface == "features":
        low, high = interval(entry.by_person - other.by_person)
    else:
        low, high = _recognised_change(entry, other)
    return "raises" if low > 0 else "lowers" if high < 0 else "leaves"


def _recognised_change(entry: Entry, base: Entry) -> tuple[float, float]:
    """Return the interval of the change, person by person if both audits attacked the same."""
    own, other = entry.score, base.score
    mine, theirs = own.by_identity or [], other.by_identity or []
    same_people = entry.run.facts.identities == base.run.facts.identities
    if same_people and mine and len(mine) == len(theirs):
        return interval(torch.tensor(mine) - torch.tensor(theirs))
    return own.low - other.high, own.high - other.low


def _price(subject: Subject, base: Subject) -> str:
    """Say what a defense costs: accuracy of a model, utility of features."""
    if subject.entries[0].surface == "features":
        return _utility_price(base.utility.mean_mcc, subject.utility.mean_mcc)
    # The difference of what is printed, so that a reader who subtracts gets the same.
    before, after = round(base.accuracy, 3), round(subject.accuracy, 3)
    shown = f"{number(before, 'points')}\u00a0→\u00a0{number(after, 'percent')}"
    images = accuracy_images(given="given" in (subject.kind, base.kind))
    if before == after:
        return f"costs no accuracy on {images} ({shown})"
    points = number(abs(before - after), "points")
    verb, plural = "costs" if after < before else "gains", "" if points == "1" else "s"
    return f"{verb} {points} point{plural} of accuracy on {images} ({shown})"


def _utility_price(plain: float, protected: float) -> str:
    before, after = round(plain, 2), round(protected, 2)
    shown = f"MCC {number(before, 'decimal')}\u00a0→\u00a0{number(after, 'decimal')}"
    if before == after:
        return f"costs no utility ({shown})"
    verb = "costs" if after < before else "gains"
    return f"{verb} {number(abs(before - after), 'decimal')} of utility ({shown})"


def _range(study: Study, pairs: Sequence[tuple[Subject, Subject]]) -> str:
    unit = study.unit
    scores = sorted(subject.strongest.score.value for subject, _ in pairs)
    failing = [subject for subject, base in pairs if _effect(subject, base) != "lowers"]
    stalled = [subject for subject, _ in pairs if subject.stalled]
    if study.surface == "model":
        costs = sorted(round(b.accuracy, 3) - round(s.accuracy, 3) for s, b in pairs)
        what, under = f"the {len(pairs)} defended models", ""
        cost = [number(x, "points") for x in costs] + [f"points of accuracy on {study.tested_on}"]
    else:
        mcc = sorted(round(b.utility.mean_mcc, 2) - round(s.utility.mean_mcc, 2) for s, b in pairs)
        lowest = min((subject for subject, _ in pairs), key=lambda s: s.strongest.score.value)
        what, under = f"{len(pairs)} protections", f" under {lowest.name}"
        cost = [number(x, "decimal") for x in mcc] + ["of utility (MCC)"]
    verb = "does" if len(failing) == 1 else "do"
    result = f"{named(failing)} {verb} not clearly lower it" if failing else "all of them lower it"
    masked = f"; the attack did not converge on {named(stalled)}, {MASKED}" if stalled else ""
    return (
        f"with {what} it is between {number(scores[0], unit)}{under} and "
        f"{number(scores[-1], unit)}, and they cost between {cost[0]} and {cost[-2]} {cost[-1]}; "
        f"{result}{masked}"
    )


def _others(others: Sequence[Subject], noun: str) -> str:
    """Say the scores of other subjects; "" for none."""
    if not others:
        return ""
    if len(others) <= MAX_COMPARED:
        return f"for {listed([f'{s.name} it is {_scored(s.strongest)}' for s in others])}; "
    scores = sorted(subject.strongest.score.value for subject in others)
    low, high = (number(x, others[0].strongest.unit) for x in (scores[0], scores[-1]))
    return f"for the {len(others)} other {noun} it is between {low} and {high}; "


def _uncompared_models(others: Sequence[Subject], lead: Subject) -> str:
    """Compare with the positive control, where no undefended model is part of the report."""
    # Never empty: a model without any control is vacuous.
    controlled = [entry for entry in lead.entries if entry.facts.controls.control_lift]
    best = max(controlled, key=lambda entry: entry.score.value)
    control = best.facts.controls.control_lift[best.measure]
    stalled = [subject for subject in (lead, *others) if subject.stalled]
    itself = OWN_CONTROL in best.facts.controls.warnings
    text = (
        f"{_others(others, 'models')}the same attack on an undefended model scores "
        f"{number(control.value, 'points')} points above the prior-only baseline (at least "
        f"{number(control.low, 'points')}), so it works there"
    )
    if itself:
        text = (
            f"{_others(others, 'models')}the attack breaks this model itself, by "
            f"{number(control.value, 'points')} points above the prior-only baseline (at least "
            f"{number(control.low, 'points')}), so no undefended model was trained to compare with"
        )
    if stalled:
        text += f", but it did not converge on {named(stalled)}, {MASKED}"
    if any(subject.kind == "defended" for subject in (lead, *others)):
        text += "; that model is not part of this report, so the cost in accuracy is not known"
    return sentence(text)


def _uncompared_features(others: Sequence[Subject], lead: Subject) -> str:
    """Compare with the positive control, where no unprotected features are part of the report."""
    control = lead.strongest.facts.controls.control_lift["similarity"]
    text = (
        f"{_others(others, 'protections')}on {UNPROTECTED} features the same attack scores "
        f"{number(control.value, 'decimal')} above the prior-only baseline (at least "
        f"{number(control.low, 'decimal')}), so it works there; "
    )
    if not (lead.acts_at_release and len(lead.facts.defenses) == 1):
        return sentence(
            f"{text}those are not part of this report, so the cost of a protection is not known"
        )
    price = _utility_price(lead.facts.plain_utility.mean_mcc, lead.utility.mean_mcc)
    return sentence(f"{text}compared with plain features of the same network {lead.name} {price}")


def _scored(entry: Entry) -> str:
    value, reach = number(entry.score.value, entry.unit), span(entry.score, entry.unit)
    if entry.surface == "features":
        return f"a similarity of {value} (interval {reach})"
    return f"{value} (interval {reach}, {top1_short(entry)})"
