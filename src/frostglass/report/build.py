"""A report: one self-contained HTML page and, beside it, the JSON it was made from.

Every number comes from the files of finished runs; nothing is measured here.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from frostglass.analyses._files import Record, read_analyses
from frostglass.auditing.run_folder import FILES, RUN_FORMAT
from frostglass.core.errors import DataError, StoreError
from frostglass.report.answer import answer
from frostglass.report.arrange import group
from frostglass.report.figures import analysis_section
from frostglass.report.load import read_run
from frostglass.report.origin import Origin, origin_of
from frostglass.report.panels.features import feature_notes, features_panel
from frostglass.report.panels.matrix import attack_notes
from frostglass.report.panels.model import model_panel
from frostglass.report.recipes import training_notes
from frostglass.report.redact import without_names_and_faces
from frostglass.report.study import Study
from frostglass.store.files import full_disk_reported, write_bytes
from frostglass.store.store import Store

IMAGE_BYTES = 2_000_000  # of all images of a page together: it should open on a phone


def build_report(
    folders: Sequence[Path], out: Path, *, redact: bool = False, store: Path | None = None
) -> Path:
    """Write one HTML page about finished runs to `out`, and a JSON file beside it.

    Runs of models and of features may be mixed. With `redact`, faces are reduced to a few colours
    and names to letters before anything is written. Runs are compared with the store that made
    them, where that is at hand; `store` says where it is now, if it was moved.
    """
    paths, out = list(dict.fromkeys(Path(folder).resolve() for folder in folders)), Path(out)
    if not paths:
        raise DataError("a report needs at least one run folder, got none")
    _check_place(out, paths)
    if store:
        Store(store).check_exists()
    runs = [read_run(path) for path in paths]
    analyses = [record for path in paths for record in read_analyses(path)]
    origins = [
        origin_of(run, path, store, page=out.parent, redact=redact)
        for run, path in zip(runs, paths, strict=True)
    ]
    if redact:
        runs = without_names_and_faces(runs)
        named = zip(origins, runs, strict=True)
        origins = [replace(origin, run=run.facts.name) for origin, run in named]
    studies = group(runs)
    document = {
        "format": RUN_FORMAT,
        "redacted": redact,
        "origins": [asdict(origin) for origin in origins],
        "answers": [_answer(study) for study in studies],
        # Without the place of the store on this machine, which `origins` tell.
        "runs": [_without_store(run.document) for run in runs],
    }
    if analyses:
        # Settings may name people.
        shown = [replace(record, settings={}) if redact else record for record in analyses]
        document["analyses"] = [asdict(record) for record in shown]
    return _write(out, render(studies, origins, analyses, redacted=redact), document)


def _without_store(document: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in document.items() if name != "store"}


def _answer(study: Study) -> dict[str, Any]:
    said = {"runs": study.name, "surface": study.surface, **answer(study)}
    if study.surface == "features":
        return said | {"notes": feature_notes(study)}
    return said | {"notes": training_notes(study), "attacks": attack_notes(study)}


def render(
    studies: Sequence[Study],
    origins: Sequence[Origin],
    analyses: Sequence[Record] = (),
    *,
    redacted: bool,
) -> str:
    """Return the page as text; it loads nothing, and its style is part of it."""
    folder = resources.files("frostglass.report")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    panels = {"model": model_panel, "features": features_panel}
    template = environment.from_string(folder.joinpath("page.html").read_text(encoding="utf-8"))
    return template.render(
        # Our own file, so nothing in it needs escaping.
        style=Markup(folder.joinpath("style.css").read_text(encoding="utf-8")),
        panels=[panels[study.surface](study, IMAGE_BYTES // len(studies)) for study in studies],
        analyses=[analysis_section(record) for record in analyses],
        surfaces=sorted({study.surface for study in studies}),
        redacted=redacted,
        origins=origins,
    )


def _check_place(out: Path, folders: Sequence[Path]) -> None:
    """Refuse a place that cannot hold a page, or where it would overwrite a run."""
    if out.is_dir() or out.suffix == ".json":
        raise StoreError(
            f"{out} cannot hold a page: give the name of a file, for example report.html"
        )
    numbers = out.with_suffix(".json")
    if {out.resolve(), numbers.resolve()} & {folder / name for folder in folders for name in FILES}:
        raise StoreError(
            f"{out} and {numbers.name} would overwrite a run's own files: choose another name, "
            "for example report.html"
        )


def _write(out: Path, page: str, document: Mapping[str, Any]) -> Path:
    text = json.dumps(document, indent=1, allow_nan=False) + "\n"
    with full_disk_reported(out.parent):
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(out.with_suffix(".json"), text.encode())
            write_bytes(out, page.encode())
        except (PermissionError, FileExistsError, NotADirectoryError) as error:
            raise StoreError(
                f"cannot write {out} ({error.strerror}): choose another place"
            ) from error
    return out
