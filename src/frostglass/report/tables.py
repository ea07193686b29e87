"""What the page's tables hold: a verdict for each control of each audit, and the pictures of the people shown."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from frostglass.audit.controls import (
    DISAGREEMENT,
    LOW_TARGET_SUCCESS,
    LUCKY_PRIOR,
    OFF_MANIFOLD,
    WEAK_EVALUATOR,
)
from frostglass.report.arrange import Entry, Study
from frostglass.report.charts import LARGEST, Kind, number, picture
from frostglass.report.runs import Network

SHOWN = 16  # people in the first picture table; the others are folded away
Status = Literal["ok", "look", "fail", "void"]


@dataclass(frozen=True)
class Verdict:
    """One cell of the controls' table."""

    text: str
    status: Status
    detail: str = ""


def checks(study: Study) -> list[dict[str, Any]]:
    """Each control with what it means and a verdict for each audit; whatever passes in a vacuous audit is void."""

    def row(name: str, meaning: str, judge: Callable[[Entry], Verdict]) -> dict[str, Any]:
        cells = [(entry, judge(entry)) for entry in study.entries]
        void = [
            replace(v, status="void") if v.status == "ok" and e.facts.controls.vacuous else v
            for e, v in cells
        ]
        return {"name": name, "meaning": meaning, "cells": void}

    def positive(entry: Entry) -> Verdict:
        controls = entry.facts.controls
        if not controls.control_lift:
            return Verdict("not run", "fail")
        worst = min(controls.control_lift.values(), key=lambda score: score.low)
        return Verdict(
            number(worst.value, "gain"),
            "fail" if controls.vacuous else "ok",
            f"at least {number(worst.low, 'points')}",
        )

    def guessing(entry: Entry) -> Verdict:
        chance = max(entry.facts.prior_only[judge].value for judge in entry.judges)
        return Verdict(number(chance, "percent"), "look" if chance > LUCKY_PRIOR else "ok")

    def limited(
        value: float | None, kind: Kind, fine: Callable[[float], bool], absent: str
    ) -> Verdict:
        return (
            Verdict(absent, "look")
            if value is None
            else Verdict(number(value, kind), "ok" if fine(value) else "look")
        )

    return [
        row(
            "Positive control",
            "The same attack on an undefended model, above guessing. Where it fails there, its failure elsewhere proves nothing.", positive,
        ),
        row("Prior-only", "Random pictures from the attacker's generator, judged the same way. This much is luck.", guessing),
        row(
            "Judges agree", "Share of rebuilt pictures on which the first two judges say the same.",
            lambda e: limited(e.facts.controls.agreement, "percent", lambda v: v >= 1 - DISAGREEMENT, "one judge only"),
        ),
        row(
            "Only one accepts", "Pictures that convince just one of the two may be false positives: images that fool a network and no person.",
            lambda e: limited(e.facts.controls.only_one, "percent", lambda v: v <= DISAGREEMENT, "one judge only"),
        ),
        row(
            "Still a real picture?",
            "Distance to real public pictures, relative to the generator's own pictures. Far above 1 the attack has left the world of real ones.",
            lambda e: limited(e.facts.controls.manifold, "ratio", lambda v: v <= OFF_MANIFOLD, "not measured"),
        ),
        row(
            "Target success", "Does the attacked model itself accept the pictures? If not, the attack did not take hold, which is not privacy. "
            "High here and low for the judges: the model was fooled, the person was not found.",
            lambda e: limited(e.facts.scores["target_top1"].value, "percent", lambda v: v >= LOW_TARGET_SUCCESS, ""),
        ),
        *(judge_check(place, judge, study.vacuous) for place, judge in enumerate(study.first.evaluators, 1)),
    ]  # fmt: skip


def judge_check(place: int, judge: Network, vacuous: bool) -> dict[str, Any]:
    """A judge's own quality, which is the same for all audits."""
    right = judge.accuracy.test
    status: Status = "look" if right < WEAK_EVALUATOR else "void" if vacuous else "ok"
    meaning = f"Share of held-out private pictures this judge ({judge.model}) names correctly. A weak judge overlooks leaks."
    return {
        "name": f"Judge {place} itself",
        "meaning": meaning,
        "cells": [Verdict(number(right, "percent"), status)],
    }


def picture_tables(study: Study, picture_bytes: int) -> list[list[int]]:
    """Places of the people shown, as many as `picture_bytes` allow: a first table, then tables for the rest; chosen by place, never by success."""
    largest = max(
        math.prod(min(side, LARGEST) if i else side for i, side in enumerate(e.rebuilt.shape[2:]))
        for e in study.shown
    )
    # 4/3 for base64, and the table's own text.
    column = (len(study.shown) + 1) * (largest * 4 / 3 + 200)
    people = len(study.first.identities)
    within = spread(people, max(1, min(people, int(picture_bytes / column))))
    first = [within[place] for place in spread(len(within), min(SHOWN, len(within)))]
    rest = [place for place in within if place not in first]
    return [first, *(rest[start : start + SHOWN] for start in range(0, len(rest), SHOWN))]


def spread(total: int, wanted: int) -> list[int]:
    """`wanted` places out of `total`, the same distance apart."""
    return [round(step * (total - 1) / max(1, wanted - 1)) for step in range(wanted)]


def cell(entry: Entry, identity: str) -> dict[str, Any] | None:
    """The picture shown for one person in one audit, the judges' verdicts on it, and whether its search broke off; None for somebody not attacked."""
    verdicts = entry.run.verdicts[entry.number]
    if identity not in verdicts:
        return None
    place = list(verdicts).index(identity)
    return {
        "picture": picture(entry.rebuilt[place, 0]),
        "verdicts": verdicts[identity],
        "partial": identity in entry.facts.partial,
    }


def recognised(verdicts: Sequence[bool]) -> str:
    """Verdicts as words, for readers who cannot see the marks."""
    return ", ".join(
        f"judge {place} {'recognises' if yes else 'does not recognise'} it"
        for place, yes in enumerate(verdicts, 1)
    )
