"""A report: one self-contained HTML page, and the JSON it was made from, out of finished runs.

Every number comes from a run's files, which are checked against each other first; nothing is measured here.
"""

from collections.abc import Sequence
from pathlib import Path

from frostglass.audit.grid import RUN_FORMAT
from frostglass.core.errors import DataError
from frostglass.report.answer import answer
from frostglass.report.arrange import Study, group
from frostglass.report.charts import SHAPES, picture, scale, span, track
from frostglass.report.feature_runs import is_of_features
from frostglass.report.features import build_feature_report
from frostglass.report.matrix import attack_notes, matrix
from frostglass.report.page import (
    PICTURE_BYTES,
    check_place,
    distinct_folders,
    rendered,
    write_report,
)
from frostglass.report.recipes import training_caption, training_notes, training_rows
from frostglass.report.redact import without_names_and_faces
from frostglass.report.runs import open_run, read_run
from frostglass.report.tables import cell, checks, picture_tables, recognised
from frostglass.report.tradeoff import tradeoff

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
    folders, out = distinct_folders(runs), Path(out)
    check_place(out, folders)
    of_features = [folder for folder in folders if is_of_features(open_run(folder))]
    if of_features and len(of_features) < len(folders):
        other = next(folder for folder in folders if folder not in of_features)
        raise DataError(
            f"{of_features[0]} is about the features of a split model and {other} about a whole one, and no page compares the two: make two reports"
        )
    if of_features:
        return build_feature_report(folders, out, redact=redact)
    loaded = [read_run(folder) for folder in folders]
    if redact:
        loaded = without_names_and_faces(loaded)
    studies = group(loaded)
    document = {
        "format": RUN_FORMAT,
        "redacted": redact,
        "answers": [
            {
                "runs": study.name,
                **answer(study),
                "notes": training_notes(study),
                "attacks": attack_notes(study),
            }
            for study in studies
        ],
        "runs": [run.document for run in loaded],
    }
    return write_report(out, render(studies, redacted=redact), document)


def render(studies: Sequence[Study], *, redacted: bool) -> str:
    """The page as text."""
    return rendered(
        "template.html", studies=studies, redacted=redacted, shapes=SHAPES, conventions=CONVENTIONS, picture_bytes=PICTURE_BYTES // len(studies),
        answer=answer, checks=checks, picture_tables=picture_tables, cell=cell, recognised=recognised,
        picture=picture, track=track, scale=scale, span=span, tradeoff=tradeoff, matrix=matrix, attack_notes=attack_notes,
        training_caption=training_caption, training_notes=training_notes, training_rows=training_rows,
    )  # fmt: skip
