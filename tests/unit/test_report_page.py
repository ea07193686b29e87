"""The page of a report on models."""

import csv
import json
import re
import tomllib

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from frostglass.auditing.config_file import read_config
from frostglass.report import build
from frostglass.report.build import build_report
from frostglass.report.charts import SHAPES, Mark, track
from frostglass.report.facts import Measured
from frostglass.report.text import number, toml
from pages import Page, assert_own_script, assert_self_contained, plain
from run_folders import BROKEN, DEFENDED, FAILED, make_run


def test_numbers_on_the_page_are_those_of_the_json(tmp_path):
    out = build_report([make_run(tmp_path / "run", [BROKEN, DEFENDED])], tmp_path / "report.html")
    page, document = Page(out), json.loads(out.with_suffix(".json").read_text())
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    assert run.pop("store") == ""
    assert document["runs"] == [run], "all but the place of the store"
    assert [plain(sentence) for sentence in document["answers"][0]["sentences"]] == page.sentences

    def percent(value: float) -> float:
        return round(100 * value, 1)

    head, *rows = page.tables["Scores of each audit"]
    assert len(rows) == 2
    for row, audit in zip(rows, document["runs"][0]["audits"], strict=True):
        cells = dict(zip(head, row, strict=True))
        assert (
            cells["model accuracy on held-out images"]
            == f"{percent(audit['target']['accuracy']['test'])} %"
        )
        for column, name in [
            ("▲ recognised (evaluator 3)", "verified_3"),
            ("◇ top-1 of evaluator 2", "top1_2"),
            ("top-5 of evaluator 1", "top5_1"),
            ("model itself accepts", "target_top1"),
        ]:
            score, guess = audit["scores"][name], audit["prior_only"][name]
            expected = [
                percent(x) for x in (score["value"], score["low"], score["high"], guess["value"])
            ]
            assert [float(x) for x in re.findall(r"[\d.]+", cells[column])] == expected
        assert cells["distance to the person"].startswith(
            f"{audit['scores']['distance']['value']:.3g} "
        )
        assert (cells["queries"], cells["time"]) == ("31 200", "75.5 s")
    counted = page.tables["Conventions of the papers"]
    assert counted[0][:4] == ["audit", "evaluator", "mean", "selected"]
    assert counted[4][:3] == ["CALoR", "2", "35 %"]


def test_images_are_the_runs_and_people_keep_their_columns(tmp_path):
    run = make_run(tmp_path / "run", [DEFENDED, BROKEN], people=20, candidates=1)
    page = Page(build_report([run], tmp_path / "report.html"))
    pixels = load_file(run / "images.safetensors")
    shown = [round(step * 19 / 15) for step in range(16)]
    head, private, undefended, defended = page.tables["Private and reconstructed images"][:4]
    assert head[1:] == [f"person {place}" for place in shown]
    assert (private[0][:7], undefended[0], defended[0]) == (
        "private",
        "undefended 95 % recognised, top-1 100 % and 95 %",
        "CALoR 35 % recognised, top-1 40 % and 35 %",
    )
    # Undefended first, whatever the order in the run: it is audit 1 there.
    for row, (tensor, places) in enumerate(
        [
            (pixels["private"], shown),
            (pixels["audit.1"][:, 0], shown),
            (pixels["audit.0"][:, 0], shown),
        ]
    ):
        for column, place in enumerate(places):
            np.testing.assert_array_equal(
                page.images[16 * row + column], tensor[place].permute(1, 2, 0).numpy()
            )
    assert "16 of 20 people, chosen by position at even intervals, not by success." in page.text
    assert len(page.images) == 3 * 20
    verdicts = {
        line["identity"]: [line[f"verified_{number}"] for number in (1, 2, 3)]
        for line in csv.DictReader((run / "rows.csv").open())
        if line["audit"] == "calor"
    }
    assert [cell.split() for cell in defended[1:]] == [
        [pair[yes != "1"] for pair, yes in zip(SHAPES, verdicts[name], strict=False)]
        for name in head[1:]
    ]


def test_a_large_run_still_fits_a_phone(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "IMAGE_BYTES", 30_000)
    run = make_run(tmp_path / "run", [BROKEN, DEFENDED], people=20, size=80)
    page = Page(build_report([run], tmp_path / "report.html"))
    assert page.images[0].shape == (64, 64, 3)
    assert len(page.images) == 3
    assert "19 people are left out to keep this page small" in page.text


