"""Threat model, people, strata, cost, what was not run, formats, and the schema of the JSON."""

import csv
import json

import jsonschema
import pytest

from commands import frostglass
from feature_folders import CRAFTED, LATENT, OPEN, make_feature_run
from frostglass.core.errors import StoreError
from frostglass.report.build import build_report
from frostglass.report.schema import report_schema, schema_text
from frostglass.report.tables import PlainTable, as_csv, as_latex, as_markdown
from pages import Page
from run_folders import BREPMI, BROKEN, DEFENDED, edit_run, make_run, many_models

MARKS = {
    "glasses": [place < 10 for place in range(20)],
    "beard": [place < 2 for place in range(20)],
}


def page_of(run, tmp_path, **options):
    return Page(build_report([run], tmp_path / "report.html", **options))


def test_the_threat_model_names_its_terms(tmp_path):
    label_only = {**BROKEN, "attack": {**BREPMI, "keep": 1}}
    page = page_of(make_run(tmp_path / "run", [BROKEN, label_only]), tmp_path)
    rows = {row[0]: row[1:] for row in page.tables["Threat model"]}
    assert rows["Knowledge"][0] == (
        "white box: the network and its weights; black box: predicted labels alone"
    )
    assert rows["Capabilities"][0] == "1 560 queries for each person; 1 guesses kept"
    assert rows["Technique"][1] == "AML.T0024.001, Invert AI Model (MITRE ATLAS)"
    for name in ("NIST AI 100-2 E2025", "OWASP AISVS 1.0, C11.2", "EDPB Opinion 28/2024"):
        assert name in page.text
    features = make_feature_run(tmp_path / "features", [OPEN])
    rows = {row[0]: row[1:] for row in page_of(features, tmp_path).tables["Threat model"]}
    assert rows["Knowledge"][0] == "queries to the device: plain features of its own images"


def test_rates_and_exposed_people_have_intervals(tmp_path):
    spec = {**BROKEN, "hits": (5, 5), "steps": [100] * 20}
    page = page_of(make_run(tmp_path / "run", [spec], candidates=2), tmp_path)
    assert page.tables["Rates over people"][1][:2] == ["undefended GMI", "20"]
    assert page.tables["Rates over people"][1][2].startswith("15 % ")
    exposed = page.tables["Most exposed people"]
    assert exposed[0][:3] == ["person", "subject", "guesses recognised"]
    assert exposed[1] == [
        *("person 0", "undefended", "2 of 2 interval 15.8–100 %"),
        *("0.95 accepted above 0.5", "1 of 1"),
    ]
    assert [row[0] for row in exposed[1:]] == ["person 0", "person 1", "person 2"]
    everybody = page.tables["Every person: undefended"]
    assert len(everybody) == 21
    assert everybody[-1][2] == "0 of 2 interval 0–84.2 %"
    assert page.tables["Attacker’s cost"][1] == [
        *("undefended", "31 200", "1 560", "100", "75.5 s", "3.8 s", "2"),
    ]


def test_strata_by_attribute(tmp_path):
    run = make_run(tmp_path / "run", [{**BROKEN, "hits": (12, 12)}], attributes=MARKS)
    page = page_of(run, tmp_path)
    head, *rows = page.tables["Rates by attribute"]
    assert head[0] == "attribute"
    assert [row[0] for row in rows] == ["glasses"], "two people are too few"
    assert (rows[0][1], rows[0][3]) == ("10", "10")
    assert rows[0][2].startswith("100 %")
    assert rows[0][4].startswith("20 %")
    assert rows[0][5].startswith("+80 points")
    redacted = build_report([run], tmp_path / "redacted.html", redact=True)
    assert len(Page(redacted).tables["Rates by attribute"]) == 2
    document = json.loads(redacted.with_suffix(".json").read_text())
    assert document["runs"][0]["attributes"] == {}, "they may tell who a person is"
    none = make_run(tmp_path / "none", [BROKEN])
    assert "Rates by attribute" not in page_of(none, tmp_path).tables


def test_attacks_that_were_not_run_have_a_reason(tmp_path):
    options = {"failed": ["calor: out of memory"], "not_run": ["bido: time budget of 1 h reached"]}
    page = page_of(make_run(tmp_path / "run", [DEFENDED], **options), tmp_path)
    rows = page.tables["Attacks not run"]
    assert rows[1] == ["calor", "failed", "out of memory"]
    assert rows[2] == ["bido", "not run", "time budget of 1 h reached"]
    assert rows[3][0] == "Kinds: CE, Poincaré, label-only and adaptive"
    assert rows[4][0].startswith("Methods: brepmi, ")
    assert rows[5][2] == "Frostglass does not measure them"


def test_an_unfinished_run_is_marked_and_a_finished_one_is_not(tmp_path):
    run = make_run(tmp_path / "run", [DEFENDED], not_run=["bido: time budget of 1 h reached"])
    out = build_report([run], tmp_path / "report.html")
    page = Page(out)
    assert "PARTIAL. This run is unfinished: 1 audit is missing" in page.text.replace(" .", ".")
    assert 'class="watermark"' in page.raw, "on every printed page"
    assert '@top-center { content: "PARTIAL: audits are missing"; }' in page.raw
    document = json.loads(out.with_suffix(".json").read_text())
    assert document["partial"] is True
    assert document["missing"] == ["bido: time budget of 1 h reached"]
    whole = page_of(make_run(tmp_path / "whole", [DEFENDED]), tmp_path)
    assert "PARTIAL" not in whole.text
    assert 'class="watermark"' not in whole.raw


