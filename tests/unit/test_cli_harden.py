"""`frostglass harden`: a whole hardening in a tiny world, and everything it refuses."""

import csv
import json
import sys
from dataclasses import replace
from xml.etree import ElementTree

import pytest
import torch

from commands import FACES, SETTINGS, changed, enter, error_of, frostglass, written
from frostglass.auditing import pipeline
from frostglass.deploy.client import Client
from frostglass.deploy.server import Server
from frostglass.hardening.goal import FeatureGoal, ModelGoal
from frostglass.models.checkpoint import load_target
from frostglass.training.build import rebuild_network

HALVES = ((Client, "client"), (Server, "server"))
# Too small to believe: the verdict of the controls is set aside.
TINY = f"""
name = "tiny"
{FACES}{SETTINGS}
[judging]
min_accuracy = 0.0
min_true_accepts = 0.0
"""
ATTACKS = """
[[case]]
case = "GMI, margin"
attack = { name = "gmi", variant = "margin", steps = 2, candidates = 2, keep = 2, batch = 4 }
"""
NETWORKS = SETTINGS.partition("[prior]")[0]
CUT = '[target]\ncut = "stage1"\nattributes = ["all"]'
SPLIT = f"""
name = "split"
{FACES.replace("public_images = 1", "public_images = 3")}{NETWORKS.replace("[target]", CUT)}
[embedder]
epochs = 1
options = {{ width = 4 }}

[attack]
name = "decoder"
epochs = 1
width = 4

[judging]
images = 1
min_accuracy = 0.0
min_true_accepts = 0.0
"""
OPTIONS = (
    "--defenses",
    "bido",
    "--budget",
    "2 trials",
    "--seeds",
    "1",
    "--attacks",
    "attacks.toml",
)


@pytest.fixture
def world(tmp_path, monkeypatch):
    enter(tmp_path, monkeypatch)
    (tmp_path / "tiny.toml").write_text(TINY)
    (tmp_path / "split.toml").write_text(SPLIT)
    (tmp_path / "attacks.toml").write_text(ATTACKS)
    return tmp_path


def believe(monkeypatch):
    real = pipeline.verdict
    monkeypatch.setattr(
        pipeline, "verdict", lambda *args, **more: replace(real(*args, **more), vacuous="")
    )


def harden(*options, accuracy=0.01):
    return frostglass("harden", "tiny.toml", "--accuracy", accuracy, *options)


def protect(*options, utility=0.01):
    return frostglass("harden", "split.toml", "--protect", "--utility", utility, *options)


@pytest.mark.slow
def test_a_whole_hardening_and_its_repetition(world, monkeypatch):
    believe(monkeypatch)
    result = harden(*OPTIONS)
    assert (result.code, result.errors) == (0, [])
    out = world / "runs" / "tiny-harden"
    assert f"model: {out.relative_to(world) / 'model'}\n" in result.out
    assert sum(line.startswith("trial ") for line in result.progress) == 4
    assert "recommended: bido (measure " in result.out
    check_files(out)
    before = written(world / ".frostglass"), (out / "result.json").read_bytes()
    again = harden(*OPTIONS, "--json")
    assert again.code == 0
    assert (written(world / ".frostglass"), (out / "result.json").read_bytes()) == before
    assert json.loads(again.out) == json.loads(before[1])
    assert error_of(harden(*OPTIONS, accuracy=0.02)) == (
        "the study in runs/tiny-harden was begun with other settings (accuracy): give these again, "
        "or another --out"
    )


