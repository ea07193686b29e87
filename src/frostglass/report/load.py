"""Read the folders of finished runs, after checking their files by hash and against each other."""

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from frostglass.auditing.run_folder import NUMBERS, RUN_FORMAT
from frostglass.auditing.thresholds import Thresholds
from frostglass.core.errors import DataError, StoreError
from frostglass.core.parameters import problems
from frostglass.report.facts import (
    LARGEST,
    AuditFacts,
    FeatureAudit,
    FeatureRun,
    Measured,
    RunFacts,
    parsed,
)
from frostglass.store.files import read_tensors
from frostglass.store.manifest import broken_seal

ROUNDING = 1e-5  # relative; rows are written with six digits
CHECKED = ("verified", "strict", "match")  # scores of each evaluator
BOUNDED = ("top1_", "top5_", "verified_", "strict_", "target_top1", "similarity", "face_similarity")
IMAGE_SCORES = ("similarity", "face_similarity", "ssim", "psnr", "fsim", "manifold")


@dataclass(frozen=True)
class AuditRows:
    """The rows of one audit: its people, and for each score values (I, K) of their candidates."""

    names: tuple[str, ...]
    columns: Mapping[str, Tensor]


@dataclass(frozen=True)
class Run:
    """One run's files, checked against each other; `document` is its run.json as it is.

    `redacted`: without names and faces. `shown`: whether a page has images of it.
    """

    document: dict[str, Any]
    facts: RunFacts
    rows: tuple[AuditRows, ...]
    images: Mapping[str, Tensor]
    redacted: bool = False
    shown: bool = True


def read_run(folder: Path) -> Run:
    """Read a run folder; raises StoreError or DataError unless its files fit each other."""
    if not folder.is_dir():
        raise StoreError(f"{folder} is not a folder: give the folder of a finished run")
    if missing := [name for name in NUMBERS if not (folder / name).is_file()]:
        raise StoreError(
            f"{folder} has no {missing[0]}, so it is not a finished run: "
            "give the folder that `frostglass run --out` wrote"
        )
    if problem := broken_seal(folder, NUMBERS):
        raise StoreError(f"{problem}: run the same command again, which writes the folder anew")
    path = folder / "run.json"
    try:
        # Settings may be infinite, which JSON cannot express: keep the word as text.
        document = json.loads(path.read_bytes(), parse_constant=str)
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path} is not JSON ({error}): run again to write it anew") from error
    document = document if isinstance(document, dict) else {}
    if (version := document.get("format")) != RUN_FORMAT:
        raise StoreError(
            f"{path} has format {json.dumps(version)}, expected {RUN_FORMAT}: "
            "run again with this version of frostglass"
        )
    try:
        facts = parsed(document)
    except ValidationError as error:
        text = problems(error)[0][:160]
        raise DataError(f"{path} is damaged ({text}): run again to write it anew") from None
    _check_people(path, facts)
    _check_scores(path, facts)
    images = _images(folder / "images.safetensors", facts)
    return Run(document, facts, _rows(folder / "rows.csv", facts, images), images)


def _check_people(path: Path, facts: RunFacts) -> None:
    counts = {len(values) for values in facts.attributes.values()}
    if counts - {len(facts.identities)}:
        raise DataError(f"{path}: its attributes are about other people: run again")
    known = {field.name for field in fields(Thresholds)}
    if facts.thresholds and not set(facts.thresholds.limits) <= known:
        raise DataError(f"{path} has thresholds that this version does not know: run again")


def _check_scores(path: Path, facts: RunFacts) -> None:
    features = facts.surface == "features"
    kinds = [each.kind for each in facts.evaluators]
    shared = [*facts.top1, *IMAGE_SCORES]
    if not features:
        top5 = [name.replace("top1", "top5") for name in facts.top1]
        shared = [*facts.top1, "target_top1", *top5]
    for audit in facts.audits:
        verified = audit.verified
        needed = [name.replace("verified", each) for each in CHECKED for name in verified] + shared
        if absent := [n for n in needed if n not in audit.scores or n not in audit.prior_only]:
            raise DataError(f"{path} has no {absent[0]} for audit {audit.label!r}: run again")
        expected = kinds[: max(len(verified), len(facts.top1))]  # data may lack embedders
        counted = {n for n in audit.scores if n.startswith(("top1_", "verified_"))}
        more = counted != {*verified, *facts.top1}
        if more or [each.kind for each in audit.evaluators] != expected:
            raise DataError(f"{path}: audit {audit.label!r} has other evaluators: run again")
        if audit.summaries.keys() != audit.prior_only_summaries.keys() or (
            audit.scores.keys() != audit.prior_only.keys()
        ):
            raise DataError(
                f"{path}: audit {audit.label!r} and its baseline have other scores: run again"
            )
        both = (*audit.scores.items(), *audit.prior_only.items())
        if odd := [n for n, score in both if n.startswith(BOUNDED) and score.extreme > LARGEST]:
            raise DataError(
                f"{path}: {odd[0]} of audit {audit.label!r} is no share: run again to write it anew"
            )
        controls, name = audit.controls, audit.controls.deciding
        if (
            name not in (["similarity"] if features else verified)
            or name not in controls.lift
            or not (controls.vacuous or name in controls.control_lift)
            or sum(each.decides for each in audit.evaluators) != 1
        ):
            raise DataError(
                f"{path} has no controls for audit {audit.label!r}, so it cannot be believed: "
                "run again"
            )
        if features and not audit.keys.get("exposure"):
            raise DataError(f"{path} does not say what audit {audit.label!r} attacked: run again")


