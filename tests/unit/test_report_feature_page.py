"""Images, hostile input and redaction in a report on features."""

import csv
import json
import re
import tomllib

import numpy as np
import torch
from safetensors.torch import load_file

from feature_folders import CRAFTED, CRAFTER, OPEN, feature_page, make_feature_run
from frostglass.report import build
from frostglass.report.build import build_report
from pages import Page, assert_own_script, assert_self_contained
from run_folders import BROKEN, DEFENDED, edit_run, make_run


def test_images_are_the_runs_and_people_keep_their_columns(tmp_path):
    latent = {"name": "latent", "tries": 3}
    audits = [
        CRAFTED,
        {**CRAFTED, "attack": latent, "similarity": 0.35},
        OPEN,
        {**OPEN, "attack": latent},
    ]
    run = make_feature_run(tmp_path / "run", audits, people=20)
    page = Page(build_report([run], tmp_path / "report.html"))
    pixels = load_file(run / "images.safetensors")
    places = [round(step * 19 / 15) for step in range(16)]
    head, *rows = page.tables["Private and reconstructed images"]
    assert head[1:] == [f"person {place}" for place in places]
    rows = rows[:5]
    assert [row[0] for row in rows] == [
        "private image stays on the device",
        "unprotected decoder similarity 0.60",
        "unprotected latent similarity 0.60",
        "Crafter decoder similarity 0.30",
        "Crafter latent similarity 0.35",
    ]
    # Always the first reconstruction of the first image.
    order = ("victims", "audit.2", "audit.3", "audit.0", "audit.1")
    shown = [pixels[name] for name in order]
    assert len(page.images) == 5 * 20
    for row, tensor in enumerate(shown):
        for column, place in enumerate(places):
            np.testing.assert_array_equal(
                page.images[16 * row + column], tensor[place, 0].permute(1, 2, 0).numpy()
            )
    lines = [line for line in csv.DictReader((run / "rows.csv").open()) if line["candidate"] == "0"]
    first = {line["identity"]: line for line in lines[3 * 20 :]}
    expected = [
        f"{float(first[name]['similarity']):.2f} "
        + ("● ◆ ▲" if first[name]["verified_1"] == "1" else "○ ◇ △")
        for name in head[1:]
    ]
    assert rows[2][1:] == expected
    assert "16 of 20 people, chosen by position at even intervals, not by success" in page.text
    assert "always the first reconstruction, not the best." in page.text


def test_a_large_run_still_fits_a_phone(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "IMAGE_BYTES", 60_000)
    page = feature_page(tmp_path, [OPEN, CRAFTED], size=80)
    assert page.images[0].shape == (64, 64, 3)
    assert len(page.images) == 3
    assert "1 of 8 people, chosen by position" in page.text


def test_grey_images(tmp_path):
    rng = torch.Generator().manual_seed(0)
    grey = torch.zeros(16, 1, 8, 8, dtype=torch.uint8)
    page = feature_page(
        tmp_path, [OPEN], victims=grey, reconstructed=[torch.rand(8, 2, 1, 8, 8, generator=rng)]
    )
    assert {image.shape for image in page.images} == {(8, 8)}


def test_page_needs_nothing_from_outside_and_no_script(tmp_path):
    run = make_feature_run(
        tmp_path / "run", [OPEN, CRAFTED], names=["https://example.org/x.png", *map(str, range(7))]
    )
    assert_self_contained(build_report([run], tmp_path / "report.html"), tmp_path)


def test_hostile_names_are_text(tmp_path):
    evil = "<script>alert('x')</script>\" onerror=\"alert(1)"
    names = [evil, *(f"{{{{ {place} }}}}" for place in range(7))]
    case = "<img src=x onerror=alert(1)>"
    page = feature_page(
        tmp_path,
        [{**OPEN, "case": case}, {**CRAFTED, "case": case}],
        names=names,
        name="</pre><script>'; rm -rf $HOME",
    )
    assert_own_script(page)
    assert not [tag for tag, values in page.tags if "onerror" in values]
    assert evil in page.tables["Private and reconstructed images"][0]
    assert page.tables["Every attack on every protection"][1][0] == case
    assert "{{ 0 }}" in page.text
    assert "frostglass run pre-script-rm--rf-HOME.toml --threads" in page.text


def test_same_runs_same_bytes_and_settings_can_be_run_again(tmp_path):
    settings = {
        "name": "trial",
        "target": {"cut": "stage1", "attributes": ["all"]},
        "grid": {"defenses": [[], CRAFTER]},
    }
    run = make_feature_run(tmp_path / "run", [OPEN, CRAFTED], settings=settings)
    first, second = (
        build_report([run], tmp_path / "a" / "x.html"),
        build_report([run], tmp_path / "b" / "x.html"),
    )
    assert first.read_bytes() == second.read_bytes()
    assert first.with_suffix(".json").read_bytes() == second.with_suffix(".json").read_bytes()
    text = re.search(r"Settings of trial</summary>\s*<pre>(.*?)</pre>", first.read_text(), re.S)
    assert text is not None
    assert tomllib.loads(text.group(1).replace("&#34;", '"')) == settings


