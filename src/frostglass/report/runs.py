"""Finished runs, read from their folders: three files that are checked against each other before anything is believed."""

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, FiniteFloat, ValidationError
from torch import Tensor, uint8

from frostglass.audit.grid import RUN_FORMAT
from frostglass.core.errors import DataError, StoreError
from frostglass.core.parameters import problems
from frostglass.store.files import read_tensors

FILES = ("run.json", "rows.csv", "pictures.safetensors")
Verdicts = dict[
    str, tuple[bool, ...]
]  # by identity: does each judge recognise the first candidate?


class Measured(BaseModel):
    value: FiniteFloat
    low: FiniteFloat
    high: FiniteFloat
    by_identity: list[FiniteFloat] | None = None


class HeldOut(BaseModel):
    test: FiniteFloat


class Network(BaseModel):
    model: str
    parameters: int
    accuracy: HeldOut
    selected_epoch: int | None
    key: str


class FirstStage(BaseModel):
    data: str
    epochs: int
    classes: int
    accuracy: HeldOut
    before: "FirstStage | None" = None


class TrainingFacts(BaseModel):
    """How a target came to be: `recipe` has every setting of its training, `facts` what its defenses tell of it, by their names."""

    recipe: dict[str, Any]
    trainable: int | None
    facts: dict[str, dict[str, Any]]
    first_stage: FirstStage | None
    seconds: FiniteFloat | None
    first_stage_seconds: FiniteFloat | None
    times_undefended: FiniteFloat | None


class ControlFacts(BaseModel):
    lift: dict[str, Measured]
    control_lift: dict[str, Measured]
    agreement: FiniteFloat | None
    only_one: FiniteFloat | None
    manifold: FiniteFloat | None
    vacuous: str
    warnings: list[str]


class Exposed(BaseModel):
    identity: str
    recognised: FiniteFloat


class AuditFacts(BaseModel):
    """One audit: `case` is what the config calls its attack, `steps` the mean of its searches, `partial` the people whose search broke off."""

    label: str
    case: str
    seed: int
    defenses: list[dict[str, Any]]
    attack: dict[str, Any]
    prior: dict[str, Any]
    target: Network
    training: TrainingFacts
    scores: dict[str, Measured]
    prior_only: dict[str, Measured]
    conventions: dict[str, dict[str, FiniteFloat]]
    controls: ControlFacts
    worst: list[Exposed]
    queries: int
    steps: Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)] | None
    partial: list[str]
    seconds: FiniteFloat
    keys: dict[str, str]


class Outline(BaseModel):
    """What a report needs of a run.json of any kind, besides its audits."""

    name: str
    settings: dict[str, Any]
    versions: dict[str, str]
    threads: int
    data: dict[str, Any]
    identities: list[str] = Field(min_length=1)
    evaluators: list[Network] = Field(min_length=1)


class RunFacts(Outline):
    """What a report needs of a run.json."""

    audits: list[AuditFacts] = Field(min_length=1)


@dataclass(frozen=True)
class LoadedRun:
    """One run's files, checked against each other: `document` is its run.json, `verdicts` has one entry an audit."""

    document: dict[str, Any]
    facts: RunFacts
    verdicts: tuple[Verdicts, ...]
    pictures: Mapping[str, Tensor]


def open_run(folder: Path) -> dict[str, Any]:
    """The run.json of a folder that has all files of a run; nothing is known of its format yet."""
    if not folder.is_dir():
        raise StoreError(f"{folder} is not a folder: give the folder of a finished run")
    if missing := [name for name in FILES if not (folder / name).is_file()]:
        raise StoreError(
            f"{folder} has no {missing[0]}, so it is not a finished run: give the folder that `frostglass run --out` wrote"
        )
    path = folder / "run.json"
    try:
        # A setting may be infinite, which JSON has no word for; as text it survives, and a score that is not a number is refused below.
        document = json.loads(path.read_bytes(), parse_constant=str)
    except ValueError as error:
        raise StoreError(f"{path} is not JSON ({error}): run again to write it anew") from error
    return document if isinstance(document, dict) else {}


def check_format(folder: Path, document: Mapping[str, Any], expected: int) -> None:
    if (found := document.get("format")) != expected:
        raise StoreError(
            f"{folder / 'run.json'} has format {json.dumps(found)}, expected {expected}: run again with this version of frostglass"
        )


