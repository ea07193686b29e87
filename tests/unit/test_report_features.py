"""The page of a report on features."""

import json
import re

import pytest

from feature_folders import ADAPTED, CRAFTED, NOTED, OPEN, feature_page, make_feature_run, scores_of
from frostglass.report.arrange import group
from frostglass.report.build import build_report
from frostglass.report.entry import _adapts
from frostglass.report.load import read_run
from frostglass.report.text import number
from pages import Page, plain


def test_the_matrix_has_the_numbers_of_the_run_and_marks_the_strongest(tmp_path):
    latent = {"name": "latent", "tries": 1}
    audits = [
        {**OPEN, "case": "decoder"},
        {**OPEN, "case": "search", "attack": latent, "similarity": 0.5},
        {**CRAFTED, "case": "decoder", "baseline": 0.07},
        {**CRAFTED, "case": "A1", "attack": ADAPTED, "similarity": 0.35, "baseline": 0.07},
    ]
    page = feature_page(tmp_path, audits)
    ends = [
        f"{s['similarity']['low']:.2f} to {s['similarity']['high']:.2f}"
        for s in scores_of(tmp_path)
    ]
    assert page.tables["Every attack on every protection"] == [
        ["attack", "unprotected", "Crafter"],
        ["decoder", f"0.60 ★ {ends[0]}", f"0.30 {ends[2]}"],
        ["search", f"0.50 {ends[1]}", "–"],
        ["A1", "–", f"0.35 ★ {ends[3]}"],
        ["prior only images without any feature", "0.05", "0.07"],
        ["server’s MCC mean over attributes", "0.61 0.57 to 0.64", "0.53 0.49 to 0.56"],
        ["server’s AUC mean over attributes", "0.85 0.81 to 0.88", "0.80 0.76 to 0.83"],
    ]


def test_vacuous_squares_are_marked_and_a_sound_audit_is_shown_before_one(tmp_path):
    audits = [OPEN, {**OPEN, "similarity": 0.65, "control": 0.06}, {**CRAFTED, "control": 0.06}]
    page = feature_page(tmp_path, audits)
    row = page.tables["Every attack on every protection"][1]
    assert row[1].startswith("0.60 ★")
    assert row[1].endswith("best of 2")
    assert row[2].endswith("vacuous")
    assert "★" not in row[2]
    assert [
        values.get("class")
        for tag, values in page.tags
        if tag == "td" and values.get("class") == "hollow"
    ] == ["hollow"]


def test_scores_are_those_of_the_run(tmp_path):
    run = make_feature_run(
        tmp_path / "run",
        [OPEN, {**CRAFTED, "attack": {"name": "latent", "tries": 3, "adapt": 16}, "lda": None}],
    )
    out = build_report([run], tmp_path / "report.html")
    page, document = Page(out), json.loads(out.with_suffix(".json").read_text())
    written = json.loads((run / "run.json").read_text())
    del written["store"]
    assert document["runs"] == [written]
    assert (document["answers"][0]["surface"], document["redacted"]) == ("features", False)
    assert [plain(sentence) for sentence in document["answers"][0]["sentences"]] == page.sentences
    head, *rows = page.tables["Scores of each audit"]
    for row, audit in zip(rows, document["runs"][0]["audits"], strict=True):
        cells = dict(zip(head, row, strict=True))
        for column, name in [("SSIM", "ssim"), ("PSNR, dB", "psnr"), ("FSIM", "fsim")]:
            score, baseline = audit["scores"][name], audit["prior_only"][name]
            assert cells[column] == (
                f"{score['value']:.2f} {score['low']:.2f} to {score['high']:.2f} prior "
                f"only {baseline['value']:.2f}"
            )
        score, lift = audit["scores"]["similarity"], audit["controls"]["lift"]["similarity"]
        assert cells["similarity"] == (
            f"{score['value']:.2f} {score['low']:.2f} to {score['high']:.2f} prior only "
            f"0.05 above {lift['value']:+.2f} ({lift['low']:+.2f} to "
            f"{lift['high']:+.2f})"
        )
        for column, name in [
            ("▲ recognised (evaluator 3)", "verified_3"),
            ("◇ top-1 of evaluator 2", "top1_2"),
        ]:
            ends = (audit["scores"][name][end] for end in ("value", "low", "high"))
            expected = [*(round(100 * end, 1) for end in ends), 0.0]
            text = cells[column].replace("–", " ")
            assert [float(each) for each in re.findall(r"[\d.]+", text)] == expected
        assert cells["feature explained"] == "0.40"