def test_grey_images(tmp_path):
    run = make_run(
        tmp_path / "run",
        [{"images": torch.rand(20, 1, 1, 8, 8, generator=torch.Generator().manual_seed(0))}],
        private=torch.zeros(20, 1, 8, 8, dtype=torch.uint8),
    )
    assert {
        image.shape for image in Page(build_report([run], tmp_path / "report.html")).images
    } == {(8, 8)}


def test_page_needs_nothing_from_outside_and_no_script(tmp_path):
    run = make_run(
        tmp_path / "run",
        [BROKEN, DEFENDED],
        names=["https://example.org/x.png", *map(str, range(19))],
    )
    assert_self_contained(build_report([run], tmp_path / "report.html"), tmp_path)


def test_hostile_names_are_text(tmp_path):
    evil = "<script>alert('x')</script>\" onerror=\"alert(1)"
    run = make_run(
        tmp_path / "run",
        [BROKEN, DEFENDED],
        names=[evil, *(f"{{{{ {place} }}}}" for place in range(19))],
        name="</pre><script>'; rm -rf $HOME",
    )
    page = Page(build_report([run], tmp_path / "report.html"))
    assert_own_script(page)
    assert not [tag for tag, values in page.tags if "onerror" in values]
    assert evil in page.tables["Private and reconstructed images"][0]
    assert "{{ 0 }}" in page.text
    assert "frostglass run pre-script-rm--rf-HOME.toml --threads 1" in page.text


def test_same_runs_same_bytes(tmp_path):
    run = make_run(tmp_path / "run", [BROKEN, DEFENDED])
    first, second = (
        build_report([run], tmp_path / "a" / "x.html"),
        build_report([run], tmp_path / "b" / "x.html"),
    )
    assert first.read_bytes() == second.read_bytes()
    assert first.with_suffix(".json").read_bytes() == second.with_suffix(".json").read_bytes()
    assert sorted(path.name for path in first.parent.iterdir()) == ["x.html", "x.json"]


def test_kinds_of_attack_that_were_not_run_are_named(tmp_path):
    run = make_run(tmp_path / "run", [BROKEN, DEFENDED, {**DEFENDED, "loss": "poincare", **FAILED}])
    page = Page(build_report([run], tmp_path / "report.html"))
    assert page.tables["Kinds of attack tried on each model"] == [
        ["model", "CE", "margin or logit", "Poincaré", "label-only", "adaptive"],
        ["undefended", "! missing", "✓ tried", "! missing", "! missing", "–"],
        ["CALoR", "! missing", "✓ tried", "tried, vacuous", "! missing", "! missing"],
    ]
    assert (
        "Missing or vacuous for CALoR: CE, Poincaré, label-only and adaptive. Masked "
        "gradients are not ruled out."
    ) in page.text.replace(" .", ".")
    assert "These audits are vacuous and prove nothing: CALoR · loss=poincare" in page.text


@pytest.mark.parametrize(
    ("control", "spec", "options", "warning"),
    [
        ("Classifiers agree", {"hits": (20, 15)}, {}, None),
        ("Classifiers agree", {"hits": (20, 14)}, {}, "the classifiers disagree on 30%"),
        ("Not fooled", {"hits": (20, 20), "verified": 10}, {}, None),
        ("Not fooled", {"hits": (20, 20), "verified": 9}, {}, "the classifiers are fooled"),
        ("Realistic images", {"far": 1.49}, {}, None),
        ("Realistic images", {"far": 1.51}, {}, "times as far from real images"),
        ("Target success", {"success": 0.5}, {}, None),
        ("Target success", {"success": 0.45}, {}, "the target itself accepts only 45%"),
        # Exactly at the limit, which single precision would overshoot.
        ("Prior only", {"baseline": 4}, {}, None),
        ("Prior only", {"baseline": 5}, {}, "the prior-only baseline already scores 25%"),
        ("Evaluator 2", {}, {"evaluators": (0.97, 0.7)}, None),
        ("Evaluator 2", {}, {"evaluators": (0.97, 0.69)}, "it classifies 69% of held-out images"),
        ("Evaluator 2", {}, {"accepts": (0.9, 0.5, 0.9)}, None),
        ("Evaluator 2", {}, {"accepts": (0.9, 0.49, 0.9)}, "it accepts 49% of genuine images"),
    ],
)
def test_attention_is_asked_exactly_where_the_controls_warn(
    tmp_path, control, spec, options, warning
):
    run = make_run(tmp_path / "run", [spec], **options)
    page = Page(build_report([run], tmp_path / "report.html"))
    verdict = next(
        row[1] for row in page.tables["Controls of each audit"] if row[0].startswith(control)
    )
    warnings = json.loads((run / "run.json").read_text())["audits"][0]["controls"]["warnings"]
    assert all(text in page.text for text in warnings)
    if warning is None:
        assert verdict.endswith("✓ pass")
        assert warnings == []
    else:
        assert verdict.endswith("! attention")
        assert [text for text in warnings if warning in text] == warnings