def check_files(out):
    facts = json.loads((out / "result.json").read_text())
    assert set(facts["final"]) == {"second half", "everybody"}
    for models in facts["final"].values():
        assert [model["title"] for model in models] == ["undefended", "bido"]
        assert [model["attack"] for model in models] == ["GMI, margin"] * 2
    target = load_target(out / "model", rebuild_network)
    assert len(target.classes) == 4
    assert target.module(torch.zeros(2, 3, 16, 16)).shape == (2, 4)
    assert target.info["accuracy"]["test"] == facts["recommended"]["accuracy"]
    card = (out / "model" / "README.md").read_text()
    for words in ("# tiny, hardened with bido", "## What it does not protect against"):
        assert words in card
    assert f"{facts['recommended']['accuracy']:.1%} of held-out images" in card
    rows = list(csv.DictReader((out / "trials.csv").open()))
    assert [row["candidate"] for row in rows] == ["bido", "bido"]
    table = (out / "table.md").read_text()
    assert "| tiny, second half: bido, GMI, margin |" in table
    assert "| tiny, everybody: undefended, GMI, margin |" in table
    for name in ("frontier-second-half.svg", "frontier-everybody.svg"):
        ElementTree.fromstring((out / name).read_text())
    people = {
        name: json.loads((out / "final" / name / "run.json").read_text())["identities"]
        for name in ("second-half", "everybody")
    }
    assert people == {
        "second-half": ["person 2", "person 3"],
        "everybody": [f"person {number}" for number in range(4)],
    }
    assert "tiny, second half" in (out / "report.html").read_text()


@pytest.mark.slow
def test_a_whole_protection_and_its_repetition(world, monkeypatch):
    believe(monkeypatch)
    monkeypatch.setattr(FeatureGoal, "unproven", ModelGoal.unproven)
    options = ("--defenses", "adv_learn", "--budget", "1 trial", "--seeds", "2", "--measure", "auc")
    result = protect(*options)
    assert (result.code, result.errors) == (0, [])
    assert "recommended: adv_learn (pixel " in result.out
    out = world / "runs" / "split-harden"
    facts = json.loads((out / "result.json").read_text())
    assert (facts["utility"], facts["measure"]) == (0.01, "auc")
    for models in facts["final"].values():
        assert [model["title"] for model in models] == ["undefended", "adv_learn"]
        assert set(models[0]["by_attack"]) == {"decoder", "hybrid"}
        assert {"utility", "verified", "similarity"} <= set(models[0])
    client, server = (kind.load(out / "model" / name) for kind, name in HALVES)
    features = client.protect(torch.rand(2, 3, 16, 16))
    assert server.answer(features).shape == (2, len(server.classes))
    assert "# split, protected with adv_learn" in (out / "model" / "README.md").read_text()
    (row,) = csv.DictReader((out / "trials.csv").open())
    assert {"utility", "leak", "similarity"} <= set(row)
    table = (out / "table.md").read_text()
    assert "| split, everybody: undefended, hybrid |" in table
    assert "| 0, 1 |" in table
    assert sorted(each.name for each in (out / "final").iterdir()) == [
        f"{people}-seed-{seed}" for people in ("everybody", "second-half") for seed in (0, 1)
    ]
    for name in ("frontier-second-half.svg", "frontier-everybody.svg"):
        ElementTree.fromstring((out / name).read_text())
    assert json.loads(protect(*options, "--json").out) == facts
    assert error_of(protect(*options, utility=0.02)).startswith(
        "the study in runs/split-harden was begun with other settings (utility): give these again"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--accuracy", 0.9, "--protect"], "--accuracy is that of whole models: give the least"),
        (["--accuracy", 0.9, "--utility", 0.8], "--utility is about protected features: add"),
        (["--accuracy", 0.9, "--measure", "auc"], "--measure is about protected features: add"),
        (["--protect"], "--utility: required with --protect, the least MCC"),
        ([], "--accuracy: required, the least that you accept"),
        (["--protect", "--utility", 1.2], "utility: expected a mean MCC between 0 and 1, got 1.2"),
        (["--protect", "--utility", 0.8, "--measure", "f1"], "measure: expected mcc or auc"),
        (["--protect", "--utility", 0.8], "target.cut: required to tune protections of features"),
    ],
)
def test_options_that_do_not_go_together(world, options, message):
    assert error_of(frostglass("harden", "tiny.toml", *options)).startswith(message)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--defenses", "calor"], "defenses: calor defends whole models and cannot protect"),
        (["--defenses", "craftr"], "defenses: no defense named 'craftr'; did you mean 'crafter'?"),
        (["--defenses", "crafter"], "prior: crafter needs one, got none: set [prior]"),
        (changed("grid.seed=[0, 1]"), "grid: hardening takes a config of one experiment"),
    ],
)
def test_what_cannot_be_protected_is_refused_before_anything_is_computed(world, options, message):
    error = error_of(protect(*options))
    assert error.startswith(message), error
    assert not (world / ".frostglass").exists()


