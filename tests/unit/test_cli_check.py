"""The command `check`, and configs that `run` refuses before any work."""

import json
import tomllib
from pathlib import Path

import pytest
import torch

import frostglass as package
from commands import changed, enter, error_of, frostglass
from frostglass.auditing.config_file import demo_config


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    return enter(tmp_path, monkeypatch)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_check_of_a_good_config_writes_nothing(here):
    done = frostglass("check", "toy.toml")
    assert (done.code, done.err) == (0, "")
    assert "no problems; about" in done.out
    costs = json.loads(frostglass("check", "toy.toml", "--json").out)
    assert sorted(row["step"] for row in costs["steps"]) == [
        "attack", "controls", "prior", "prior_only", "scores", "scores", "split",
        "target", "target", "target", "verifier", "verifier",
    ]  # fmt: skip
    assert not any(row["done"] for row in costs["steps"])
    assert costs["seconds"] == pytest.approx(sum(row["seconds"] for row in costs["steps"]))
    assert names(here) == ["toy.toml"]


def test_check_lists_the_steps_of_every_experiment_of_a_grid():
    done = frostglass("check", "toy.toml", *changed("grid={seed=[0,1]}"), "--json")
    rows = json.loads(done.out)["steps"]
    assert len(rows) == 2 * 11 + 1  # the controls are one row
    assert len({row["label"] for row in rows[:-1]}) == 2


def test_checking_leaves_the_random_state():
    before = torch.get_rng_state()
    frostglass("check", "toy.toml")
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("command", ["check", "run"])
def test_all_problems_of_a_config_at_once(here, command):
    settings = changed("attack.stepz=1", "target.epochs=0", "sede=1")
    done = frostglass(command, "toy.toml", *settings)
    assert (done.code, done.out) == (2, "")
    first, *problems = done.err.splitlines()
    assert first == "frostglass: 3 problems"
    assert len(problems) == 3
    for problem in (
        "attack.stepz: no such parameter; did you mean 'steps'?",
        "target.epochs: ",
        "sede: no such section; did you mean 'seed'?",
    ):
        assert f"\n  {problem}" in done.err
    assert names(here) == ["toy.toml"]


@pytest.mark.parametrize("command", ["check", "run"])
def test_all_networks_are_tried_before_any_work(here, command):
    settings = changed("target.model=cnnn", "evaluators.1.model=nowhere:make", "data.size=24")
    done = frostglass(command, "toy.toml", *settings)
    assert (done.code, done.out) == (2, "")
    first, *problems = done.err.splitlines()
    assert first == "frostglass: 3 problems"
    for start, message in (
        ("  target: ", "no model named 'cnnn': did you mean 'cnn'? known: "),
        ("  evaluators[1]: ", "cannot import 'nowhere' for 'nowhere:make': No module named"),
        ("  prior: ", "square images of 16, 32, 64 or 128 pixels, got 24×24"),
    ):
        assert any(line.startswith(start) and message in line for line in problems), done.err
    assert names(here) == ["toy.toml"]


def test_a_problem_of_a_whole_grid_is_reported_once():
    settings = changed("grid={seed=[0,1,2]}", "target.model=cnnn")
    line = error_of(frostglass("check", "toy.toml", *settings))
    assert line.startswith("target: no model named 'cnnn'")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read c.toml: No such file or directory; give the path of a TOML"),
        (b"a = [", "(at end of document); correct it there, as UTF-8 text"),
        (b"\xff\xfe\x00", "c.toml is not valid TOML"),
    ],
)
def test_a_config_that_cannot_be_read(here, content, message):
    if content is not None:
        (here / "c.toml").write_bytes(content)
    for command in ("check", "run"):
        assert message in error_of(frostglass(command, "c.toml"))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("attack.steps", "or a TOML file of settings; got 'attack.steps'"),
        ("none.toml", "cannot read none.toml"),
        ("evaluators.7.epochs=1", "evaluators.7.epochs: expected a list index below 2, got '7'"),
        ("attack.keep=9", "attack.keep (9) must not exceed candidates (2)"),
        ("split.test=0.95", "split.test (0.95), validation (0.1) and evaluators (0.0) must sum"),
        ("name=../elsewhere", "name: expected letters, digits"),
        ('metrics=[{name="verification"}]', "accuracy"),  # without it no control can be judged
    ],
)
def test_bad_settings(setting, message):
    assert message in error_of(frostglass("run", "toy.toml", "--set", setting))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ["attack={name='lomma',regulariser='off'}"],
            "attack: lomma.students is true, but the prior has no students",
        ),
        (
            ["prior={name='conditional',width=4}"],
            "attack: gmi.critic_weight is 1, but the prior has no critic",
        ),
        (
            ["attack={name='brepmi'}", "prior={name='kplus1',width=4}"],
            "attack: brepmi has access to labels only, and the kplus1 prior is fitted with scores",
        ),
        (
            ["prior={name='conditional',width=4,top=9999}", "attack={name='plgmi'}"],
            "conditional.top (9999) is more than the",
        ),
        (["prior={name='pretrained'}"], "faces32 makes images of 32×32 pixels, the data has 16×16"),
    ],
)
def test_an_attack_that_does_not_match_its_prior_is_refused_before_any_work(settings, message):
    for command in ("check", "run"):
        assert message in error_of(frostglass(command, "toy.toml", *changed(*settings)))


def test_the_demo_is_a_config_like_any_other():
    shipped = Path(package.__file__).parent / "auditing" / "demo.toml"
    assert demo_config() == tomllib.loads(shipped.read_text(encoding="utf-8"))
