"""Whether a report's numbers are those of the store that made them, and where people are shown."""

import csv
import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from commands import error_of, frostglass
from frostglass.auditing import run_folder
from frostglass.auditing.run_folder import NUMBERS
from frostglass.auditing.steps import ATTACK, SCORES
from frostglass.report.build import build_report
from frostglass.report.load import read_run
from frostglass.report.origin import origin_of
from frostglass.store.step import Step
from frostglass.store.store import Store
from pages import Page
from run_folders import BROKEN, FAILED, edit_run, make_run, reseal


def kept(store, step, product, name):
    """Store a product as a step of the audit would, and return it as it is read."""
    own = Step(step.name, step.version, lambda _, **__: product, step.save, step.load)
    return store.step(own, name, seed=0)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A run whose reconstructions and scores are in a store, as those of a real run are."""
    folder = tmp_path_factory.mktemp("world")
    store, write = Store(folder / "store"), run_folder.write_run

    def in_store(place, audit):
        trial, control = audit.trial, audit.control
        rows = {"rows": trial.rows, "baseline_rows": trial.baseline_rows}
        rows |= {"control": control.rows, "control_baseline": control.baseline_rows}
        own = {name: kept(store, SCORES, each, [name, place]) for name, each in rows.items()}
        attack = kept(store, ATTACK, trial.reconstructions, ["attack", place])
        control = replace(
            control, rows=own.pop("control"), baseline_rows=own.pop("control_baseline")
        )
        return replace(audit, trial=replace(trial, reconstructions=attack, **own), control=control)

    def write_stored(result, folder):
        audits = tuple(in_store(*each) for each in enumerate(result.audits))
        return write(replace(result, audits=audits, store=str(store.root)), folder)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("run_folders.write_run", write_stored)
        make_run(folder / "run", [BROKEN, FAILED])
    shutil.copytree(folder, folder.with_name("untouched"))
    return folder


@pytest.fixture
def stored(world):
    """The run and its store where they were made, whatever tests did to them."""
    shutil.rmtree(world)
    shutil.copytree(world.with_name("untouched"), world)
    return SimpleNamespace(run=world / "run", store=world / "store")


def origin(stored, store=None, **more):
    page = stored.run.parent
    return origin_of(read_run(stored.run), stored.run, store, page=page, **more)


def edit(stored, change):
    document = json.loads((stored.run / "run.json").read_text())
    change(document["audits"][0])
    edit_run(stored.run, document)


def test_an_untouched_run_is_verified_and_the_page_says_where_people_are_shown(stored):
    page = Page(build_report([stored.run], stored.run / "report.html"))
    assert "Verified against the store ../store: it has a record of exactly" in page.text
    assert "reconstructions are in images.safetensors and in the steps split, rel" in page.text
    document = (stored.run / "report.json").read_text()
    assert str(stored.store) not in page.raw + document, "a page may be shown to others"
    assert "NOT VERIFIED" not in page.text
    (noted,) = json.loads(document)["origins"]
    assert (noted["run"], noted["status"]) == ("trial", "verified")


def test_an_edited_verdict_with_new_hashes_is_not_verified(stored, tmp_path):
    edit(stored, lambda audit: audit["controls"].update(warnings=[], margin=0.0))
    assert origin(stored).status == "unrecorded"
    page = Page(build_report([stored.run], tmp_path / "report.html"))
    assert "NOT VERIFIED trial : The store" in page.text
    assert "has no record of these files, so verdicts and settings could not be" in page.text


def test_edited_scores_with_new_hashes_are_named(stored, tmp_path):
    def hide(audit):
        for score in (
            audit["prior_only"]["verified_3"],
            audit["controls"]["control_lift"]["top1_1"],
        ):
            score.update(value=0.9, low=0.8, high=0.95)

    edit(stored, hide)
    found = origin(stored)
    assert found.status == "differs"
    assert "the prior-only scores of undefended; control_lift of undefended" in found.text
    done = frostglass("report", stored.run, "--out", tmp_path / "report.html")
    assert done.code == 1
    assert "This run differs from the store" in done.err
    assert "NOT VERIFIED" in (tmp_path / "report.html").read_text()


def test_edited_rows_and_images_with_new_hashes_are_named(stored):
    rows = list(csv.reader((stored.run / "rows.csv").open(newline="")))
    column = rows[0].index("target_confidence")
    rows[1][column], rows[2][column] = "0.6", "0.4"  # the mean stays
    with (stored.run / "rows.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    images = load_file(stored.run / "images.safetensors")
    images["audit.1"] = images["audit.1"].clone()
    images["audit.1"][0, 0, 0, 0, 0] ^= 1
    save_file(images, stored.run / "images.safetensors")
    reseal(stored.run)
    found = origin(stored)
    assert found.status == "differs"
    assert "rows.csv of undefended; the reconstructions of undefended" in found.text


def test_a_damaged_step_of_the_store_is_named(stored):
    key = json.loads((stored.run / "run.json").read_text())["audits"][0]["keys"]["scores"]
    file = stored.store / "scores" / key / "rows.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    found = origin(stored)
    assert found.status == "differs"
    assert "rows.safetensors is corrupted" in found.text


def test_a_store_that_was_moved_or_purged(stored, tmp_path):
    shutil.move(stored.store, tmp_path / "moved")
    found = origin(stored)
    assert found.status == "not at hand"
    assert "The store store is not at hand, so the numbers were not verified" in found.text
    assert origin(stored, tmp_path / "moved").status == "verified"
    shutil.rmtree(tmp_path / "moved" / "attack")
    found = origin(stored, tmp_path / "moved")
    assert found.status == "verified"
    assert "Not in the store any more, and not compared: attack " in found.text


@pytest.mark.parametrize("store", ["", "no store at all", "run", "/dev/null", "a\x00b"])
def test_a_run_that_names_no_store(stored, tmp_path, monkeypatch, store):
    monkeypatch.chdir(tmp_path)
    document = json.loads((stored.run / "run.json").read_text())
    edit_run(stored.run, document | {"store": store})
    assert origin(stored).status == "not at hand"


@pytest.mark.parametrize("place", ["nowhere", "empty"])
def test_a_store_that_is_named_must_be_one(stored, tmp_path, monkeypatch, place):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    line = error_of(frostglass("report", stored.run, "--store", place))
    assert line == f"there is no store at {place}: give --store the folder of one"
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize("key", ["../../run", "x", "", None])
def test_keys_that_are_none_are_not_followed(stored, key):
    edit(stored, lambda audit: audit["keys"].update(scores=key))
    assert origin(stored).status == "unrecorded"


def test_a_redacted_report_shows_no_place(stored, tmp_path):
    build_report([stored.run], tmp_path / "out" / "report.html", redact=True)
    for name in ("report.html", "report.json"):
        text = (tmp_path / "out" / name).read_text()
        assert str(tmp_path) not in text
        assert "Verified against the store that made it" in text


def test_a_redacted_report_names_no_audit_that_differs(stored):
    edit(stored, lambda audit: audit["prior_only"]["verified_3"].update(value=0.9))
    found = origin(stored, redact=True)
    assert found.text == (
        "This run differs from the store that made it: the prior-only scores of audit 1. Run it "
        "again."
    )


def test_a_run_without_a_store_says_so(tmp_path):
    run = make_run(tmp_path / "run", [BROKEN])
    assert "does not say which store made it" in origin(SimpleNamespace(run=run)).text
    assert torch.is_tensor(load_file(run / NUMBERS[2])["private"])
