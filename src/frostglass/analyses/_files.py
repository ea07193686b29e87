"""Analyses in a run folder: `analyses/NAME.json`, sealed by a manifest of hashes."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from frostglass.analyses._result import Analysis
from frostglass.analyses.base import AnalysisMethod
from frostglass.auditing.run_folder import described, plain_settings, versions
from frostglass.core.errors import DataError, StoreError
from frostglass.core.parameters import problems
from frostglass.store.files import (
    full_disk_reported,
    ignore_in_git,
    make_private,
    remove_temporaries,
    write_bytes,
)
from frostglass.store.manifest import MANIFEST, broken_seal, seal

FOLDER = "analyses"
FORMAT = 1


@dataclass(frozen=True)
class Record:
    """An analysis with what made it."""

    format: int
    title: str
    method: dict[str, Any]
    settings: dict[str, Any]
    versions: dict[str, str]
    analysis: Analysis


_RECORD = TypeAdapter(Record)


def write_analysis(
    analysis: Analysis, method: AnalysisMethod, settings: Mapping[str, Any], folder: Path
) -> Path:
    """Write an analysis into a run folder, beside others; return its file."""
    place = folder / FOLDER
    file = place / f"{method.name.replace(':', '.')}.json"
    record = Record(
        FORMAT, method.display_title, described(method), plain_settings(dict(settings)),
        versions(), analysis,
    )  # fmt: skip
    with full_disk_reported(folder):
        make_private(folder)
        ignore_in_git(folder)
        make_private(place)
        remove_temporaries(place)
        if (place / MANIFEST).exists():
            _check(place)  # a new seal must not hide what was changed
        write_bytes(file, (json.dumps(asdict(record), indent=1, allow_nan=False) + "\n").encode())
        seal(place, _names(place))
    return file


def read_analyses(folder: Path) -> list[Record]:
    """Read the analyses of a run folder by name; [] if it has none."""
    place = folder / FOLDER
    if not place.is_dir():
        return []
    _check(place)
    return [_read(place / name) for name in _names(place)]


def _read(path: Path) -> Record:
    again = "run the analysis again to write it anew"
    try:
        record = _RECORD.validate_json(path.read_bytes())
    except ValidationError as error:
        raise DataError(f"{path}: {problems(error)[0]}: {again}") from error
    if record.format != FORMAT:
        raise DataError(f"{path} has format {record.format}, expected {FORMAT}: {again}")
    return record


def _check(place: Path) -> None:
    if problem := broken_seal(place, _names(place)):
        raise StoreError(f"{problem}: delete {place} and run its analyses again")


def _names(place: Path) -> list[str]:
    return sorted(path.name for path in place.glob("*.json") if path.name != MANIFEST)
