"""Damaged run folders and places that cannot hold a report."""

import json
import math
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from feature_folders import CRAFTED, OPEN, make_feature_run
from frostglass.auditing.run_folder import NUMBERS
from frostglass.core.errors import DataError, FrostglassError, StoreError
from frostglass.report.build import build_report
from frostglass.report.labels import distinct
from run_folders import BROKEN, DEFENDED, FAILED, edit_run, make_run, reseal

ROWS = r"rows\.csv does not belong to its run\.json \(audit '{}'\): run again"


@dataclass
class Files:
    """The files of a run: what is changed here is written back."""

    rows: str
    document: dict[str, Any]
    images: dict[str, torch.Tensor]

    @property
    def audit(self) -> dict[str, Any]:
        """The second audit."""
        return self.document["audits"][1]

    def set_rows(self, old: str, new: str) -> None:
        self.rows = self.rows.replace(old, new)

    def set_score(self, name: str, value: float) -> None:
        self.audit["scores"][name]["value"] = value


def refused(run: Path, kind: type[FrostglassError], message: str) -> None:
    """Check that a report of the run fails with one line and leaves nothing behind."""
    out = run.parent / "report.html"
    with pytest.raises(FrostglassError, match=message) as caught:
        build_report([run], out)
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)
    assert not out.exists()
    assert not out.with_suffix(".json").exists()


def refused_change(run: Path, change: Callable[[Files], Any], message: str) -> None:
    images = load_file(run / "images.safetensors")
    files = Files(
        (run / "rows.csv").read_text(), json.loads((run / "run.json").read_text()), images
    )
    change(files)
    (run / "rows.csv").write_text(files.rows)
    save_file(files.images, run / "images.safetensors")
    edit_run(run, files.document)
    refused(run, StoreError if "format" in message else DataError, message)


@pytest.mark.parametrize("make", [make_run, make_feature_run])
@pytest.mark.parametrize("file", NUMBERS)
def test_missing_files_are_refused(tmp_path, make, file):
    run = make(tmp_path / "run", [BROKEN if make is make_run else OPEN])
    (run / file).unlink()
    message = rf"has no {file}, so it is not a finished run: give the folder"
    refused(run, StoreError, message.replace(".", r"\."))


@pytest.mark.parametrize(
    ("file", "content", "kind", "message"),
    [
        ("run.json", b"{", StoreError, r"run\.json is not JSON"),
        ("run.json", b"[]", StoreError, r"has format null, expected 5"),
        ("images.safetensors", b"cut", StoreError, r"is not a whole safetensors file"),
        ("rows.csv", b"\xff\xfe\x00", DataError, r"rows\.csv is not a table"),
    ],
)
def test_unreadable_files_are_refused(tmp_path, file, content, kind, message):
    run = make_run(tmp_path / "run", [BROKEN])
    path = run / file
    path.write_bytes(path.read_bytes()[:-100] if content == b"cut" else content)
    reseal(run)
    refused(run, kind, message)


def test_an_edited_verdict_is_refused(tmp_path):
    run = make_run(tmp_path / "run", [FAILED])
    document = json.loads((run / "run.json").read_text())
    assert document["vacuous"]
    assert document["audits"][0]["controls"]["vacuous"]
    document["vacuous"] = []
    document["audits"][0]["controls"]["vacuous"] = ""
    (run / "run.json").write_text(json.dumps(document))
    message = r"run\.json is missing or has another size than in the manifest: run the same command"
    refused(run, StoreError, message)


@pytest.mark.parametrize("file", NUMBERS)
def test_a_flipped_bit_of_a_run_is_refused(tmp_path, file):
    run = make_run(tmp_path / "run", [BROKEN])
    data = bytearray((run / file).read_bytes())
    data[-3] ^= 1
    (run / file).write_bytes(data)
    refused(run, StoreError, rf"{re.escape(file)} is corrupted or was edited, its hash differs")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"has no manifest\.json, so its files cannot be verified: run the same command"),
        ("{", r"manifest\.json is not JSON"),
        ("[]", r"manifest\.json lists no files"),
        ('{"files": {}}', r"do not both have images\.safetensors"),
        ('{"files": {"run.json": 1, "rows.csv": 1, "images.safetensors": 1}}', "lists no files"),
    ],
)
def test_a_run_without_its_hashes_is_refused(tmp_path, content, message):
    run = make_run(tmp_path / "run", [BROKEN])
    if content is None:
        (run / "manifest.json").unlink()
    else:
        (run / "manifest.json").write_text(content)
    refused(run, StoreError, message)