def test_a_page_without_images(tmp_path):
    run = make_run(tmp_path / "run", [BROKEN, DEFENDED])
    page = page_of(run, tmp_path, images=False)
    assert "img" not in [tag for tag, _ in page.tags]
    assert "data:image" not in page.raw
    assert "Without images. This page has no image of anybody." in page.text.replace(" .", ".")
    assert "Rates over people" in page.tables
    features = make_feature_run(tmp_path / "features", [OPEN])
    assert "data:image" not in page_of(features, tmp_path, images=False).raw


@pytest.mark.parametrize("redact", [False, True])
def test_the_json_follows_the_schema(tmp_path, redact):
    runs = [
        make_run(tmp_path / "m", [BROKEN, DEFENDED], thresholds={"max_first": 0.2}),
        make_feature_run(tmp_path / "f", [OPEN, {**CRAFTED, "attack": LATENT}], name="features"),
        make_run(tmp_path / "p", [DEFENDED], not_run=["x: y"], name="partial", evaluators=(0.9,)),
    ]
    out = build_report(runs, tmp_path / "report.html", redact=redact)
    document = json.loads(out.with_suffix(".json").read_text())
    check = jsonschema.Draft202012Validator(report_schema())
    assert [error.message for error in check.iter_errors(document)] == []
    damaged = document | {
        "answers": [{**document["answers"][0], "thresholds": [{"outcome": "ok"}]}]
    }
    assert not check.is_valid(damaged)
    assert not check.is_valid({name: document[name] for name in document if name != "runs"})


def test_the_schema_that_ships_is_that_of_the_code():
    assert json.loads(schema_text()) == report_schema(), "write it anew: see report/schema.py"


def test_tables_of_the_page_are_those_of_the_json_and_of_the_files(tmp_path):
    run = make_run(tmp_path / "run", [BROKEN, DEFENDED], candidates=2, attributes=MARKS)
    out = build_report([run], tmp_path / "report.html", tables=tmp_path / "tables")
    page, document = Page(out), json.loads(out.with_suffix(".json").read_text())
    named = {table["name"]: table for table in document["tables"]}
    for name in ("Rates over people", "Scores of each audit", "Utility and leak"):
        shown = page.tables[name]
        for row, plain in zip(shown[1:], named[name]["rows"], strict=True):
            assert row == [" ".join(cell.replace(";", " ").split()) for cell in plain]
    names = {path.name for path in (tmp_path / "tables").iterdir()}
    assert len(names) == 3 * len(document["tables"])
    assert {"rates-over-people.csv", "rates-over-people.md", "rates-over-people.tex"} <= names
    rows = list(csv.reader((tmp_path / "tables" / "rates-over-people.csv").open(newline="")))
    assert rows == [named["Rates over people"]["head"], *named["Rates over people"]["rows"]]


def test_cells_are_escaped_in_every_format():
    table = PlainTable(
        "Odd, 100 %", ["a|b", "c_d"], [["x & y", "5 % – {z}\n2"], ["−1", "\\"]], "Cap"
    )
    assert as_markdown(table).splitlines()[0] == "| a\\|b | c_d |"
    assert as_markdown(table).splitlines()[2] == "| x & y | 5 % – {z} 2 |"
    assert list(csv.reader(as_csv(table).splitlines(keepends=True)))[2] == ["−1", "\\"]
    lines = as_latex(table).splitlines()
    assert lines[1] == r"\begin{tabular}{ll}"
    assert lines[3] == r"a|b & c\_d \\"
    assert lines[5] == r"x \& y & 5 \% -- \{z\} 2 \\"
    assert lines[6] == r"$-$1 & \textbackslash{} \\"
    assert lines[-1] == "% Cap"


def test_wide_tables_are_drawn_as_several(tmp_path):
    models = [{**spec, "case": case} for spec in many_models(4) for case in ("one", "two")]
    page = page_of(make_run(tmp_path / "run", models), tmp_path, images=False)
    rows = page.tables["Every attack on every model"]
    assert [len(row) for row in rows] == [11] * 5 + [4] * 5, "13 models: 10 and 3"


def test_the_command_writes_tables_and_leaves_images_out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = make_run(tmp_path / "run", [BROKEN, DEFENDED])
    done = frostglass("report", run, "--no-images", "--tables", tmp_path / "tables")
    assert (done.code, done.out.strip()) == (0, "report.html")
    assert "data:image" not in (tmp_path / "report.html").read_text()
    assert (tmp_path / "tables" / "threat-model.tex").is_file()
    done = frostglass("report", run, "--table", "latex")
    assert done.out.startswith("% Seeds; needs the packages booktabs and amssymb\n")
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"cannot write .*file.*: choose another place"):
        build_report([run], tmp_path / "x.html", tables=tmp_path / "file")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attributes": {"glasses": [True]}}, "its attributes are about other people"),
        (
            {"thresholds": {"limits": {"most": 1}, "recorded": "", "before_results": True}},
            "has thresholds that this version does not know",
        ),
        ({"thresholds": {"limits": {}}}, "is damaged"),
    ],
)
def test_damaged_records_are_refused(tmp_path, change, message):
    run = make_run(tmp_path / "run", [BROKEN])
    edit_run(run, json.loads((run / "run.json").read_text()) | change)
    done = frostglass("report", run, "--out", tmp_path / "report.html")
    assert done.code == 2
    assert message in done.err
