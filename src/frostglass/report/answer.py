"""The page's first sentences: what leaks from a model, and what a defense changes."""

from collections.abc import Sequence
from typing import Literal

import torch

from frostglass.audit.config import Judging
from frostglass.metrics._stats import interval
from frostglass.report.arrange import Aim, Entry, Study, named
from frostglass.report.charts import listed, number, span

ATTACKERS = {
    "gradients": "an attacker who has its weights and public pictures of other people",
    "scores": "an attacker who may ask it for scores and has public pictures of other people",
    "labels": "an attacker who sees only the labels it answers and has public pictures of other people",
}
MASKED = "which may be masked gradients and not privacy"


def answer(study: Study) -> dict[str, list[str]]:
    """The page's first sentences: `vacuous` says what proves nothing (in red), `sentences` what leaks and what a defense changes."""
    sound = [aim for aim in study.aims if not aim.vacuous]
    hollow = [aim for aim in study.aims if aim.vacuous]
    vacuous = _hollow_sentences(hollow, everything=not sound)
    sentences = []
    if sound:
        bases = [aim for aim in sound if aim.kind == "undefended"]
        lead = max(bases or sound, key=lambda aim: aim.strongest.leak.value)
        sentences = [
            _leak_sentence(lead),
            _change_sentence([aim for aim in sound if aim is not lead], lead, bases),
        ]
    return {"vacuous": vacuous, "sentences": sentences}


def _hollow_sentences(aims: Sequence[Aim], *, everything: bool) -> list[str]:
    if not aims:
        return []
    subject = "This audit is VACUOUS" if everything else f"For {named(aims)} this audit is VACUOUS"
    uncontrolled = any(
        not entry.facts.controls.control_lift for aim in aims for entry in aim.entries
    )
    reason = (
        "no positive control was run, so a failed attack cannot be told from a good defense"
        if uncontrolled
        else "the attack fails even on a model without any defense, so its failure on any other model proves nothing"
    )
    sentences = [
        f"{subject}: {reason}.",
        "A low number means a weak attack here, not a safe model.",
    ]
    # A broken model is broken, whatever the controls lack.
    leaks = [
        aim
        for aim in aims
        if min(lift.low for lift in aim.strongest.facts.controls.lift.values()) > Judging().margin
    ]
    return sentences + [
        f"A high number is a leak all the same: {_recognised(aim.strongest)} for {aim.name}."
        for aim in leaks
    ]


def _leak_sentence(aim: Aim) -> str:
    entry = aim.strongest
    people, candidates = entry.rebuilt.shape[:2]
    judges = len(entry.judges)
    judge = {1: "an independent judge", 2: "the stricter of two independent judges"}.get(
        judges, f"the strictest of {judges} independent judges"
    )
    _, opening, details = aim.name.partition(" (")
    model = (
        f"the model defended with {aim.name}"
        if aim.kind == "defended"
        else f"the {aim.kind} model{opening}{details}"
    )
    who = ATTACKERS.get(entry.access, "an attacker with public pictures of other people")
    share, reach = number(entry.leak.value, "percent"), span(entry.leak)
    guess = f"guessing with the same prior: {number(entry.facts.prior_only[entry.strictest].value, 'percent')}"
    if candidates == 1:
        hits = number(round(entry.leak.value * people), "count")
        return (
            f"From {model}, {who} rebuilt {hits} of {number(people, 'count')} people so well that {judge} recognised them "
            f"({share}, interval {reach}{_lenient(entry)}; {guess})."
        )
    return (
        f"From {model}, {who} rebuilt {number(people, 'count')} people, and {judge} recognised the right person in {share} of "
        f"{number(people * candidates, 'count')} pictures (interval {reach}{_lenient(entry)}; {guess})."
    )


def _change_sentence(others: Sequence[Aim], lead: Aim, bases: Sequence[Aim]) -> str:
    """What the defended models change, each against the undefended model that is most like it."""
    if not bases:
        return _uncompared_sentence(others, lead)
    defended = [aim for aim in others if aim.kind != "undefended"]
    if not defended:
        return "No defended model is part of this report, so it does not say what a defense would change."
    pairs = [(aim, _base(aim, bases, lead)) for aim in defended]
    text = (
        "; ".join(_change(aim, base) for aim, base in pairs) if len(pairs) <= 3 else _range(pairs)
    )
    return _sentence(text)


def _base(aim: Aim, bases: Sequence[Aim], lead: Aim) -> Aim:
    """The undefended model of the same recipe, else of the same architecture."""
    alike = [base for base in bases if base.recipe == aim.recipe]
    return next(
        iter(alike or [base for base in bases if _architecture(base) == _architecture(aim)]), lead
    )


def _change(aim: Aim, base: Aim) -> str:
    entry, effect = aim.strongest, _effect(aim, base)
    name, seen, price = (
        aim.name if aim.kind == "defended" else f"the {aim.name}",
        _recognised(entry),
        _price(aim, base),
    )
    if effect == "lowers":
        text = f"{name} lowers this to {seen} and {price}"
    elif effect == "raises":
        text = f"{name} does not lower it but raises it to {seen} and {price}"
    else:
        text = f"{name} does not clearly lower it: {seen}, where the judges do not all see a difference beyond chance on the same people; it {price}"
    if aim.stalled:
        text += f", but the attack did not take hold there (the model itself accepts {_success(entry)} of the pictures), {MASKED}"
    return text


