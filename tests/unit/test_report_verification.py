"""Who would be recognised: the table of verification, and the people shown large."""

import json

import numpy as np
import pytest
from safetensors.torch import load_file

from feature_folders import OPEN, feature_page, make_feature_run
from frostglass.report import build
from frostglass.report.build import build_report
from frostglass.report.text import number
from pages import Page, plain
from run_folders import (
    BROKEN,
    CALOR,
    DEFENDED,
    edit_run,
    make_run,
    many_models,
    page_of,
    tried,
)


def test_the_table_has_every_evaluator_at_both_rates(tmp_path):
    page = page_of(tmp_path, [BROKEN, {**DEFENDED, "hits": (8, 7), "verified": 3}])
    head, *rows = page.tables["Verification"]
    assert head == [
        "evaluator",
        "false-accept rate",
        "real images accepted",
        "strangers accepted",
        "prior-only draws accepted",
        "reconstructions accepted undefended",
        "reconstructions accepted CALoR",
    ]
    assert [row[1:] for row in rows] == [
        ["1 %", "98 % of 160", "1.1 %", "5 %", "100 %", "40 %"],
        ["0.1 %", "88 % of 160", "0.12 %", "5 %", "100 %", "40 %"],
        ["1 %", "98 % of 160", "1.1 %", "5 %", "95 %", "35 %"],
        ["0.1 %", "88 % of 160", "0.12 %", "5 %", "95 %", "35 %"],
        ["1 %", "98 % of 160", "1.1 %", "5 %", "95 %", "15 %"],
        ["0.1 %", "88 % of 160", "0.12 %", "5 %", "95 %", "15 %"],
    ]
    basis = "40 000 comparisons with 1 000 images of strangers"
    assert [row[0] for row in rows] == [
        f"● 1: resnet classifier, trained on the private people {basis}",
        "evaluator 1",
        f"◆ 2: resnet classifier, trained on the private people {basis}",
        "evaluator 2",
        f"▲ 3: faces32 embedder, never trained on these people {basis} decides",
        "evaluator 3",
    ]
    assert "Too few images" not in page.text


def test_excluded_evaluators_say_why(tmp_path):
    page = page_of(tmp_path, [BROKEN], evaluators=(0.97, 0.5), accepts=(0.98, 0.9, 0.3))
    first, _, second, _, third, _ = (row[0] for row in page.tables["Verification"][1:])
    assert first.endswith("decides")
    assert second.endswith(
        "it classifies 50% of held-out images correctly, required 70% ! excluded"
    )
    assert third.endswith("it accepts 30% of genuine images, required 50% ! excluded")


def test_rates_that_too_few_images_made_coarser_are_told(tmp_path):
    page = page_of(tmp_path / "one", [BROKEN], rates=(0.01, 0.004))
    rates = [row[1] for row in page.tables["Verification"][1:]]
    assert rates == ["1 %", "0.4 % 0.1 % asked"] * 3
    text = page.text.replace(" ,", ",").replace(" .", ".")
    assert (
        "Too few images of strangers for evaluator 3: 1 000 images and 40 000 comparisons. Instead "
        "of a false-accept rate of 0.1 %, 0.4 % is used, the finest they support."
    ) in text
    page = page_of(tmp_path / "both", [BROKEN], rates=(0.02, 0.02))
    assert [row[1] for row in page.tables["Verification"][1:]] == ["2 % 1 % asked"] * 3


def test_first_and_any_guess_and_priors_of_their_own(tmp_path):
    audits = [{**BROKEN, "hits": (25, 25)}, {**DEFENDED, "hits": (9, 9), "baseline": 3}]
    page = page_of(tmp_path, audits, candidates=2)
    head, *rows = page.tables["Verification"]
    assert head[4:] == [
        "prior-only draws accepted undefended",
        "prior-only draws accepted CALoR",
        "reconstructions accepted undefended",
        "reconstructions accepted CALoR",
    ]
    # 25 of 40 images: both of 12 people, and the first of one more.
    assert rows[4][4:] == ["2.5 %", "7.5 %", "65 % any 65 %", "25 % any 25 %"]
    assert "the first of each person, and below it any of the 2 kept" in page.text


def test_many_models_are_folded_away(tmp_path):
    page = page_of(tmp_path, many_models(2))
    assert len(page.tables["Verification"][0]) == 6
    head, *rows = page.tables["Reconstructions accepted"]
    assert head == ["audit", "evaluator 1", "evaluator 2", "evaluator 3"]
    assert rows[0] == ["undefended", *["100 % prior only 5 %", "95 % prior only 5 %"], rows[0][3]]
    assert len(rows) == 7


