"""A report as files: one self-contained page, and beside it the JSON it was made from."""

import json
import shlex
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from frostglass.core.errors import DataError, StoreError
from frostglass.report.arrange import spoken
from frostglass.report.charts import number, slug, toml
from frostglass.report.runs import FILES
from frostglass.store.files import full_disk_reported, write_bytes

PICTURE_BYTES = 2_000_000  # of all pictures of a page together: it should open on a phone


def rendered(template: str, **values: Any) -> str:
    """A template of this folder as a page that loads nothing: its style is part of it."""
    folder = resources.files("frostglass.report")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "n": number,
        "spoken": spoken,
        "toml": toml,
        "slug": slug,
        "quoted": shlex.quote,
    }
    style = Markup(
        folder.joinpath("style.css").read_text(encoding="utf-8")
    )  # our own file, so nothing in it needs escaping
    return environment.from_string(folder.joinpath(template).read_text(encoding="utf-8")).render(
        style=style, **values
    )


def distinct_folders(runs: Sequence[Path]) -> list[Path]:
    """The folders of runs, each once."""
    folders = list(dict.fromkeys(Path(run).resolve() for run in runs))
    if not folders:
        raise DataError("a report needs at least one run folder, got none")
    return folders


def check_place(out: Path, folders: Sequence[Path]) -> None:
    """Refuse a place that cannot hold a page, or where it would overwrite what it is made from."""
    if out.is_dir() or out.suffix == ".json":
        raise StoreError(
            f"{out} is no place for a page: give the name of a file, for example report.html"
        )
    numbers = out.with_suffix(".json")
    if {out.resolve(), numbers.resolve()} & {folder / name for folder in folders for name in FILES}:
        raise StoreError(
            f"{out} and {numbers.name} would overwrite a run's own files: choose another name, for example report.html"
        )


def write_report(out: Path, page: str, document: Mapping[str, Any]) -> Path:
    """Write the page to `out`, and the JSON beside it."""
    with full_disk_reported(out.parent):
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(
                out.with_suffix(".json"),
                (json.dumps(document, indent=1, allow_nan=False) + "\n").encode(),
            )
            write_bytes(out, page.encode())
        except (PermissionError, FileExistsError, NotADirectoryError) as error:
            raise StoreError(
                f"cannot write {out} ({error.strerror}): choose another place"
            ) from error
    return out
