"""Which answers count: those of participants who pass the attention checks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from frostglass.core.errors import DataError
from frostglass.study.answers import Answer, State
from frostglass.study.folder import Design, Item, Participant, Protocol

PASSED = 0.75  # of a participant's attention checks that must be right


@dataclass(frozen=True)
class Judgement:
    """An answer with the item it is about; `position` is where the chosen option was."""

    participant: str
    number: int
    item: Item
    choice: int
    position: int
    truth_position: int | None
    seconds: float


@dataclass(frozen=True)
class Participation:
    """How many took part, and why answers do not count."""

    invited: int
    consented: int
    finished: int
    withdrawn: int
    excluded: int  # failed attention checks
    unchecked: int  # left before the first one
    answers: int  # to questions other than checks, counted
    timed_out: int  # of participants who count
    median_seconds: float | None


def judgements(design: Design, answers: Sequence[Answer]) -> dict[str, list[Judgement]]:
    """Return what each participant chose, attention checks included; without time-outs."""
    people = {each.id: each for each in design.participants}
    result: dict[str, list[Judgement]] = {each.id: [] for each in design.participants}
    for answer in answers:
        if not _fits(design, people.get(answer.participant), answer):
            raise DataError(
                f"an answer of participant {answer.participant} (trial {answer.place}) does not "
                "fit the study: its file of answers was changed; give the one that was written"
            )
        if answer.choice is not None and answer.position is not None:
            result[answer.participant].append(
                _judgement(design, people[answer.participant], answer)
            )
    return result


def _fits(design: Design, participant: Participant | None, answer: Answer) -> bool:
    """Does an answer name a trial of its participant, and an option of that?"""
    if participant is None or not 0 <= answer.place < len(participant.trials):
        return False
    trial = participant.trials[answer.place]
    none = design.items[trial.item].none
    if answer.choice is None or answer.position is None:
        return answer.choice is answer.position
    last = none if participant.protocol == "identification" else none - 1
    shown = [*trial.order, none]
    return 0 <= answer.position <= last and shown[answer.position] == answer.choice


def _judgement(design: Design, participant: Participant, answer: Answer) -> Judgement:
    trial = participant.trials[answer.place]
    item = design.items[trial.item]
    assert answer.choice is not None
    assert answer.position is not None
    where = None
    if item.truth is not None:
        where = item.none if item.truth == item.none else trial.order.index(item.truth)
    return Judgement(
        answer.participant, trial.item, item, answer.choice, answer.position, where, answer.seconds
    )


def check_share(made: Sequence[Judgement]) -> float | None:
    """Return the share of a participant's attention checks that are right; None without any."""
    checks = [each.choice == each.item.truth for each in made if each.item.check]
    return sum(checks) / len(checks) if checks else None


def counted(
    by_participant: Mapping[str, Sequence[Judgement]], protocol: Protocol
) -> list[Judgement]:
    """Return the judgements of a protocol that count, without attention checks."""
    return [
        each
        for made in by_participant.values()
        if (check_share(made) or 0.0) >= PASSED
        for each in made
        if each.item.protocol == protocol and not each.item.check
    ]


def participation(
    design: Design, states: Sequence[State], answers: Sequence[Answer]
) -> Participation:
    """Count who took part."""
    made = judgements(design, answers)
    shares = {name: check_share(each) for name, each in made.items()}
    passed = {name for name, share in shares.items() if share is not None and share >= PASSED}
    lengths = {each.id: len(each.trials) for each in design.participants}
    begun = {answer.participant for answer in answers}
    times = sorted(each.seconds for name in passed for each in made[name] if not each.item.check)
    return Participation(
        invited=len(states),
        consented=sum(state.consented for state in states),
        finished=sum(state.answered == lengths[state.id] for state in states),
        withdrawn=sum(state.withdrawn for state in states),
        excluded=sum(share is not None and share < PASSED for share in shares.values()),
        unchecked=sum(shares[name] is None for name in begun),
        answers=len(times),
        timed_out=sum(a.choice is None for a in answers if a.participant in passed),
        median_seconds=times[len(times) // 2] if times else None,
    )
