"""Reports on many audits, and on searches that stopped early."""

import json

import numpy as np
import torch
from safetensors.torch import load_file

from frostglass.report.build import build_report
from pages import Page, assert_own_script
from run_folders import (
    BROKEN,
    CALOR,
    DEFENDED,
    crossed,
    make_run,
    many_models,
    study_of,
    tried,
)

MATRIX = "Every attack on every model"


def test_of_many_audits_the_strongest_on_each_model_have_images(tmp_path):
    cases = [f"attack {place}" for place in range(7)]
    run = make_run(tmp_path / "run", crossed(cases))
    page = Page(build_report([run], tmp_path / "report.html"))
    shown = [f"{model} {case}" for model in ("undefended", "CALoR") for case in cases[1:]]
    rows = page.tables["Private and reconstructed images"]
    assert [row[0].rsplit(" ", 6)[0] for row in rows[2:14]] == shown
    assert len(page.images) == 13 * 20
    pixels = load_file(run / "images.safetensors")
    np.testing.assert_array_equal(
        page.images[16 * 12], pixels["audit.13"][0, 0].permute(1, 2, 0).numpy()
    )
    assert (
        "Images of 12 of 14 audits are here, to keep this page small: the 6 strongest "
        "attacks on each model."
    ) in page.text.replace(" .", ".")
    assert "Drawn are the audits that have images above; the table has all 14." in page.text
    assert sum(values.get("class") == "track" for _, values in page.tags) == 12
    assert len(page.tables["Scores of each audit"]) == 1 + 14
    assert len(page.tables[MATRIX]) == 1 + 1 + 7 + 1
    # The controls have a line for each audit, and the evaluators' quality is below.
    head, *lines = page.tables["Controls of each audit"]
    assert head == [
        "audit",
        "Positive control",
        "Prior only",
        "Classifiers agree",
        "Not fooled",
        "Realistic images",
        "Target success",
    ]
    assert lines[-1] == [
        "CALoR attack 6",
        "+95 points interval 85 to 100 p < 0.001 8 people would do ✓ pass",
        "5 % ✓ pass",
        "100 % ✓ pass",
        "55 % top-1 55 % ✓ pass",
        "1.00 × ✓ pass",
        "100 % ✓ pass",
    ]
    assert len(lines) == 14
    assert "A weak evaluator overlooks leaks. 97 % ✓ pass" in page.text


def test_up_to_twelve_audits_all_have_images(tmp_path):
    study = study_of(tmp_path, crossed([f"attack {place}" for place in range(6)]))
    assert study.shown == study.entries
    page = Page(build_report([tmp_path / "run"], tmp_path / "report.html"))
    assert len(page.images) == 13 * 20
    assert "to keep this page small" not in page.text
    assert "by other attacks" not in page.text
    assert page.tables["Controls of each audit"][0][0] == "control"
    # Models are never left out, however many there are.
    models = study_of(tmp_path / "models", many_models(5))
    assert models.many
    assert models.shown == models.entries


def test_a_page_of_many_attacks_stays_small(tmp_path):
    noise = torch.rand(40, 1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    audits = [
        tried(
            f"attack {place}",
            10,
            defenses=[{"name": "calor", "rank": rank + 1}] if rank else [],
            images=noise,
        )
        for rank in range(3)
        for place in range(12)
    ]
    run = make_run(tmp_path / "run", audits, people=40, size=32)
    out = build_report([run], tmp_path / "report.html")
    assert out.stat().st_size < 3_000_000
    page = Page(out)
    assert len({row[0] for row in page.tables["Scores of each audit"]}) == 37
    # Four attacks on each of three models, and private images: 31 people fit.
    assert len(page.images) == (3 * 4 + 1) * 31
    assert "9 people are left out to keep this page small" in page.text


def test_warnings_of_many_audits_are_not_listed_one_by_one(tmp_path):
    cases = [f"attack {place}" for place in range(13)]
    study = study_of(tmp_path, crossed(cases, far=2.0))
    assert list(study.warnings.values()) == ["all 26 audits"]
    some = [
        audit
        | (
            {"far": 2.0}
            if audit.get("defenses") or audit["case"] in ("attack 3", "attack 5")
            else {}
        )
        for audit in crossed(cases)
    ]
    assert list(study_of(tmp_path / "some", some).warnings.values()) == [
        "undefended · attack 3, undefended · attack 5 and all 13 of CALoR"
    ]


def test_searches_that_stopped_early_and_their_steps_are_shown(tmp_path):
    run = make_run(
        tmp_path / "run", [BROKEN, {**DEFENDED, "partial": [0, 4], "steps": [[100], [120]]}]
    )
    page = Page(build_report([run], tmp_path / "report.html"))
    assert json.loads((run / "run.json").read_text())["audits"][1]["partial"] == [
        "person 0",
        "person 4",
    ]
    head, _, undefended, defended = page.tables["Private and reconstructed images"][:4]
    assert [name for name, cell in zip(head, defended, strict=True) if "stopped early" in cell] == [
        "person 0",
        "person 4",
    ]
    assert "stopped early" not in " ".join(undefended)
    assert sum(values.get("class") == "partial" for _, values in page.tags) == 2
    assert "Dashed frame: the search stopped early, so the image says little" in page.text
    assert "partial: the search stopped early for 2 of 20 people" in page.text
    assert [row[-2] for row in page.tables["Scores of each audit"]] == [
        "queries",
        "31 200",
        "31 200 110 steps",
    ]
    assert (
        "Queries are images the attack passes to the model, without those used to "
        "train a prior, steps the mean over its searches."
    ) in page.text.replace(" ,", ",").replace(" .", ".")
    whole = Page(
        build_report([make_run(tmp_path / "whole", [BROKEN, DEFENDED])], tmp_path / "whole.html")
    )
    assert "stopped early" not in whole.text
    assert "steps the mean" not in whole.text


def test_redacting_hides_whose_search_stopped_and_names_in_cases(tmp_path):
    names = ["Anna Schmidt", "Bo", "7", *(f"Zoe_{place}" for place in range(17))]
    audits = [
        tried("for Zoe_3", 9, partial=[0, 1, 2]),
        tried("KED-MI", 9),
        tried("for Zoe_3", 9, defenses=CALOR, partial=[5]),
    ]
    run = make_run(tmp_path / "run", audits, names=names)
    out = build_report([run], tmp_path / "report.html", redact=True)
    page, loaded = Page(out), json.loads(out.with_suffix(".json").read_text())["runs"][0]
    assert [audit["partial"] for audit in loaded["audits"]] == [
        ["person A", "person B", "person C"],
        [],
        ["person F"],
    ]
    assert [audit["case"] for audit in loaded["audits"]] == [
        "for person G",
        "KED-MI",
        "for person G",
    ]
    assert [row[0] for row in page.tables[MATRIX][2:4]] == ["for person G", "KED-MI"]
    assert sum(values.get("class") == "partial" for _, values in page.tags) == 4
    for name in ("Anna", "Schmidt", "Zoe"):
        assert name not in out.read_text() + out.with_suffix(".json").read_text()


def test_hostile_cases_are_text(tmp_path):
    evil = '<script>alert(1)</script>&" onload="x'
    run = make_run(
        tmp_path / "run", [tried(evil, 9), tried("{{ 1 }}", 8), tried(evil, 7, defenses=CALOR)]
    )
    page = Page(build_report([run], tmp_path / "report.html"))
    assert_own_script(page)
    assert not [tag for tag, values in page.tags if "onload" in values]
    assert [row[0] for row in page.tables[MATRIX][2:4]] == [evil, "{{ 1 }}"]
