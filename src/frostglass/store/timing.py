"""How long a step took, and what is known of its earlier attempts: `timing.json`."""

import logging
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

from frostglass.core.errors import StoreError
from frostglass.store.files import read_json
from frostglass.store.manifest import unknown_conditions

TIMING = "timing.json"
log = logging.getLogger(__name__)


def seconds_of(folder: Path) -> float:
    """Return how long a finished step took; refuse a timing that is missing or damaged."""
    seconds: Any = _read(folder / TIMING).get("seconds")
    if not _is_time(seconds):
        raise StoreError(
            f"{folder / TIMING} is missing or does not say how long the step took: delete {folder} "
            "and run again to compute the step anew"
        )
    return float(seconds)


def finished_at(folder: Path) -> str:
    """Return when a step was finished, in UTC; "" for one that does not say it."""
    finished = _read(folder / TIMING).get("finished")
    return finished if isinstance(finished, str) else ""


def earlier_attempts(partial: Path) -> dict[str, Any]:
    """Return attempts, seconds and conditions of an unfinished step.

    Checkpoints have hashes of their own. Those beside a damaged timing are kept, and the conditions
    under which they were made are recorded as unknown.
    """
    new = {"attempts": 0, "seconds": 0.0}
    timing = _read(partial / TIMING)
    made_under = timing.get("conditions", [])
    attempts = timing.get("attempts")
    if (
        (type(attempts) is int and attempts >= 0)
        and _is_time(timing.get("seconds"))
        and isinstance(made_under, list)
        and all(isinstance(each, dict) for each in made_under)
    ):
        return timing
    if not any((partial / "work").glob("*.safetensors")):
        return new
    log.warning(
        "%s is missing or damaged: checkpoints are kept, but under which conditions they were made "
        "is unknown",
        partial / TIMING,
    )
    return {**new, "conditions": unknown_conditions()}


def _read(path: Path) -> dict[str, Any]:
    with suppress(OSError, StoreError):
        timing = read_json(path) if path.is_file() else {}
        if isinstance(timing, dict):
            return timing
    return {}


def _is_time(seconds: Any) -> bool:
    return type(seconds) in (int, float) and 0 <= seconds < math.inf