def test_a_utility_above_that_of_unprotected_features(world):
    error = error_of(protect("--defenses", "adv_learn", utility=0.999), worked=True)
    assert error.startswith("utility: the undefended model reaches ")
    assert "asked for 0.999: accept less" in error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--defenses", "calr"], "defenses: no defense named 'calr'; did you mean 'calor'?"),
        (["--defenses", "dpsgd"], "defenses: dpsgd has no strength to tune on this model and data"),
        (["--defenses", ","], "--defenses: expected names with commas, such as calor,bido"),
        (["--budget", "soon"], "budget: expected a time or a number of trials, such as 2h"),
        (["--attacks", "tiny.toml"], "--attacks tiny.toml: expected [[case]] tables and nothing"),
        (["--attacks", "none.toml"], "cannot read none.toml"),
        (changed("grid.seed=[0, 1]"), "grid: hardening takes a config of one experiment"),
        (changed("target.weights='a.safetensors'"), "target.weights: hardening trains models"),
        (changed("evaluators.1.weights='a.pt'"), "evaluators[1].weights: hardening needs"),
        (changed('defenses=[{name="calor", rnk=3}]'), "defenses[0].rnk: no such parameter"),
        (changed('defenses=["calor"]'), "defenses[0]: expected a table with a name"),
        (changed('defenses="calor"'), "defenses: expected a list of tables"),
        (changed('defenses=[{name="mid"}, {name="mid"}]'), "defenses: mid is named twice"),
        (changed("judging.positive_control=false"), "judging.positive_control: hardening needs it"),
        (changed("data.identities=3"), "data: strengths are tuned on one half of the people"),
        (changed("target.epochs=2"), "target: no epoch of 2 is at full defense strength (calor)"),
        (changed("attack.loss='best'"), "attack.loss: expected"),
        (["--out", "."], "--out . contains files of something else, such as attacks.toml"),
    ],
)
def test_what_is_refused_before_anything_is_computed(world, options, message):
    defenses = [] if "--defenses" in options else ["--defenses", "calor"]
    epochs = [] if "target.epochs=2" in options else changed("target.epochs=4")
    error = error_of(harden(*defenses, *epochs, *options))
    assert error.startswith(message), error
    assert not (world / ".frostglass").exists()
    assert not (world / "runs").exists()


@pytest.mark.parametrize("accuracy", [0, 1, 1.5, -0.2, "nan"])
def test_an_accuracy_that_is_no_share(world, accuracy):
    error = error_of(harden(f"--accuracy={accuracy}"))
    assert error.startswith("accuracy: expected a share between 0 and 1, got ")


def test_features_are_not_hardened(world):
    settings = changed(
        'target.cut="stage1"', 'target.attributes=["all"]', "attack={name='decoder'}"
    )
    assert error_of(harden(*settings)).startswith("target.cut: hardening tunes defenses of whole")


def test_an_accuracy_above_that_of_the_undefended_model(world):
    error = error_of(harden(*OPTIONS, accuracy=0.999), worked=True)
    assert error.startswith("accuracy: the undefended model reaches ")
    assert "asked for 99.9%" in error


def test_an_attack_that_does_not_work_tunes_nothing(world):
    error = error_of(harden(*OPTIONS), 1, worked=True)
    assert error.startswith("nothing can be tuned: ")
    assert not (world / "runs").exists()


def test_without_optuna(world, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    error = error_of(harden())
    assert error.startswith("hardening needs optuna, which cannot be imported")
    assert error.endswith("pip install 'frostglass[harden]'")
