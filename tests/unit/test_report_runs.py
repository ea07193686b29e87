"""Several runs in one report, and redaction."""

import json
import re

from safetensors.torch import load_file

from frostglass.report.build import build_report
from pages import Page
from run_folders import BROKEN, DEFENDED, STAGE, TRANSFER, make_run


def test_runs_with_the_same_evaluators_share_a_table_and_shared_audits_appear_once(tmp_path):
    first, second = (
        make_run(tmp_path / "first", [BROKEN]),
        make_run(tmp_path / "second", [BROKEN, DEFENDED]),
    )
    page = Page(
        build_report(
            [first, second, tmp_path / "second" / ".." / "first"], tmp_path / "report.html"
        )
    )
    assert [row[0] for row in page.tables["Scores of each audit"]] == [
        "audit",
        "undefended",
        "CALoR",
    ]
    assert page.sentences[2].startswith("CALoR lowers this to 35 %")


def test_runs_with_other_evaluators_stand_apart(tmp_path):
    first, second = (
        make_run(tmp_path / "first", [BROKEN]),
        make_run(tmp_path / "second", [DEFENDED], evaluators=(0.99, 0.98), name="other"),
    )
    out = build_report([first, second], tmp_path / "report.html")
    page = Page(out)
    assert len(page.sentences) == 6
    assert not any("lowers" in sentence for sentence in page.sentences)
    assert [
        answer["runs"] for answer in json.loads(out.with_suffix(".json").read_text())["answers"]
    ] == ["trial", "other"]


def test_redacted_report_keeps_no_face_and_no_name(tmp_path):
    names = ["Anna Schmidt", "Bo", "007", "calor", "İpek", "anna schmidt"]
    names += [f"Zoe_{place}" for place in range(24)]
    settings = {
        "name": "trial",
        "data": {
            "name": "folder",
            "root": "/data/Anna Schmidt/images",
            "skip": ["/x/Bo/1.png", "photo_of_zoe_3_b"],
            "per": {"007": 1, "Zoe_1": 2},
        },
    }
    run = make_run(
        tmp_path / "run",
        [BROKEN, DEFENDED],
        people=30,
        names=names,
        settings=settings,
        name="for Zoe_2",
    )
    out = build_report([run], tmp_path / "report.html", redact=True)
    page, text, document = Page(out), out.read_text(), out.with_suffix(".json").read_text()
    for name in names:
        if name not in ("Bo", "007", "calor"):
            assert name.lower() not in (text + document).lower(), name
    assert not re.search(r"\b(Bo|007)\b", page.text + document)
    assert page.tables["Private and reconstructed images"][0][1:4] == [
        "person A",
        "person C",
        "person E",
    ]
    assert page.tables["Private and reconstructed images"][4][1] == "person B"
    # A method keeps its name even if a person is called like it.
    assert page.sentences[2].startswith("CALoR lowers this to 23.3 %")
    loaded = json.loads(document)
    assert loaded["redacted"] is True
    assert "Redacted." in page.text
    assert loaded["runs"][0]["identities"][:7] == [f"person {letter}" for letter in "ABCDEFG"]
    assert loaded["runs"][0]["identities"][26:28] == ["person AA", "person AB"]
    assert loaded["runs"][0]["settings"]["data"] == {
        "name": "folder",
        "root": "/data/person A/images",
        "skip": ["/x/person B/1.png", "photo_of_person J_b"],
        "per": {"person C": 1, "person H": 2},
    }


def test_redacted_images_keep_a_few_colours(tmp_path):
    run = make_run(tmp_path / "run", [BROKEN, DEFENDED], people=30)
    out = build_report([run], tmp_path / "report.html", redact=True)
    page, text = Page(out), out.read_text()
    assert len(page.images) == 3 * 30
    assert {image.shape for image in page.images} == {(3, 3, 3)}
    averages = load_file(run / "images.safetensors")["private"][0].float()
    assert abs(int(page.images[0][1, 1, 0]) - averages[0, 2:6, 2:6].mean().item()) <= 1
    whole = build_report([run], tmp_path / "whole.html").read_text()
    images = set(re.findall(r"base64,[^\"]+", whole))
    assert len(images) == 3 * 30
    assert not [image for image in images if image in text]


def test_redacting_spares_what_defenses_tell_and_hides_paths(tmp_path):
    names = ["features.6", "public", "Cosine", "Anna Schmidt", *map(str, range(16))]
    starts = {**TRANSFER, "recipe": {"start": "/data/Anna Schmidt/w.safetensors", "model": "cnn"}}
    run = make_run(
        tmp_path / "run", [{**BROKEN, "recipe": {"start": "public"}}, starts], names=names
    )
    out = build_report([run], tmp_path / "report.html", redact=True)
    page, loaded = Page(out), json.loads(out.with_suffix(".json").read_text())
    first, second = (audit["training"] for audit in loaded["runs"][0]["audits"])
    assert second["facts"] == {
        "transfer": {"last_frozen_layer": "features.6", "trainable": 345, "frozen": 12000}
    }
    assert second["first_stage"] == STAGE
    assert (first["recipe"]["start"], first["recipe"]["schedule"]) == ("public", "cosine")
    assert second["recipe"]["start"] == "/data/person D/w.safetensors"
    assert "start is public for undefended and /data/person D/w.safetensors for TL" in page.text
    assert "Anna Schmidt" not in out.read_text() + out.with_suffix(".json").read_text()