def _effect(aim: Aim, base: Aim) -> Literal["lowers", "raises", "leaves"]:
    """A defense lowers leakage only if all judges say so with 95 % confidence; it raises it if one does."""
    changes = [_reach(aim.strongest, base.strongest, judge) for judge in aim.strongest.judges]
    if any(low > 0 for low, _ in changes):
        return "raises"
    return "lowers" if all(high < 0 for _, high in changes) else "leaves"


def _reach(entry: Entry, base: Entry, judge: str) -> tuple[float, float]:
    """Interval of the change of one judge's verdict, person by person where both audits attacked the same people."""
    mine, theirs = entry.facts.scores[judge], base.facts.scores[judge]
    same_people = entry.run.facts.identities == base.run.facts.identities
    if (
        same_people
        and mine.by_identity
        and theirs.by_identity
        and len(mine.by_identity) == len(theirs.by_identity)
    ):
        return interval(torch.tensor(mine.by_identity) - torch.tensor(theirs.by_identity))
    return mine.low - theirs.high, mine.high - theirs.low


def _price(aim: Aim, base: Aim) -> str:
    # The difference of what is printed, so that a reader who subtracts finds the same.
    before, after = round(base.accuracy, 3), round(aim.accuracy, 3)
    shown = f"{number(before, 'points')}\u00a0→\u00a0{number(after, 'percent')}"
    if before == after:
        return f"costs no accuracy on held-out pictures ({shown})"
    points = number(abs(before - after), "points")
    return f"{'costs' if after < before else 'gains'} {points} point{'' if points == '1' else 's'} of accuracy on held-out pictures ({shown})"


def _range(pairs: Sequence[tuple[Aim, Aim]]) -> str:
    leaks = sorted(aim.strongest.leak.value for aim, _ in pairs)
    costs = sorted(round(base.accuracy, 3) - round(aim.accuracy, 3) for aim, base in pairs)
    failing = [aim for aim, base in pairs if _effect(aim, base) != "lowers"]
    stalled = [aim for aim, _ in pairs if aim.stalled]
    text = (
        f"with the {len(pairs)} defended models it is between {number(leaks[0], 'percent')} and {number(leaks[-1], 'percent')}, and they cost "
        f"between {number(costs[0], 'points')} and {number(costs[-1], 'points')} points of accuracy on held-out pictures; "
    )
    text += (
        f"{named(failing)} {'does' if len(failing) == 1 else 'do'} not clearly lower it"
        if failing
        else "all of them lower it"
    )
    return text + (
        f"; the attack did not take hold on {named(stalled)}, {MASKED}" if stalled else ""
    )


def _uncompared_sentence(others: Sequence[Aim], lead: Aim) -> str:
    """For a report without an undefended model: all that is known of one is the positive control."""
    controlled = [
        entry for entry in lead.entries if entry.facts.controls.control_lift
    ]  # never empty: without any, the model is vacuous
    best = max(controlled, key=lambda entry: entry.leak.value)
    control = min(best.facts.controls.control_lift.values(), key=lambda score: score.low)
    leaks = sorted(aim.strongest.leak.value for aim in others)
    stalled = [aim for aim in (lead, *others) if aim.stalled]
    text = ""
    if 0 < len(others) <= 3:
        text = (
            f"for {listed([f'{aim.name} it is {_recognised(aim.strongest)}' for aim in others])}; "
        )
    elif others:
        text = f"for the {len(others)} other models it is between {number(leaks[0], 'percent')} and {number(leaks[-1], 'percent')}; "
    text += (
        f"the same attack on an undefended model scores {number(control.value, 'points')} points above guessing "
        f"(at least {number(control.low, 'points')}), so it works there"
    )
    if stalled:
        text += f", but it did not take hold on {named(stalled)}, {MASKED}"
    if any(aim.kind == "defended" for aim in (lead, *others)):
        text += "; that model is not part of this report, so the price of defending in accuracy cannot be told"
    return _sentence(text)


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."


def _architecture(aim: Aim) -> str:
    return aim.strongest.facts.target.model


def _success(entry: Entry) -> str:
    return number(entry.facts.scores["target_top1"].value, "percent")


def _recognised(entry: Entry) -> str:
    return f"{number(entry.leak.value, 'percent')} (interval {span(entry.leak)}{_lenient(entry)})"


def _lenient(entry: Entry) -> str:
    """The most generous judge's share, where it is so much higher that the strictest alone would flatter the model."""
    most = max(entry.facts.scores[judge].value for judge in entry.judges)
    who = "the other judge" if len(entry.judges) == 2 else "the most lenient judge"
    return f"; {number(most, 'percent')} by {who}" if most - entry.leak.value > 0.1 else ""