def test_costs_and_distances_are_those_of_the_run(tmp_path):
    latent = {"name": "latent", "tries": 3, "adapt": 16}
    page = feature_page(tmp_path, [OPEN, {**CRAFTED, "attack": latent, "lda": None}])
    head, *rows = page.tables["Cost and distances"]
    for row in rows:
        cells = dict(zip(head, row, strict=True))
        assert cells["EMD to prior only"] == "3.5 floor 2.25"
        assert (cells["distance to real images"], cells["queries"], cells["time"]) == (
            "0.3 prior only 0.3",
            "31 200",
            "75.5 s",
        )
    # 8 people with 2 images: (8 - 1) / (16 - 8).
    assert [dict(zip(head, row, strict=True))["separation of people (LDA)"] for row in rows] == [
        "1.25 by chance 0.875",
        "–",
    ]
    assert [row[-1] for row in rows] == [
        "plain features of its own images",
        "the device’s network; protected features of its own images 3 reconstructions per image",
    ]


def test_what_protections_measured_is_averaged_over_images(tmp_path):
    page = feature_page(tmp_path, [OPEN, {**CRAFTED, "noted": NOTED, "moved": 0.31, "plain": 0.6}])
    assert page.tables["What each protection did"] == [
        [
            "protection",
            "features changed",
            "MCC of plain features",
            "MCC of released features",
            "batches",
            "images",
            "distance before",
            "distance after",
            "steps",
        ],
        [
            "unprotected 32×16×16 at stage1",
            "0 %",
            "0.61 0.57 to 0.64",
            "0.61 0.57 to 0.64",
            "–",
            "–",
            "–",
            "–",
            "–",
        ],
        # Three images with 2.0 and one with 4.0, and so on.
        [
            "Crafter 32×16×16 at stage1",
            "31 %",
            "0.60 0.56 to 0.63",
            "0.53 0.49 to 0.56",
            "2",
            "4",
            "2.5",
            "0.75",
            "90",
        ],
    ]
    assert "according to its own critic" in page.text


def test_a_protection_that_has_a_ceiling_shows_it(tmp_path):
    page = feature_page(tmp_path, [OPEN, {**CRAFTED, "ceiling": 0.57}])
    head, plain, limited = page.tables["What each protection did"]
    assert head[4] == "MCC at the start"
    assert (plain[4], limited[4]) == ("–", "0.57 0.53 to 0.60")
    assert "its ceiling, because it releases features of generated images only" in page.text
    page = feature_page(tmp_path / "other", [OPEN, CRAFTED])
    assert "MCC at the start" not in page.tables["What each protection did"][0]


def test_the_page_says_what_the_device_computes_if_all_runs_do(tmp_path):
    audits = [{**OPEN, "share": 0.06}, {**CRAFTED, "share": 1.0}]
    head, *rows = feature_page(tmp_path, audits).tables["What each protection did"]
    assert head[1] == "computed on the device"
    assert [row[1] for row in rows] == ["6 %", "100 %"]
    page = feature_page(tmp_path / "older", [audits[0], CRAFTED])
    assert "computed on the device" not in page.tables["What each protection did"][0]


def test_notes_that_are_no_numbers_are_left_to_the_json(tmp_path):
    run = make_feature_run(
        tmp_path / "run",
        [
            {
                **CRAFTED,
                "noted": (
                    {"taps": ["a"], "sure": True, "ratio": 0.5},
                    {"taps": [], "sure": False, "ratio": 1.0},
                ),
            }
        ],
    )
    assert group([read_run(run)])[0].subjects[0].noted == {"ratio": 0.75}


def test_controls_and_kinds_of_attack(tmp_path):
    audits = [
        OPEN,
        CRAFTED,
        {**CRAFTED, "attack": {"name": "latent", "tries": 1}, "control": 0.06},
        {**CRAFTED, "defenses": [{"name": "disco"}]},
    ]
    page = feature_page(tmp_path, audits, evaluators=(0.97, 0.69))
    assert page.tables["Positive control of each audit"] == [
        ["attack", "unprotected", "Crafter", "Disco"],
        ["decoder", *["+0.55 at least +0.55 ✓ pass"] * 3],
        ["latent", "–", "+0.01 at least +0.01 ✕ vacuous", "–"],
    ]
    assert [row[1] for row in page.tables["Controls of the evaluators"]] == [
        "all audits",
        "0.70 and 0.02 ✓ pass",
        "97 % accepts 98 % ✓ pass",
        "69 % accepts 98 % ! attention",
        "accepts 98 % ✓ pass",
    ]
    assert page.tables["Kinds of attack tried on each protection"] == [
        ["protection", "black box", "white box", "adaptive"],
        ["unprotected", "✓ tried", "! missing", "–"],
        ["Crafter", "✓ tried", "tried, vacuous", "! missing"],
        # Its features are released as the network computes them.
        ["Disco", "✓ tried", "! missing", "–"],
    ]
    assert (
        "evaluator 2 (resnet) is excluded: it classifies 69% of held-out images correctly"
    ) in page.text
    assert "4 of 4 audits carry warnings" in page.text