def test_redacted_report_keeps_no_face_and_no_name(tmp_path):
    names = [
        "Anna Schmidt",
        "Bo",
        "007",
        "crafter",
        "encode",
        *(f"Zoe_{place}" for place in range(24)),
    ]
    settings = {
        "name": "trial",
        "data": {"name": "folder", "root": "/data/Anna Schmidt/images", "per": {"007": 1}},
    }
    case = "as Anna Schmidt would"
    run = make_feature_run(
        tmp_path / "run",
        [{**OPEN, "case": case}, {**CRAFTED, "case": case}],
        people=29,
        names=names,
        settings=settings,
        name="for Zoe_2",
        failed=["disco: Zoe_3 broke it"],
    )
    out = build_report([run], tmp_path / "report.html", redact=True)
    page, text, document = Page(out), out.read_text(), out.with_suffix(".json").read_text()
    for name in names:
        if name not in ("Bo", "007", "crafter", "encode"):
            assert name.lower() not in (text + document).lower(), name
    assert not re.search(r"\b(Bo|007)\b", page.text + document)
    assert page.tables["Private and reconstructed images"][0][1:3] == ["person A", "person C"]
    assert page.tables["Every attack on every protection"][1][0] == "as person A would"
    loaded = json.loads(document)
    assert loaded["redacted"] is True
    assert "Redacted." in page.text
    assert loaded["runs"][0]["identities"][26:28] == ["person AA", "person AB"]
    assert loaded["runs"][0]["settings"]["data"] == {
        "name": "folder",
        "root": "/data/person A/images",
        "per": {"person C": 1},
    }
    assert "disco: person I broke it" in page.text
    # Methods and access keep their names even if a person is called like one.
    assert page.sentences[2].startswith("Crafter lowers this to")
    assert loaded["runs"][0]["audits"][0]["access"] == ["encode"]
    assert {image.shape for image in page.images} == {(3, 3, 3)}
    whole = build_report([run], tmp_path / "whole.html").read_text()
    images = set(re.findall(r"base64,[^\"]+", whole))
    assert len(images) == 3 * 29
    assert not [image for image in images if image in text]


def test_models_and_features_share_a_page(tmp_path):
    models = make_run(tmp_path / "models", [BROKEN, DEFENDED], name="models")
    features = make_feature_run(tmp_path / "features", [OPEN, CRAFTED], name="features")
    out = build_report([models, features], tmp_path / "both.html")
    page, document = Page(out), json.loads(out.with_suffix(".json").read_text())
    assert "What can be reconstructed from models and from features" in page.text
    assert [answer["surface"] for answer in document["answers"]] == ["model", "features"]
    assert len(document["runs"]) == 2
    assert page.sentences[0].startswith("19 of 20 people")
    assert page.sentences[3].startswith("Instead of each image, its feature leaves the device")
    assert "Training of each model" in page.tables
    assert "What each protection did" in page.tables
    alone = Page(build_report([models], tmp_path / "alone.html"))
    assert page.sentences[:3] == alone.sentences


def test_every_table_scrolls_in_its_own_box(tmp_path):
    models = make_run(tmp_path / "models", [BROKEN, DEFENDED])
    features = make_feature_run(tmp_path / "features", [OPEN, CRAFTED])
    tags = Page(build_report([models, features], tmp_path / "both.html")).tags
    before = [tags[place - 1] for place, (tag, _) in enumerate(tags) if tag == "table"]
    assert len(before) > 15
    assert all(tag == "div" and "box" in values["class"].split() for tag, values in before)


def test_methods_that_are_not_installed_keep_their_names_and_are_not_imported(tmp_path):
    run = make_feature_run(tmp_path / "run", [OPEN, CRAFTED])
    document = json.loads((run / "run.json").read_text())
    document["audits"][1]["defenses"][0]["name"] = "evil_module:Class"
    document["audits"][1]["attack"]["name"] = "my_attack"
    edit_run(run, document)
    (tmp_path / "evil_module.py").write_text("raise SystemExit")
    page = Page(build_report([run], tmp_path / "report.html"))
    assert page.tables["Every attack on every protection"][0][2] == "evil_module:Class"
    assert [row[0] for row in page.tables["Every attack on every protection"][1:3]] == [
        "decoder",
        "my_attack",
    ]
