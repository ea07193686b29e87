"""The report of audits of split models: one self-contained HTML page, and the JSON it was made from, out of finished runs.

Every number comes from a run's files, which are checked against each other first; nothing is measured here.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from frostglass.audit.feature_grid import FEATURE_RUN_FORMAT
from frostglass.metrics._lda import lda_chance
from frostglass.report.charts import LARGEST, SHAPES, number, picture, span
from frostglass.report.feature_answer import feature_answer, feature_notes, reach, sized
from frostglass.report.feature_plot import feature_tradeoff
from frostglass.report.feature_runs import (
    KIND,
    judges_of,
    read_feature_run,
    without_names_and_faces,
)
from frostglass.report.feature_study import KINDS, Attempt, FeatureStudy, Protection, group
from frostglass.report.page import (
    PICTURE_BYTES,
    check_place,
    distinct_folders,
    rendered,
    write_report,
)
from frostglass.report.tables import Status, Verdict, judge_check, recognised, spread

PEOPLE_SHOWN = 12
GRANTED = {
    "encode": "plain features of its own pictures",
    "encoder": "the device’s network",
    "protection": "protected features of its own pictures",
}
MEASURES = {
    "emd_start": "distance before",
    "emd_end": "distance after",
    "residual_start": "inversion error before",
    "residual_end": "inversion error after",
    "deviation": "mean square change",
    "gradient_end": "slope at the end",
    "terms": "terms of the inverse",
    "steps": "steps",
    "pictures": "pictures",
}


@dataclass(frozen=True)
class Square:
    """What one attack found on one protection: `attempt` is the best of its `audits` there, None if there are none; `strongest` if it is the one that counts."""

    attempt: Attempt | None
    audits: int
    strongest: bool


def build_feature_report(runs: Sequence[Path], out: Path, *, redact: bool = False) -> Path:
    """Write one HTML page about finished audits of split models to `out`, and the JSON it was made from beside it.

    With `redact` faces are reduced to a few colours and names to letters before anything is written.
    """
    folders, out = distinct_folders(runs), Path(out)
    check_place(out, folders)
    loaded = [read_feature_run(folder) for folder in folders]
    if redact:
        loaded = without_names_and_faces(loaded)
    studies = group(loaded)
    document = {
        "format": FEATURE_RUN_FORMAT,
        "kind": KIND,
        "redacted": redact,
        "answers": [
            {"runs": study.name, **feature_answer(study), "notes": feature_notes(study)}
            for study in studies
        ],
        "runs": [run.document for run in loaded],
    }
    return write_report(out, render_features(studies, redacted=redact), document)


def render_features(studies: Sequence[FeatureStudy], *, redacted: bool) -> str:
    """The page as text."""
    return rendered(
        "features.html", studies=studies, redacted=redacted, shapes=SHAPES, kinds=KINDS, measures=MEASURES, picture_bytes=PICTURE_BYTES // len(studies),
        answer=feature_answer, notes=feature_notes, matrix=matrix, tradeoff=feature_tradeoff, people_shown=people_shown, cell=cell, granted=granted, positive_control=positive_control, checks=checks,
        judges_of=judges_of, by_chance=by_chance, recognised=recognised, picture=picture, reach=reach, sized=sized, span=span,
    )  # fmt: skip


def matrix(study: FeatureStudy) -> dict[str, list[Square]]:
    """Every attack by name, with a square for each protection."""

    def square(protection: Protection, method: str) -> Square:
        tried = [attempt for attempt in protection.attempts if attempt.method == method]
        best = max(
            tried, key=lambda attempt: (not attempt.vacuous, attempt.similarity.value), default=None
        )
        sound = best is not None and not best.vacuous
        return Square(best, len(tried), sound and best is protection.strongest)

    return {
        method: [square(protection, method) for protection in study.protections]
        for method in study.methods
    }


def people_shown(study: FeatureStudy, picture_bytes: int) -> list[int]:
    """Places of the people shown, as many as `picture_bytes` allow; chosen by place, never by success."""
    largest = max(
        math.prod(min(side, LARGEST) if i else side for i, side in enumerate(a.rebuilt.shape[2:]))
        for a in study.pictured
    )
    # 4/3 for base64, and the table's own text.
    column = (len(study.pictured) + 1) * (largest * 4 / 3 + 300)
    people = len(study.first.identities)
    return spread(people, max(1, min(people, PEOPLE_SHOWN, int(picture_bytes / column))))


def cell(attempt: Attempt, place: int) -> dict[str, Any]:
    """The picture shown for one person in one audit, how similar it is, and the judges' verdicts on it."""
    rows = attempt.run.rows[attempt.number]
    return {
        "picture": picture(attempt.rebuilt[place, 0]),
        "similarity": rows["similarity"][place, 0].item(),
        "verdicts": [bool(rows[judge][place, 0] == 1) for judge in judges_of(attempt.run.facts)],
    }


def granted(attempt: Attempt) -> str:
    """What the attacker was given besides the released features, in plain words."""
    given = [GRANTED.get(ability, ability) for ability in attempt.facts.granted]
    return "; ".join(given) or "the released features alone"


def by_chance(attempt: Attempt) -> float:
    """What the LDA score would come to if everybody's pictures were dealt out by lot."""
    people, candidates = attempt.rebuilt.shape[:2]
    return lda_chance(torch.arange(people).repeat_interleave(candidates))


def positive_control(study: FeatureStudy, attempt: Attempt) -> Verdict:
    """How the same attack fares where nothing is protected."""
    lift = attempt.facts.controls.control_lift.get("similarity")
    if lift is None:
        return Verdict("not run", "fail")
    # A blind embedder makes the audit vacuous, and what it says of the control worth nothing.
    status: Status = "void" if study.blind_embedder else "fail" if attempt.vacuous else "ok"
    return Verdict(number(lift.value, "change"), status, f"at least {number(lift.low, 'change')}")


def checks(study: FeatureStudy) -> list[dict[str, Any]]:
    """What holds for all audits: how good those are who judge them. What passes in a vacuous audit is void."""
    scale = study.first.references
    apart = (
        f"{number(scale.same_person, 'decimal')} and {number(scale.different_people, 'decimal')}"
    )
    faces = {
        "name": "Faces are told apart",
        "meaning": f"Similarity of two photos of one person, and of two people, to the network that compares them ({study.first.embedder.model}, "
        "trained on public people). Where it hardly differs, no similarity means anything.",
        "cells": [
            Verdict(apart, "fail" if study.blind_embedder else "void" if study.vacuous else "ok")
        ],
    }
    return [
        faces,
        *(
            judge_check(place, judge, study.vacuous)
            for place, judge in enumerate(study.first.evaluators, 1)
        ),
    ]
