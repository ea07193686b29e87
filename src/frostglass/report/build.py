"""A report: one self-contained HTML page, and the JSON it was made from, out of finished runs.

Every number comes from a run's files, which are checked against each other first; nothing is measured here.
"""

import json
import shlex
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from frostglass.errors import DataError, StoreError
from frostglass.experiments.grid import RUN_FORMAT
from frostglass.files import full_disk_reported, write_bytes
from frostglass.report.answer import answer
from frostglass.report.arrange import Study, group, spoken
from frostglass.report.charts import SHAPES, number, picture, scale, slug, span, toml, track
from frostglass.report.matrix import attack_notes, matrix
from frostglass.report.recipes import training_caption, training_notes, training_rows
from frostglass.report.redact import without_names_and_faces
from frostglass.report.runs import FILES, read_run
from frostglass.report.tables import cell, checks, picture_tables, recognised
from frostglass.report.tradeoff import tradeoff

PICTURE_BYTES = 2_000_000  # of all pictures of a page together: it should open on a phone
CONVENTIONS = {
    "mean": "mean over all pictures and people (KED-MI, BiDO, LOMMA, TL-DMI, PPA, PLG-MI, CALoR)",
    "selected": "only the picture the model likes best (GMI)",
    "any": "a person counts when any picture succeeds (GMI, “acc5”)",
    "first": "only the first picture (BREP-MI)",
    "std_draws": "spread over pictures, as a standard deviation (BiDO)",
    "var_draws": "spread over pictures, as a variance (KED-MI)",
    "std_identities": "spread over people (VMI)",
    "top5": "among the judge's five best guesses, mean",
    "top5_last": "among the five best guesses, last picture only (LOMMA, TL-DMI)",
}


def build_report(runs: Sequence[Path], out: Path, *, redact: bool = False) -> Path:
    """Write one HTML page about finished runs to `out`, and the JSON it was made from beside it.

    With `redact` faces are reduced to a few colours and names to letters before anything is written.
    """
    folders = list(dict.fromkeys(Path(run).resolve() for run in runs))
    out = Path(out)
    if not folders:
        raise DataError("a report needs at least one run folder, got none")
    if out.is_dir() or out.suffix == ".json":
        raise StoreError(f"{out} is no place for a page: give the name of a file, for example report.html")
    numbers = out.with_suffix(".json")
    if {out.resolve(), numbers.resolve()} & {folder / name for folder in folders for name in FILES}:
        raise StoreError(f"{out} and {numbers.name} would overwrite a run's own files: choose another name, for example report.html")
    loaded = [read_run(folder) for folder in folders]
    if redact:
        loaded = without_names_and_faces(loaded)
    studies = group(loaded)
    document = {
        "format": RUN_FORMAT,
        "redacted": redact,
        "answers": [
            {"runs": study.name, **answer(study), "notes": training_notes(study), "attacks": attack_notes(study)} for study in studies
        ],
        "runs": [run.document for run in loaded],
    }
    page = render(studies, redacted=redact)
    with full_disk_reported(out.parent):
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(numbers, (json.dumps(document, indent=1, allow_nan=False) + "\n").encode())
            write_bytes(out, page.encode())
        except (PermissionError, FileExistsError, NotADirectoryError) as error:
            raise StoreError(f"cannot write {out} ({error.strerror}): choose another place") from error
    return out


def render(studies: Sequence[Study], *, redacted: bool) -> str:
    """The page as text."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"n": number, "spoken": spoken, "toml": toml, "slug": slug, "quoted": shlex.quote}
    template = environment.from_string(resources.files("frostglass.report").joinpath("template.html").read_text(encoding="utf-8"))
    return template.render(
        studies=studies, redacted=redacted, shapes=SHAPES, conventions=CONVENTIONS, picture_bytes=PICTURE_BYTES // len(studies),
        answer=answer, checks=checks, picture_tables=picture_tables, cell=cell, recognised=recognised,
        picture=picture, track=track, scale=scale, span=span, tradeoff=tradeoff, matrix=matrix, attack_notes=attack_notes,
        training_caption=training_caption, training_notes=training_notes, training_rows=training_rows,
    )  # fmt: skip