MODEL_CHANGES: list[tuple[Callable[[Files], Any], str]] = [
    (lambda f: f.document.update(format=99), r"has format 99, expected 5: run again"),
    (lambda f: f.document.update(audits=[]), r"is damaged \(audits: "),
    (lambda f: f.images.pop("audit.1"), r"has no audit\.1"),
    (
        lambda f: f.images.update({"audit.0": f.images["audit.0"].float()}),
        r"audit\.0 is torch\.float32",
    ),
    (
        lambda f: f.images.update(private=f.images["private"][1:].contiguous()),
        r"private holds \(19,\) images, expected \(20,\)",
    ),
    (lambda f: f.set_rows(f.rows, f.rows[:-20]), ROWS.format("calor")),
    (lambda f: f.set_rows("person 3", "person 300"), ROWS.format("undefended")),
    (
        lambda f: f.set_rows(f.rows, f.rows + "calor,person 0,0\n"),
        r"has 41 rows where its run\.json explains 40",
    ),
    (
        lambda f: f.set_score("top1_1", math.nan),
        r"is damaged \(audits\.1\.scores\.top1_1\.value: expected a valid number, got 'NaN'",
    ),
    (lambda f: f.set_score("top1_1", 0.05), ROWS.format("calor")),
    (lambda f: f.set_score("distance", 0.05), ROWS.format("calor")),
    (lambda f: f.audit["scores"].pop("top1_2"), r"has no top1_2 for audit 'calor'"),
    (lambda f: f.audit["prior_only"].pop("match_3"), r"has no match_3 for audit 'calor'"),
    (lambda f: f.set_score("verified_3", 0.05), ROWS.format("calor")),
    (
        lambda f: f.document["evaluators"][2].pop("verifier"),
        r"damaged \(evaluators\.2\.verifier: required, and not given\)",
    ),
    (lambda f: f.audit["evaluators"].pop(), r"audit 'calor' has other evaluators: run again"),
    (
        lambda f: f.audit["evaluators"][2].update(decides=False),
        r"has no controls for audit 'calor', so it cannot be believed",
    ),
    (
        lambda f: f.audit["controls"].update(control_lift={}),
        r"has no controls for audit 'calor'",
    ),
    (
        lambda f: f.audit["training"].update(seconds=math.inf),
        r"is damaged \(audits\.1\.training\.seconds: ",
    ),
    *(
        (lambda f, name=name: f.audit.pop(name), rf"damaged \(audits\.1\.{name}: required, and not")  # type: ignore[misc]
        for name in ("training", "case", "steps", "partial", "access")
    ),
    *(
        (lambda f, steps=steps: f.audit.update(steps=steps), r"is damaged \(audits\.1\.steps: ")  # type: ignore[misc]
        for steps in ("12", -1, math.inf)
    ),
    (lambda f: f.audit.update(partial=["nobody"]), ROWS.format("calor")),
    (lambda f: f.audit.update(case=3), r"is damaged \(audits\.1\.case: "),
]


@pytest.mark.parametrize("place", range(len(MODEL_CHANGES)))
def test_damaged_runs_of_models_are_refused_in_one_line(tmp_path, place):
    refused_change(make_run(tmp_path / "run", [BROKEN, DEFENDED]), *MODEL_CHANGES[place])