def test_most_exposed_people_are_named(tmp_path):
    page = feature_page(tmp_path, [{**OPEN, "similarity": 0.5}])
    # Similarity grows with a person's place: ± 0.03 in steps of 0.0086.
    assert (
        "unprotected · decoder : person 7 (0.53), person 6 (0.52), person 5 (0.51), person 4 "
        "(0.50), person 3 (0.50)"
    ) in page.text
    assert "person 2 (" not in page.text


def test_cases_name_attacks_and_settings_tell_the_rest_apart(tmp_path):
    audits = [
        {
            **CRAFTED,
            "defenses": [{"name": "crafter", "beta": beta}],
            "attack": {"name": "decoder", "adapt": adapt},
            "label": f"{beta} {adapt}",
        }
        for beta in (1.0, 2.0)
        for adapt in (0, 64)
    ]
    study = group([read_run(make_feature_run(tmp_path / "a", audits))])[0]
    assert [subject.name for subject in study.subjects] == [
        "Crafter (beta=1.0)",
        "Crafter (beta=2.0)",
    ]
    assert study.methods == ["decoder (adapt=0)", "decoder (adapt=64)"]
    cases = [
        {**audit, "case": case} for audit, case in zip(audits, ["first", "second"] * 2, strict=True)
    ]
    assert group([read_run(make_feature_run(tmp_path / "b", cases))])[0].methods == [
        "first",
        "second",
    ]
    # Here each protection has a case of its own, so the cases cannot be names of attacks.
    cases = [{**audits[0], "case": "weak"}, {**audits[2], "case": "strong"}]
    assert group([read_run(make_feature_run(tmp_path / "c", cases))])[0].methods == ["decoder"]


def test_protections_that_differ_in_nothing_known_are_told_apart_by_the_grid(tmp_path):
    audits = [
        {**OPEN, "released": epochs, "case": "decoder", "label": f"target.epochs={epochs}, decoder"}
        for epochs in (5, 9)
    ]
    names = [
        subject.name
        for subject in group([read_run(make_feature_run(tmp_path / "run", audits))])[0].subjects
    ]
    assert names == ["unprotected (label=target.epochs=5)", "unprotected (label=target.epochs=9)"]


def test_runs_on_the_same_images_share_a_table_and_shared_audits_appear_once(tmp_path):
    first = make_feature_run(tmp_path / "a", [OPEN])
    second = make_feature_run(tmp_path / "b", [OPEN, CRAFTED])
    other = make_feature_run(tmp_path / "c", [OPEN], evaluators=(0.96, 0.95), name="apart")
    studies = group([read_run(folder) for folder in (first, second, second, other)])
    assert [[p.name for p in study.subjects] for study in studies] == [
        ["unprotected", "Crafter"],
        ["unprotected"],
    ]
    assert [len(study.entries) for study in studies] == [2, 1]
    page = Page(build_report([first, second, other, first], tmp_path / "report.html"))
    assert [tag for tag, _ in page.tags].count("h1") == 2


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [
        (0.126, "decimal", "0.13"),
        (-0.126, "decimal", "−0.13"),
        (-0.004, "decimal", "0.00"),
        (None, "decimal", "–"),
        (0.55, "change", "+0.55"),
        (-0.2, "change", "−0.20"),
        (0.004, "change", "0.00"),
    ],
)
def test_similarities_as_text(value, kind, text):
    assert number(value, kind) == text


@pytest.mark.parametrize(
    "knowing",
    [
        {"name": "latent", "tries": 1, "gap": "channels"},
        {"name": "hybrid", "starter": {"unit_channels": True}},
    ],
)
def test_a_search_that_undoes_pruning_is_an_adaptive_attack(tmp_path, knowing):
    assert _adapts({"name": "decoder", "unit_channels": True})
    assert not _adapts({"name": "decoder", "unit_channels": False})
    pruned = {**CRAFTED, "defenses": [{"name": "disco"}]}
    page = feature_page(tmp_path, [OPEN, pruned, {**pruned, "attack": knowing}])
    assert page.tables["Kinds of attack tried on each protection"] == [
        ["protection", "black box", "white box", "adaptive"],
        ["unprotected", "✓ tried", "! missing", "–"],
        ["Disco", "✓ tried", "✓ tried", "✓ tried"],
    ]