def test_most_exposed_people_are_named(tmp_path):
    page = Page(
        build_report(
            [make_run(tmp_path / "run", [{"hits": (5, 4), "verified": 3}], candidates=2)],
            tmp_path / "report.html",
        )
    )
    assert "undefended : person 0 (100 %), person 1 (50 %)" in page.text
    assert "person 2 (" not in page.text


def test_equal_labels_are_told_apart(tmp_path):
    run = make_run(
        tmp_path / "run",
        [
            BROKEN,
            DEFENDED,
            {**DEFENDED, "defenses": [{"name": "calor", "rank": 5}], "hits": (3, 3)},
        ],
    )
    page = Page(build_report([run], tmp_path / "report.html"))
    assert [row[0] for row in page.tables["Scores of each audit"][1:]] == [
        "undefended",
        "CALoR rank=3",
        "CALoR rank=5",
    ]
    assert [row[2].split(" %")[0] for row in page.tables["Scores of each audit"][1:]] == [
        "95",
        "35",
        "15",
    ]


def test_settings_can_be_run_again(tmp_path):
    settings = {
        "name": 'a "b" \\ ü\x7f',
        "seed": 3,
        "target": {"epochs": 30, "lr": 1e-05, "flip": True, "options": {"width": 32}},
        "evaluators": [{"model": "resnet", "options": {"depth": 1}}, {"model": "lenet"}],
        "attack": {"name": "gmi", "clamp": "Infinity"},
        "grid": {
            "defenses": [[], [{"name": "calor", "rank": 3}]],
            "attack.loss": ["ce", "margin"],
            "seed": [0, 1],
            "case": [
                {
                    "case": "KED-MI, long",
                    "prior": {"name": "kplus1"},
                    "attack": {"name": "kedmi", "steps": 9},
                },
                {"case": "GMI"},
            ],
        },
    }
    (tmp_path / "run.toml").write_text(toml(settings), encoding="utf-8")
    assert tomllib.loads(toml(settings)) == {
        **settings,
        "attack": {"name": "gmi", "clamp": float("inf")},
    }
    assert read_config(tmp_path / "run.toml")["grid"] == settings["grid"]
    assert tomllib.loads(toml({"a": None, "b": {}, "c": {"d": {"e": 1}}})) == {
        "b": {},
        "c": {"d": {"e": 1}},
    }


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [
        (0.975, "percent", "97.5 %"),
        (1.0, "percent", "100 %"),
        (-0.0004, "percent", "0 %"),
        (-0.05, "gain", "−5 points"),
        (0.91, "gain", "+91 points"),
        (31_200, "count", "31 200"),
        (75.5, "seconds", "75.5 s"),
        (150, "seconds", "2.5 min"),
        (9000, "seconds", "2.5 h"),
        (0.9518, "ratio", "0.95 ×"),
        (0.15644, "plain", "0.156"),
        (12345, "plain", "12345"),
        (None, "percent", "–"),
    ],
)
def test_numbers_as_text(value, kind, text):
    assert number(value, kind).replace("\u202f", " ") == text


def test_marks_are_where_their_values_are():
    half, all_ = Measured(value=0.5, low=0.4, high=0.6), Measured(value=1, low=0.9, high=1)
    drawn = track(
        [
            Mark("recognised", 2, half, 0.1),
            Mark("top-1 of evaluator 2", 1, all_, None, hollow=True),
        ]
    )
    assert drawn.count('<svg x="50.00%"') == 1
    assert drawn.count('x1="40.20%" x2="59.80%"') == 1
    assert drawn.count('class="guess" x1="10.80%"') == 1
    assert drawn.count('class="guess"') == 1
    assert drawn.count('<svg x="99.00%"') == 1
    assert drawn.count('class="evaluator j3"') == drawn.count('class="evaluator j2 hollow"') == 1
    assert "top-1 of evaluator 2: 100\u202f%, interval 90\u202f% to 100\u202f%</title>" in drawn