FEATURE_CHANGES: list[tuple[Callable[[Files], Any], str]] = [
    (lambda f: f.set_rows(f.rows, f.rows[:-20]), ROWS.format("crafter")),
    (
        lambda f: f.set_rows(f.rows, f.rows + "crafter,person 0,0\n"),
        r"has 33 rows where its run\.json explains 32",
    ),
    (lambda f: f.set_rows("person 3", "person 300"), ROWS.format("undefended")),
    (lambda f: f.set_rows(",0.3,", ",often,"), ROWS.format("undefended")),
    (lambda f: f.images.pop("audit.1"), r"has no audit\.1, which run\.json describes"),
    (
        lambda f: f.images.update(victims=f.images["victims"].float()),
        r"victims is torch\.float32 \(8, 2, 3, 8, 8\), expected grey or colour images as bytes",
    ),
    (
        lambda f: f.images.update(victims=f.images["victims"][1:].contiguous()),
        r"victims holds \(7, 2\) images, expected \(8, 2\): run again",
    ),
    (
        lambda f: f.images.update({"audit.1": f.images["audit.1"][:, :1].contiguous()}),
        r"audit 'crafter' has 1 reconstructions of each of 8 people, expected a multiple of 2 of 8",
    ),
    (
        lambda f: f.set_score("similarity", math.nan),
        r"is damaged \(audits\.1\.scores\.similarity\.value: expected a valid number, got 'NaN'",
    ),
    (lambda f: f.set_score("similarity", 0.301), ROWS.format("crafter")),
    (lambda f: f.set_score("ssim", 0.151), ROWS.format("crafter")),
    (lambda f: f.audit["scores"].pop("top1_2"), r"has no top1_2 for audit 'crafter'"),
    (lambda f: f.audit["prior_only"].pop("similarity"), r"has no similarity for audit 'crafter'"),
    (
        lambda f: f.audit["controls"].update(control_lift={}),
        r"has no controls for audit 'crafter', so it cannot be believed: run again",
    ),
    (
        lambda f: f.audit["utility"].pop("mean_mcc_low"),
        r"is damaged \(audits\.1\.utility\.mean_mcc_low: required, and not given\): run again",
    ),
    (
        lambda f: f.audit.update(images_per_person=20_000),
        r"audit 'crafter' is about other images: run again",
    ),
    (lambda f: f.audit["keys"].pop("exposure"), r"does not say what audit 'crafter' attacked"),
    (
        lambda f: f.audit["utility"].update(mean_mcc_high=1e308),
        r"is damaged \(audits\.1\.utility\.mean_mcc_high: expected at most 1.01, got 1e\+308\)",
    ),
    (
        lambda f: f.audit["prior_only"]["similarity"].update(high=7),
        r"similarity of audit 'crafter' is no share: run again",
    ),
    (
        lambda f: f.audit["controls"].update(deciding="ssim"),
        r"has no controls for audit 'crafter', so it cannot be believed: run again",
    ),
    (
        lambda f: f.audit["scores"].update(top1_x=f.audit["scores"]["top1_1"]),
        r"audit 'crafter' has other evaluators: run again",
    ),
    (
        lambda f: f.audit["prior_only"]["verified_3"].update(by_identity=None),
        ROWS.format("crafter"),
    ),
    (
        lambda f: f.audit["prior_only"]["verified_3"]["by_identity"].pop(),
        ROWS.format("crafter"),
    ),
    (
        lambda f: f.document["settings"].update(grid="x"),
        r"is damaged \(settings: grid: expected a table\): run again",
    ),
    (lambda f: f.document.update(embedder=None), r"is damaged \(embedder: "),
    (
        lambda f: f.audit.update(surface="model"),
        r"is damaged \(audits\.1\.surface: expected 'features'",
    ),
    (lambda f: f.document.update(audits=[]), r"is damaged \(audits: "),
]


@pytest.mark.parametrize("place", range(len(FEATURE_CHANGES)))
def test_damaged_runs_of_features_are_refused_in_one_line(tmp_path, place):
    refused_change(make_feature_run(tmp_path / "run", [OPEN, CRAFTED]), *FEATURE_CHANGES[place])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"epochs": [[]]}, {}),
        ({"epochs": []}, {"epochs": None}),
        ({"epochs": 1}, {"epochs": "1"}),
        ({"epochs": ["1", "2"]}, {"epochs": "1/2"}),
    ],
)
def test_settings_that_look_alike_are_numbered(one, other):
    def endless(*_):
        raise AssertionError("it searches for ever")

    before = signal.signal(signal.SIGALRM, endless)
    signal.alarm(30)
    try:
        assert distinct(["a", "a", "b"], [one, other, {}]) == ["a · 1", "a · 2", "b"]
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def test_numbers_as_text_are_damage(tmp_path):
    def as_text(files: Files) -> None:
        files.document["audits"][0]["seed"] = "0"

    message = r"is damaged \(audits\.0\.seed: expected a valid integer, got '0'\)"
    refused_change(make_run(tmp_path / "run", [BROKEN, DEFENDED]), as_text, message)


def test_runs_of_an_older_version_are_refused_in_one_line(tmp_path):
    def older(files: Files) -> None:
        """Make a run of before evaluators verified."""
        files.document["format"] = 4
        for facts in (files.document, *files.document["audits"]):
            for evaluator in facts["evaluators"]:
                del evaluator["verifier"]

    message = r"has format 4, expected 5: run again with this version of frostglass"
    refused_change(make_run(tmp_path / "run", [BROKEN, DEFENDED]), older, message)


def test_places_that_cannot_hold_a_report_are_refused(tmp_path):
    run = make_run(tmp_path / "run", [BROKEN])
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    with pytest.raises(
        StoreError, match=r"missing is not a folder: give the folder of a finished run"
    ):
        build_report([tmp_path / "missing"], tmp_path / "report.html")
    with pytest.raises(DataError, match="at least one run folder"):
        build_report([], tmp_path / "report.html")
    for out in (tmp_path / "report.json", tmp_path):
        with pytest.raises(StoreError, match="cannot hold a page: give the name of a file"):
            build_report([run], out)
    for name in ("run.html", "manifest.html", "rows.csv", "../run/run.htm"):
        with pytest.raises(StoreError, match="would overwrite a run's own files"):
            build_report([run], run / name)
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"cannot write .*report\.html"):
        build_report([run], tmp_path / "file" / "report.html")
    assert {path.name: path.read_bytes() for path in run.iterdir()} == before