def _images(path: Path, facts: RunFacts) -> dict[str, Tensor]:
    images, _ = read_tensors(path)
    reference, people = "private", len(facts.identities)
    expected: tuple[int, ...] = (people,)
    if isinstance(facts, FeatureRun):
        reference, expected = "victims", (people, facts.audits[0].images_per_person)
    for name in [reference, *(f"audit.{place}" for place in range(len(facts.audits)))]:
        if name not in images:
            raise DataError(f"{path} has no {name}, which run.json describes: run again")
        tensor, dimensions = images[name], 4 if name == "private" else 5
        if (tensor.dtype, tensor.ndim) != (torch.uint8, dimensions) or (
            tensor.shape[-3] not in (1, 3) or not tensor.numel()
        ):
            raise DataError(
                f"{path}: {name} is {tensor.dtype} {tuple(tensor.shape)}, "
                "expected grey or colour images as bytes: run again"
            )
    if (shape := tuple(images[reference].shape[: len(expected)])) != expected:
        raise DataError(f"{path}: {reference} holds {shape} images, expected {expected}: run again")
    for place, audit in enumerate(facts.audits):
        if isinstance(audit, FeatureAudit) and audit.images_per_person != expected[-1]:
            raise DataError(f"{path}: audit {audit.label!r} is about other images: run again")
        count, candidates = images[f"audit.{place}"].shape[:2]
        if len(expected) == 2 and (count != people or candidates % expected[1]):
            raise DataError(
                f"{path}: audit {audit.label!r} has {candidates} reconstructions of each of "
                f"{count} people, expected a multiple of {expected[1]} of {people}: run again"
            )
    return images


def _rows(path: Path, facts: RunFacts, images: Mapping[str, Tensor]) -> tuple[AuditRows, ...]:
    """Read the rows of each audit, and check that its scores are means of them."""
    try:
        lines = list(csv.DictReader(io.StringIO(path.read_bytes().decode(), newline="")))
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} is not a table ({error}): run again to write it anew") from error
    result, start = [], 0
    for place, audit in enumerate(facts.audits):
        people, candidates = images[f"audit.{place}"].shape[:2]
        own, start = lines[start : start + people * candidates], start + people * candidates
        names = [line.get("identity") or "" for line in own[::candidates]]
        keys = [(audit.label, name, str(k)) for name in names for k in range(candidates)]
        columns = {name: [_number(line.get(name)) for line in own] for name in audit.scores}
        if (
            len(own) != people * candidates
            or [(line.get("audit"), line.get("identity"), line.get("candidate")) for line in own]
            != keys
            or len(set(names) - {""}) != people
            or ((place == 0 or audit.surface == "features") and names != facts.identities)
            or not set(audit.partial) <= set(names)
            or not all(_is_by_person(audit, name, people) for name in audit.verified)
            or not all(set(columns[name]) <= {0.0, 1.0} for name in facts.top1)
            or not all(set(columns[name]) <= {0.0, 1.0} for name in audit.verified)
            or not all(_is_mean(score, columns[name]) for name, score in audit.scores.items())
        ):
            raise DataError(
                f"{path} does not belong to its run.json (audit {audit.label!r}): "
                "run again to write both"
            )
        values = {
            name: torch.tensor(column, dtype=torch.double).unflatten(0, (-1, candidates))
            for name, column in columns.items()
        }
        result.append(AuditRows(tuple(names), values))
    if start != len(lines):
        raise DataError(
            f"{path} has {len(lines)} rows where its run.json explains {start}: "
            "run again to write both"
        )
    return tuple(result)


def _is_by_person(audit: AuditFacts, name: str, people: int) -> bool:
    """Whether a score and its baseline have one value for each person."""
    both = (audit.scores[name].by_identity, audit.prior_only[name].by_identity)
    return all(values is not None and len(values) == people for values in both)


def _number(text: str | None) -> float:
    """Parse a number; NaN, which equals no score, for anything else."""
    try:
        return float(text or "")
    except ValueError:
        return math.nan


def _is_mean(score: Measured, column: Sequence[float]) -> bool:
    largest = max(map(abs, column), default=math.nan)
    mean = sum(column) / max(1, len(column))
    return math.isclose(mean, score.value, rel_tol=0, abs_tol=ROUNDING * largest + 1e-12)
