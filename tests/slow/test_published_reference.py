"""The tables of the package have the values of the transcripts that they were made from.

Set FROSTGLASS_TRANSCRIPTS to the folder of these transcripts.
"""

import csv
import os
import re
from pathlib import Path

import pytest

from frostglass import published

FOLDER = os.environ.get("FROSTGLASS_TRANSCRIPTS", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FOLDER, reason="FROSTGLASS_TRANSCRIPTS is not set"),
]
NAMES = {
    "bido-figure1": "bido_fig1_",
    "bido-code": "bido_code_",
    "bido-tables6-8": "bido_tables6-8_",
    "calor-appendix-a": "calor_appendixA_",
    "crafter-appendix": "crafter_appendix_",
    "tldmi-tables9-10": "tldmi_tables9-10_",
    "tldmi-text": "tldmi_text_",
}
SAME = ("attack", "dataset_private", "architecture", "defense", "setting", "metric")


@pytest.mark.parametrize("name", published.names())
def test_values_are_those_of_the_transcript(name):
    start = NAMES.get(name, name.replace("-", "_"))
    (path,) = [
        path
        for path in sorted(Path(FOLDER).glob("*.csv"))
        if re.match(rf"{re.escape(start)}(?![0-9])", path.stem)
    ]
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    cells = published.table(name).cells
    assert len(rows) == len(cells)
    for row, cell in zip(rows, cells, strict=True):
        assert {key: row[key] for key in SAME} == {key: getattr(cell, key) for key in SAME}
        value = "" if cell.value is None else cell.value
        assert (float(row["value"]) if isinstance(value, float) else row["value"]) == value
        assert (float(row["std"]) if row["std"] else None) == cell.std
