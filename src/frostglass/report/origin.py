"""Where the numbers of a run come from: what its store says of them, and where people are shown."""

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from frostglass.auditing.controls import lift
from frostglass.auditing.run_folder import NUMBERS, all_scores, plain_scores
from frostglass.auditing.run_record import is_recorded
from frostglass.auditing.steps import ATTACK, PRIVATE, SCORES
from frostglass.core.errors import FrostglassError, StoreError
from frostglass.core.pixels import ByteImages, as_bytes
from frostglass.metrics.base import Rows
from frostglass.report.load import Run
from frostglass.store.manifest import verify
from frostglass.store.purge import KEY
from frostglass.store.step import Step
from frostglass.store.store import Store

T = TypeVar("T")
Status = Literal["verified", "not at hand", "unrecorded", "differs"]
ROUNDING = 1e-5  # relative; rows are written with six digits
MAX_NAMED = 3  # differences that a sentence names
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Origin:
    """Whether a run agrees with its store, a sentence about it, and where people are shown."""

    run: str
    status: Status
    text: str
    places: str

    @property
    def alarming(self) -> bool:
        return self.status in ("unrecorded", "differs")


def origin_of(
    run: Run, folder: Path, store: Path | None, *, page: Path, redact: bool = False
) -> Origin:
    """Compare a run with the store that made it; `store` is where that store is now, if moved.

    Places are told relative to the folder `page`, because a page may be shown to others.
    """
    root = store or (Path(run.facts.store) if run.facts.store else None)
    shown = "that made it" if redact or root is None else _relative(root, page)
    status, text = _compared(run, folder, root, shown, redact=redact)
    files = "images.safetensors of the run"
    if not redact:
        files = _relative(folder / "images.safetensors", page)
    return Origin(run.facts.name, status, text, _places(files, shown))


def _relative(path: Path, page: Path) -> str:
    return os.path.relpath(path.absolute(), page.absolute())


def _places(files: str, store: str) -> str:
    """Say where private images and reconstructions are, besides the page itself."""
    kinds = ", ".join(step.name for step in PRIVATE)
    return (
        f"Private images and reconstructions are in {files} and in the steps {kinds} of the store "
        f"{store}; `frostglass store purge` removes those of the store. Places are relative to "
        "the folder in which this page was written."
    )


def _compared(
    run: Run, folder: Path, root: Path | None, shown: str, *, redact: bool
) -> tuple[Status, str]:
    if root is None:
        return "not at hand", (
            "Not verified against a store: the run does not say which store made it. Its files "
            "agree with each other."
        )
    try:
        store = Store(root)
        kept = store.exists
    except (FrostglassError, OSError):
        kept = False
    if not kept:
        return "not at hand", (
            f"The store {shown} is not at hand, so the numbers were not verified against it. The "
            "run's files agree with each other. If the store was moved, give its folder with "
            "`frostglass report --store`."
        )
    missing: list[str] = []
    differences = list(_differences(run, root, missing, redact=redact))
    if differences:
        more = len(differences) - MAX_NAMED
        named = "; ".join(differences[:MAX_NAMED]) + (f"; and {more} more" if more > 0 else "")
        return "differs", f"This run differs from the store {shown}: {named}. Run it again."
    absent = f" Not in the store any more, and not compared: {', '.join(missing)}." * bool(missing)
    if not is_recorded(store, folder, NUMBERS):
        return "unrecorded", (
            f"The store {shown} has no record of these files, so verdicts and settings could not "
            f"be verified: they were changed, or the store was read-only.{absent}"
        )
    return "verified", (
        f"Verified against the store {shown}: it has a record of exactly these files, and scores, "
        f"prior-only baselines, controls and reconstructions agree with its steps.{absent}"
    )


def _differences(run: Run, root: Path, missing: list[str], *, redact: bool) -> Iterator[str]:
    """Name what differs from the steps of a store; steps that it lacks are added to `missing`."""

    def read(step: Step[T], key: Any) -> T | None:
        name = f"{step.name} {str(key)[:8]}"
        if not isinstance(key, str) or not KEY.fullmatch(key):
            return None  # a positive control that was not run
        if not (place := root / step.name / key).is_dir():
            missing.append(name)
            return None
        verify(place)
        return step.load(place, CPU)

    for place, audit in enumerate(run.facts.audits):
        keys, label = audit.keys, f"audit {place + 1}" if redact else audit.label
        try:
            attack = read(ATTACK, keys.get("attack"))
            rows = read(SCORES, keys.get("scores"))
            baseline = read(SCORES, keys.get("prior_only_scores"))
            control = read(SCORES, keys.get("control_scores"))
            control_baseline = read(SCORES, keys.get("control_prior_only_scores"))
        except (StoreError, OSError, KeyError, TypeError) as error:
            text = str(error).replace(str(root), "the store")  # a page names no place here
            yield f"{label}: {'a step is damaged' if redact else text}"
            continue
        facts, recorded = run.document["audits"][place], run.images[f"audit.{place}"]
        if attack is not None and not _same_images(attack.images, recorded):
            yield f"the reconstructions of {label}"
        if rows is not None and not _same_rows(rows, run, place):
            yield f"rows.csv of {label}"
        for title, name, source in (
            ("scores", "scores", rows),
            ("prior-only scores", "prior_only", baseline),
        ):
            if source is not None and not _agree(all_scores(source), facts[name]):
                yield f"the {title} of {label}"
        for name, pair in {
            "lift": (rows, baseline),
            "control_lift": (control, control_baseline),
        }.items():
            if pair[0] is not None and pair[1] is not None:
                again = plain_scores(lift(pair[0], pair[1]))
                if not _agree(again, facts["controls"][name]):
                    yield f"{name} of {label}"


def _same_images(images: torch.Tensor | ByteImages, recorded: torch.Tensor) -> bool:
    return torch.equal(as_bytes(images).pixels, recorded)


def _same_rows(rows: Rows, run: Run, place: int) -> bool:
    columns = run.rows[place].columns
    return set(rows.columns) == set(columns) and all(
        values.shape == columns[name].shape
        and torch.allclose(values.double(), columns[name], rtol=ROUNDING, atol=1e-12)
        for name, values in rows.columns.items()
    )


def _agree(one: Any, other: Any) -> bool:
    """Whether nested values are equal, numbers to rounding."""
    if isinstance(one, dict):
        return (
            isinstance(other, dict)
            and set(one) == set(other)
            and all(_agree(one[name], other[name]) for name in one)
        )
    if isinstance(one, list | tuple):
        return isinstance(other, list) and len(one) == len(other) and all(map(_agree, one, other))
    if isinstance(one, float | int) and isinstance(other, float | int):
        return math.isclose(one, other, rel_tol=ROUNDING, abs_tol=1e-9)
    return bool(one == other)
