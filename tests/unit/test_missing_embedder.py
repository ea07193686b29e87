"""A grid over data of which some has no embedder: empty cells, and who decides in which audit."""

import csv
import json

import pytest

from frostglass.cli.tables import print_scores
from frostglass.core.errors import DataError
from frostglass.report.build import build_report
from frostglass.report.load import read_run
from frostglass.report.seeds import seed_table
from pages import Page
from run_folders import BROKEN, CALOR, DEFENDED, edit_run, make_run, many_models

WITH = {**DEFENDED, "hits": (8, 7), "verified": 3}
WITHOUT = {**BROKEN, "embedder": False, "accuracy": 0.9}
ORDERS = {"first": [WITHOUT, WITH], "last": [WITH, WITHOUT]}
GRID = {"name": "trial", "grid": {"data.public_identities": [5, 60]}}


@pytest.fixture(params=ORDERS)
def run(request, tmp_path):
    return make_run(tmp_path / "run", ORDERS[request.param], settings=GRID)


def test_the_cells_of_the_missing_embedder_are_empty(run):
    lines = list(csv.DictReader((run / "rows.csv").read_text().splitlines()))
    for line in lines:
        lacks = line["audit"] == "undefended"
        embedder = [line[name] for name in ("verified_3", "strict_3", "match_3")]
        assert [cell == "" for cell in embedder] == [lacks] * 3
        assert all(line[name] for name in line if not name.endswith("_3"))
    assert len(lines) == 40


def test_the_terminal_says_who_decides_in_which_audit(run, capsys):
    print_scores(json.loads((run / "run.json").read_text()))
    lines = capsys.readouterr().out.splitlines()
    told = [line.partition(") accepts")[0] for line in lines if line.startswith("recognised (")]
    assert sorted(told) == [
        "recognised (calor): share that a face verifier (evaluator 3, faces32",
        "recognised (undefended): share that a face verifier (evaluator 1, resnet",
    ]
    assert any(line.startswith("evaluators on") and "3 faces32" in line for line in lines)


def test_the_table_over_seeds_has_both_audits(run):
    rows = list(csv.DictReader(seed_table([read_run(run)], "csv").splitlines()))
    shares = {row["audit"]: float(row["verified, first"]) for row in rows}
    assert shares == {"undefended": 1.0, "calor": 0.15}
    assert "undefended" in seed_table([read_run(run)], "markdown")


def test_the_report_has_dashes_and_names_the_other_verifier(run, tmp_path):
    page = Page(build_report([run], tmp_path / "report.html"))
    rows = page.tables["Verification"][1:]
    (places,) = {len(row) for row in rows}
    assert [row[places - 2] for row in rows] == ["100 %", "100 %", "95 %", "95 %", "–", "–"]
    assert [row[places - 1] for row in rows] == ["40 %", "40 %", "35 %", "35 %", "15 %", "15 %"]
    head = page.tables["Scores of each audit"][0]
    assert "recognised (evaluator 1 or 3)" in head[2]
    other = "In CALoR another one decides: evaluator 3, faces32, never trained on these people"
    assert other in page.text


def test_many_models_with_and_without(tmp_path):
    audits = [{**each, "embedder": bool(place % 2)} for place, each in enumerate(many_models())]
    page = Page(build_report([make_run(tmp_path / "run", audits)], tmp_path / "report.html"))
    cells = [row[3] for row in page.tables["Reconstructions accepted"][1:]]
    assert [cell == "–" for cell in cells].count(True) == len(audits) - len(audits) // 2


def test_an_audit_must_have_all_classifiers(tmp_path):
    run = make_run(tmp_path / "run", [BROKEN, {**DEFENDED, "defenses": CALOR}])
    document = json.loads((run / "run.json").read_text())
    own = document["audits"][1]
    own["evaluators"] = own["evaluators"][:1]
    for name in [name for name in own["scores"] if name.startswith(("verified_", "strict_"))][2:]:
        own["scores"].pop(name)
    edit_run(run, document)
    with pytest.raises(DataError, match="audit 'calor' has other evaluators: run again"):
        read_run(run)