def read_run(folder: Path) -> LoadedRun:
    """The files `write_run` wrote, refused unless they fit each other."""
    document = open_run(folder)
    check_format(folder, document, RUN_FORMAT)
    facts = _facts(folder / "run.json", document)
    pictures = _pictures(folder / "pictures.safetensors", facts)
    return LoadedRun(document, facts, _verdicts(folder / "rows.csv", facts, pictures), pictures)


def _facts(path: Path, document: dict[str, Any]) -> RunFacts:
    try:
        facts = RunFacts.model_validate(document)
    except ValidationError as error:
        raise DataError(
            f"{path} is damaged ({problems(error)[0][:160]}): run again to write it anew"
        ) from None
    judges = [
        f"{kind}_{place}"
        for place in range(1, len(facts.evaluators) + 1)
        for kind in ("top1", "top5")
    ]
    for audit in facts.audits:
        if absent := [
            name
            for name in ["target_top1", *judges]
            if name not in audit.scores or name not in audit.prior_only
        ]:
            raise DataError(
                f"{path} has no {absent[0]} for audit {audit.label!r}: a report needs the accuracy metric"
            )
        if not audit.controls.lift or not (audit.controls.vacuous or audit.controls.control_lift):
            raise DataError(
                f"{path} has no controls for audit {audit.label!r}, so it cannot be believed: run again"
            )
    return facts


def _pictures(path: Path, facts: RunFacts) -> dict[str, Tensor]:
    pictures, _ = read_tensors(path)
    check_pictures(
        path, pictures, {"private": 4} | {f"audit.{place}": 5 for place in range(len(facts.audits))}
    )
    if len(pictures["private"]) != len(facts.identities):
        raise DataError(
            f"{path} has {len(pictures['private'])} private pictures for {len(facts.identities)} identities: run again"
        )
    return pictures


def check_pictures(
    path: Path, pictures: Mapping[str, Tensor], dimensions: Mapping[str, int]
) -> None:
    """Refuse files without these pictures, or with something else under their names."""
    for name, wanted in dimensions.items():
        if name not in pictures:
            raise DataError(
                f"{path} has no {name}, which run.json describes: run again to write it anew"
            )
        found = pictures[name]
        if (
            found.dtype != uint8
            or found.ndim != wanted
            or found.shape[-3] not in (1, 3)
            or not found.numel()
        ):
            raise DataError(
                f"{path}: {name} is {found.dtype} {tuple(found.shape)}, expected grey or colour pictures as bytes: run again"
            )


def read_lines(path: Path) -> list[dict[str, str]]:
    """The lines of a rows.csv by their columns."""
    try:
        return list(csv.DictReader(io.StringIO(path.read_bytes().decode(), newline="")))
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} is not a table ({error}): run again to write it anew") from error


def _verdicts(path: Path, facts: RunFacts, pictures: Mapping[str, Tensor]) -> tuple[Verdicts, ...]:
    """What each judge says of each person's first candidate, after checking that these rows are the ones the scores were made from."""
    lines = read_lines(path)
    found, start = [], 0
    for place, audit in enumerate(facts.audits):
        people, candidates = pictures[f"audit.{place}"].shape[:2]
        mine, start = lines[start : start + people * candidates], start + people * candidates
        columns = [
            [line.get(f"top1_{judge}") for line in mine]
            for judge in range(1, len(facts.evaluators) + 1)
        ]
        firsts = mine[::candidates]
        names = [line.get("identity") or "" for line in firsts]
        verdicts = dict(
            zip(
                names,
                zip(
                    *([told == "1" for told in column[::candidates]] for column in columns),
                    strict=True,
                ),
                strict=True,
            )
        )
        if (
            len(mine) != people * candidates
            or {(line.get("audit"), line.get("candidate")) for line in firsts}
            != {(audit.label, "0")}
            or len(set(names) - {""}) != people
            or (place == 0 and names != facts.identities)
            or not set(audit.partial) <= set(names)
            or not all(
                _makes(audit.scores[f"top1_{judge}"], column)
                for judge, column in enumerate(columns, 1)
            )
        ):
            raise DataError(
                f"{path} does not belong to its run.json (audit {audit.label!r}): run again to write both"
            )
        found.append(verdicts)
    if start != len(lines):
        raise DataError(
            f"{path} has {len(lines)} rows where its run.json explains {start}: run again to write both"
        )
    return tuple(found)


def _makes(score: Measured, column: Sequence[str | None]) -> bool:
    """Is the score the mean of this column of noughts and ones?"""
    return set(column) <= {"0", "1"} and math.isclose(
        column.count("1") / len(column), score.value, abs_tol=1e-5
    )
