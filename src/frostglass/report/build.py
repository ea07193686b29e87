"""A report: one self-contained HTML page and, beside it, the JSON it was made from.

Every number comes from the files of finished runs; nothing is measured here.
"""

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from frostglass.analyses._files import Record, read_analyses
from frostglass.auditing.run_folder import FILES, RUN_FORMAT
from frostglass.core.errors import DataError, StoreError
from frostglass.report import parts
from frostglass.report.advice import next_steps
from frostglass.report.answer import answer
from frostglass.report.arrange import group
from frostglass.report.figures import analysis_section
from frostglass.report.load import Run, read_run
from frostglass.report.origin import Origin, origin_of
from frostglass.report.outcome import answers
from frostglass.report.panels.common import Look
from frostglass.report.panels.features import feature_notes, features_panel
from frostglass.report.panels.matrix import attack_notes
from frostglass.report.panels.model import model_panel
from frostglass.report.recipes import training_notes
from frostglass.report.redact import without_names_and_faces
from frostglass.report.study import Study
from frostglass.report.tables import PlainTable, plain_table, write_tables
from frostglass.store.files import full_disk_reported, write_bytes
from frostglass.store.store import Store

IMAGE_BYTES = 2_000_000  # of all images of a page together: it should open on a phone


def build_report(
    folders: Sequence[Path],
    out: Path,
    *,
    redact: bool = False,
    images: bool = True,
    store: Path | None = None,
    tables: Path | None = None,
) -> Path:
    """Write one HTML page about finished runs to `out`, and a JSON file beside it.

    Runs of models and of features may be mixed. With `redact`, faces are reduced to a few colours
    and names to letters before anything is written; without `images` the page has none. Runs are
    compared with the store that made them, where that is at hand; `store` says where it is now, if
    it was moved. A folder `tables` gets every table as CSV, Markdown and LaTeX.
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
        # Settings may name people.
        analyses = [replace(record, settings={}) for record in analyses]
    runs = [replace(run, shown=images) for run in runs]
    report = arranged(runs, origins, analyses)
    path = _write(out, render(report), document_of(report))
    if tables is not None:
        with _written(tables):
            write_tables(report.tables, tables)
    return path


@dataclass(frozen=True)
class Report:
    """What a page shows: studies with their panels, analyses, and where numbers come from."""

    runs: Sequence[Run]
    studies: Sequence[Study]
    panels: Sequence[parts.Panel]
    origins: Sequence[Origin]
    analyses: Sequence[Record]
    sections: Sequence[parts.Section]  # of the analyses

    @property
    def redacted(self) -> bool:
        return any(run.redacted for run in self.runs)

    @property
    def images(self) -> bool:
        return all(run.shown for run in self.runs)

    @property
    def missing(self) -> list[str]:
        """Audits that failed or were not run."""
        return [text for study in self.studies for text in (*study.failed, *study.not_run)]

    @property
    def distrusted(self) -> frozenset[str]:
        return frozenset(origin.run for origin in self.origins if origin.alarming)

    @property
    def tables(self) -> list[PlainTable]:
        """Every table of the page, in its order."""
        found: list[PlainTable] = []
        for panel in self.panels:
            sections = [*panel.sections, *panel.appendix]
            content = [panel.summary.limits, *(section.parts for section in sections)]
            found += [plain_table(each) for some in content for each in parts.tables_in(some)]
        for section in self.sections:
            found += map(plain_table, parts.tables_in(section.parts))
        return found


def arranged(
    runs: Sequence[Run], origins: Sequence[Origin], analyses: Sequence[Record] = ()
) -> Report:
    """Arrange runs for a page."""
    studies = group(runs)
    distrusted = frozenset(origin.run for origin in origins if origin.alarming)
    look = Look(IMAGE_BYTES // len(studies), distrusted)
    make = {"model": model_panel, "features": features_panel}
    panels = [make[study.surface](study, look) for study in studies]
    sections = [analysis_section(record) for record in analyses]
    return Report(runs, studies, panels, origins, analyses, sections)


def document_of(report: Report) -> dict[str, Any]:
    """Return the JSON beside a page; report.schema.json describes it."""
    document: dict[str, Any] = {
        "format": RUN_FORMAT,
        "redacted": report.redacted,
        "images": report.images,
        "partial": bool(report.missing),
        "missing": report.missing,
        "origins": [asdict(origin) for origin in report.origins],
        "answers": [_answer(study, report.distrusted) for study in report.studies],
        # Without the place of the store on this machine, which `origins` tell.
        "runs": [_without_store(run.document) for run in report.runs],
        "tables": [_plain(table) for table in report.tables],
    }
    if report.analyses:
        document["analyses"] = [asdict(record) for record in report.analyses]
    return document


def _plain(table: PlainTable) -> dict[str, Any]:
    return {"name": table.name, "head": list(table.head), "rows": [list(row) for row in table.rows]}


def _without_store(document: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in document.items() if name != "store"}


def _answer(study: Study, distrusted: frozenset[str]) -> dict[str, Any]:
    found = answers(study, distrusted)
    said: dict[str, Any] = {"runs": study.name, "surface": study.surface, **answer(study)}
    said |= {"thresholds": [each.plain() for each in found], "next": next_steps(study, found)}
    if study.surface == "features":
        return said | {"notes": feature_notes(study), "attacks": []}
    return said | {"notes": training_notes(study), "attacks": attack_notes(study)}


def render(report: Report) -> str:
    """Return the page as text; it loads nothing, and its style and script are part of it."""
    folder = resources.files("frostglass.report")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string(folder.joinpath("page.html").read_text(encoding="utf-8"))
    script = folder.joinpath("page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(f"\n{script}".encode()).digest()).decode()
    return template.render(
        # Our own files, so nothing in them needs escaping.
        style=Markup(folder.joinpath("style.css").read_text(encoding="utf-8")),
        script=Markup(script),
        digest=digest,
        report=report,
        surfaces=sorted({study.surface for study in report.studies}),
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
    with _written(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(out.with_suffix(".json"), text.encode())
        write_bytes(out, page.encode())
    return out


@contextmanager
def _written(place: Path) -> Iterator[None]:
    """Report a place that cannot be written in one line."""
    with full_disk_reported(place.parent):
        try:
            yield
        except (PermissionError, FileExistsError, NotADirectoryError) as error:
            raise StoreError(
                f"cannot write {place} ({error.strerror}): choose another place"
            ) from error
