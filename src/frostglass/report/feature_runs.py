"""Finished audits of split models, read from their folders: three files that are checked against each other before anything is believed."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, Field, FiniteFloat, ValidationError
from torch import Tensor

from frostglass.audit.feature_grid import FEATURE_RUN_FORMAT
from frostglass.core.errors import DataError
from frostglass.core.parameters import problems
from frostglass.report.charts import frosted
from frostglass.report.redact import covered, hidden_document, hider
from frostglass.report.runs import (
    Measured,
    Network,
    Outline,
    check_format,
    check_pictures,
    open_run,
    read_lines,
)
from frostglass.store.files import read_tensors

KIND = "features"
OWN_FACTS = (
    "granted",
    "attributes",
    "cut",
)  # words of the package and of the data's table, never people
ROUNDING = 1e-5  # relative; rows are written with six digits


class Usefulness(BaseModel):
    """What a server makes of features."""

    mean_mcc: FiniteFloat
    mean_mcc_low: FiniteFloat
    mean_mcc_high: FiniteFloat
    mean_auc: FiniteFloat
    mean_auc_low: FiniteFloat
    mean_auc_high: FiniteFloat
    accuracy: FiniteFloat


class References(BaseModel):
    """The scale of a similarity: that of two photos of one person, and of two people."""

    same_person: FiniteFloat
    different_people: FiniteFloat


class FeatureControlFacts(BaseModel):
    lift: dict[str, Measured]
    control_lift: dict[str, Measured]
    vacuous: str
    warnings: list[str]


class LeavingFacts(BaseModel):
    """About what leaves the device, and about what was rebuilt of it as a whole."""

    relative_deviation: FiniteFloat
    feature_shape: list[int] = Field(min_length=1)
    lda: FiniteFloat | None
    emd: FiniteFloat
    emd_floor: FiniteFloat


class FeatureAuditFacts(BaseModel):
    """One attack on what one protection released; `released` is what the protection measured, a row for each batch."""

    label: str
    case: str
    seed: int
    cut: str
    attributes: list[str] = Field(min_length=1)
    defenses: list[dict[str, Any]]
    attack: dict[str, Any]
    granted: list[str]
    target: Network
    utility: Usefulness
    plain_utility: Usefulness
    facts: LeavingFacts
    released: list[dict[str, Any]]
    scores: dict[str, Measured]
    prior_only: dict[str, Measured]
    explained: FiniteFloat
    controls: FeatureControlFacts
    queries: int
    seconds: FiniteFloat
    keys: dict[str, str]


class FeatureRunFacts(Outline):
    """What a report needs of the run.json of a run about features."""

    pictures: Annotated[int, Field(ge=1)]
    embedder: Network
    references: References
    audits: list[FeatureAuditFacts] = Field(min_length=1)
    failed: list[str]


@dataclass(frozen=True)
class FeatureRunFiles:
    """One run's files, checked against each other: `rows` has for each audit its columns, values (I, K) of each person's candidates."""

    document: dict[str, Any]
    facts: FeatureRunFacts
    rows: tuple[Mapping[str, Tensor], ...]
    pictures: Mapping[str, Tensor]


def is_of_features(document: Mapping[str, Any]) -> bool:
    """Whether a run.json is that of an audit of split models."""
    return document.get("kind") == KIND


def read_feature_run(folder: Path) -> FeatureRunFiles:
    """The files `write_feature_run` wrote, refused unless they fit each other."""
    document, path = open_run(folder), folder / "run.json"
    if not is_of_features(document):
        raise DataError(
            f"{path} is not about the features of a split model: make its report with `frostglass report`"
        )
    check_format(folder, document, FEATURE_RUN_FORMAT)
    try:
        facts = FeatureRunFacts.model_validate(document)
    except ValidationError as error:
        raise DataError(
            f"{path} is damaged ({problems(error)[0][:160]}): run again to write it anew"
        ) from None
    _check_scores(path, facts)
    pictures = _pictures(folder / "pictures.safetensors", facts)
    return FeatureRunFiles(document, facts, _rows(folder / "rows.csv", facts, pictures), pictures)


def judges_of(facts: FeatureRunFacts) -> list[str]:
    return [f"top1_{place}" for place in range(1, len(facts.evaluators) + 1)]


def _check_scores(path: Path, facts: FeatureRunFacts) -> None:
    wanted = [
        "similarity",
        "face_similarity",
        "ssim",
        "psnr",
        "fsim",
        "manifold",
        *judges_of(facts),
    ]
    for audit in facts.audits:
        if absent := [
            name for name in wanted if name not in audit.scores or name not in audit.prior_only
        ]:
            raise DataError(
                f"{path} has no {absent[0]} for audit {audit.label!r}: run again to write it anew"
            )
        controls = audit.controls
        if "similarity" not in controls.lift or not (
            controls.vacuous or "similarity" in controls.control_lift
        ):
            raise DataError(
                f"{path} has no controls for audit {audit.label!r}, so it cannot be believed: run again"
            )
        if "released" not in audit.keys:
            raise DataError(
                f"{path} does not say what audit {audit.label!r} attacked: run again to write it anew"
            )


def _pictures(path: Path, facts: FeatureRunFacts) -> dict[str, Tensor]:
    pictures, _ = read_tensors(path)
    check_pictures(
        path, pictures, {"victims": 5} | {f"audit.{place}": 5 for place in range(len(facts.audits))}
    )
    people, each = len(facts.identities), facts.pictures
    if pictures["victims"].shape[:2] != (people, each):
        raise DataError(
            f"{path} has victims' pictures {tuple(pictures['victims'].shape[:2])} for {people} people with {each} each: run again"
        )
    for place, audit in enumerate(facts.audits):
        found = pictures[f"audit.{place}"].shape[:2]
        if found[0] != people or found[1] % each:
            raise DataError(
                f"{path}: audit {audit.label!r} rebuilt {found[1]} pictures of each of {found[0]} people, expected a multiple of {each} of {people}: run again"
            )
    return pictures


def _rows(
    path: Path, facts: FeatureRunFacts, pictures: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], ...]:
    """The columns of each audit, after checking that the scores were made from them."""
    lines = read_lines(path)
    found, start = [], 0
    for place, audit in enumerate(facts.audits):
        candidates = pictures[f"audit.{place}"].shape[1]
        keys = [
            (audit.label, name, str(candidate))
            for name in facts.identities
            for candidate in range(candidates)
        ]
        mine, start = lines[start : start + len(keys)], start + len(keys)
        columns = {name: [_number(line.get(name)) for line in mine] for name in audit.scores}
        if [
            (line.get("audit"), line.get("identity"), line.get("candidate")) for line in mine
        ] != keys or not all(_makes(score, columns[name]) for name, score in audit.scores.items()):
            raise DataError(
                f"{path} does not belong to its run.json (audit {audit.label!r}): run again to write both"
            )
        found.append(
            {
                name: torch.tensor(column, dtype=torch.double).unflatten(0, (-1, candidates))
                for name, column in columns.items()
            }
        )
    if start != len(lines):
        raise DataError(
            f"{path} has {len(lines)} rows where its run.json explains {start}: run again to write both"
        )
    return tuple(found)


def _number(text: str | None) -> float:
    """NaN for what is no number: no score can be the mean of that, so it is refused."""
    try:
        return float(text or "")
    except ValueError:
        return math.nan


def _makes(score: Measured, column: Sequence[float]) -> bool:
    """Is the score the mean of this column?"""
    largest = max(map(abs, column), default=math.nan)
    return math.isclose(
        sum(column) / max(1, len(column)),
        score.value,
        rel_tol=0,
        abs_tol=ROUNDING * largest + 1e-12,
    )


def without_names_and_faces(runs: Sequence[FeatureRunFiles]) -> list[FeatureRunFiles]:
    """The same runs with letters for people and a few colours for each face; a person has one letter in all of them."""
    hide = hider(covered(name for run in runs for name in run.facts.identities))
    result = []
    for run in runs:
        document = hidden_document(hide, run.document)
        for plain, hidden in zip(run.document["audits"], document["audits"], strict=True):
            hidden |= {name: plain[name] for name in OWN_FACTS}
        pictures = {name: frosted(pixels) for name, pixels in run.pictures.items()}
        result.append(
            FeatureRunFiles(document, FeatureRunFacts.model_validate(document), run.rows, pictures)
        )
    return result