def test_exposed_and_nearest_people_are_shown_large(tmp_path):
    audit = {**BROKEN, "hits": (20, 19), "verified": 6}
    run = make_run(tmp_path / "run", [audit, {**DEFENDED, "hits": (0, 0)}])
    page = Page(build_report([run], tmp_path / "report.html"))
    pixels = load_file(run / "images.safetensors")
    # Matches fall from person to person: 0 to 5 are verified, 6 is the nearest of the others.
    shown = [(0, place) for place in (0, 1, 2, 3, 6, 7, 8, 9)] + [(1, p) for p in (0, 1, 2, 3)]
    assert len(page.large) == 2 * len(shown)
    for place, (number_, person) in enumerate(shown):
        real, reconstruction = page.large[2 * place : 2 * place + 2]
        np.testing.assert_array_equal(real, pixels["private"][person].permute(1, 2, 0).numpy())
        expected = pixels[f"audit.{number_}"][person, 0].permute(1, 2, 0).numpy()
        np.testing.assert_array_equal(reconstruction, expected)
    assert "Most exposed: undefended" in page.text
    assert "person 0 match 0.95, above 0.5" in page.text
    assert "Nearest to being recognised: undefended" in page.text
    assert "person 6 match 0.324, not above 0.5" in page.text
    assert "Most exposed: CALoR Nobody." in page.text
    alts = [values["alt"] for tag, values in page.tags if tag == "img"]
    assert alts[:2] == ["real image of person 0", "reconstruction of person 0, undefended"]


def test_the_best_match_of_a_person_is_shown(tmp_path):
    page = page_of(tmp_path, [{**BROKEN, "hits": (1, 1)}], candidates=3)
    # The first of three images of person 0 is accepted, and none of anybody else.
    assert "Most exposed: undefended person 0 match 0.95, above 0.5" in page.text
    run = make_feature_run(tmp_path / "features", [{**OPEN, "hits": 16}])
    page = Page(build_report([run], tmp_path / "features.html"))
    victims = load_file(run / "images.safetensors")["victims"]
    np.testing.assert_array_equal(page.large[0], victims[0, 0].permute(1, 2, 0).numpy())


def test_large_images_are_no_larger_than_the_page_allows(tmp_path, monkeypatch):
    page = page_of(tmp_path / "large", [BROKEN], size=160)
    assert {image.shape for image in page.large} == {(128, 128, 3)}
    monkeypatch.setattr(build, "IMAGE_BYTES", 30_000)
    assert page_of(tmp_path / "small", [BROKEN], size=160).large == []


def test_of_many_models_three_are_shown_large_and_embeddings_never(tmp_path):
    page = page_of(tmp_path, many_models(2))
    assert page.text.count("Most exposed: ") == 3
    assert "The first 3 of 7 are shown." in page.text
    page = feature_page(tmp_path / "mapper", [{**OPEN, "attack": {"name": "mapper"}}])
    assert page.large == []
    assert "similarity server’s MCC 0.61" in page.text
    page = feature_page(tmp_path / "decoder", [OPEN])
    assert "similarity recognised 25 % · server’s MCC 0.61" in page.text


def test_redacted_reports_show_nobody_large(tmp_path):
    names = [f"Zoe_{place}" for place in range(20)]
    run = make_run(tmp_path / "run", [BROKEN, DEFENDED], names=names)
    page = Page(build_report([run], tmp_path / "report.html", redact=True))
    assert page.large == []
    assert "Nearest to being recognised" not in page.text
    assert "Zoe" not in page.raw
    assert "nobody is shown large" in page.text
    assert {image.shape for image in page.images} == {(3, 3, 3)}


def test_the_strongest_of_attacks_that_nobody_is_recognised_by_matches_best(tmp_path):
    weak, strong = tried("weak", 0), tried("strong", 0)
    run = make_run(tmp_path / "run", [weak, strong])
    document = json.loads((run / "run.json").read_text())
    rows = (run / "rows.csv").read_text().splitlines()
    place = rows[0].split(",").index("match_3")
    total = 0.0
    for line in range(21, 41):
        cells = rows[line].split(",")
        cells[place] = f"{float(cells[place]) + 0.04:.6g}"
        rows[line], total = ",".join(cells), total + float(cells[place])
    document["audits"][1]["scores"]["match_3"]["value"] = total / 20
    (run / "rows.csv").write_text("\n".join(rows) + "\n")
    edit_run(run, document)
    page = Page(build_report([run], tmp_path / "report.html"))
    assert "the strongest counts: undefended (strong)." in page.text.replace(" .", ".")


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.01, "1 %"), (0.001, "0.1 %"), (1 / 600, "0.17 %"), (0.025, "2.5 %"), (1.0, "100 %")],
)
def test_rates_as_text(value, text):
    assert plain(number(value, "rate")) == text


def test_the_rule_of_a_vacuous_audit_is_stated(tmp_path):
    page = page_of(tmp_path, [{**BROKEN, "control": (3, 3), "defenses": CALOR}])
    control = next(
        row for row in page.tables["Controls of each audit"] if row[0].startswith("Positive")
    )
    assert "Vacuous if a paired test over people gives p ≥ 0.01" in control[0]
    assert "A useless attack passes in at most 1 % of audits." in control[0]
    assert control[1] == "+10 points interval 0 to 25 p = 0.25 90 people would do ✕ vacuous"
