"""Budgets of a run: what is left when the time is over, and attacks that may ask only so much."""

import json
import tomllib
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from commands import TOY as TOY_FILE
from commands import error_of, frostglass
from frostglass.attacks.model.gmi import Gmi
from frostglass.attacks.model.mirror import Mirror
from frostglass.auditing import run as runs
from frostglass.auditing.experiment import experiments
from frostglass.auditing.pipeline import audit
from frostglass.auditing.run import run_all
from frostglass.core.duration import in_words, parse_duration
from frostglass.core.errors import BudgetReached, ConfigError
from frostglass.plan.problems import problems
from frostglass.store.store import Store
from steps import Product, step

TOY = tomllib.loads(TOY_FILE)
GRID = TOY | {"grid": {"defenses": [[], [{"name": "calor", "rank": 2, "switch": 0.5}]]}}
BUDGET = "time budget of 30 min reached"


class Clock:
    """A clock that jumps by an hour once a number of steps of a kind have been reported."""

    def __init__(self, monkeypatch, step="", kind="", count=0):
        self.now, self.step, self.kind, self.left = 0.0, step, kind, count
        monkeypatch.setattr(runs, "time", SimpleNamespace(monotonic=lambda: self.now))

    def __call__(self, event):
        if (event.step, event.kind) == (self.step, self.kind):
            self.left -= 1
            self.now += 3600 * (self.left == 0)


@pytest.mark.parametrize(
    ("text", "seconds", "words"),
    [("30m", 1800, "30 min"), ("1h30m", 5400, "1 h 30 min"), ("0.5 s", 0.5, "0.5 s")],
)
def test_times_are_read_and_written(text, seconds, words):
    assert parse_duration(text) == seconds
    assert in_words(seconds) == words


@pytest.mark.parametrize("text", ["30", "m", "0m", "-1h", ""])
def test_what_is_no_time_is_refused(text, tmp_path):
    with pytest.raises(ConfigError, match=r"time budget: expected a time, such as 2h"):
        run_all(TOY, Store(tmp_path), time_budget=text)


def make(config, *, seed, work, device, **_):
    """A step of three checkpoints."""
    for number in range(3):
        if not work.load(f"part-{number}"):
            work.save(f"part-{number}", {}, {})
        work.progress(number + 1, 3)
    return Product(torch.zeros(1))


def quick_audit(experiment, store):
    """Stands for an audit: a step that all share, and one for each model."""
    store.step(step(name="split"), None, seed=0)
    store.step(step(make, name="attack"), [d.name for d in experiment.defenses], seed=0)
    made = SimpleNamespace(key="made")
    controls = SimpleNamespace(warnings=())
    return SimpleNamespace(controls=controls, reconstructions=made, rows=made)


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(runs, "audit", quick_audit)
    monkeypatch.setattr(Store, "mixed_conditions", lambda _: "")


def test_audits_that_are_finished_are_kept_and_a_later_call_goes_on(quick, tmp_path, monkeypatch):
    """The time is over in the middle of the second attack; the next call loses nothing of it."""
    store = Store(tmp_path, Clock(monkeypatch, "attack", "progress", 5))
    done = run_all(GRID, store, time_budget="30m")
    assert done.labels == ("undefended",)
    assert done.not_run == (f"calor: {BUDGET}",)
    assert done.failed == ()
    (begun,) = (tmp_path / "attack").glob("*.partial")
    assert [file.stem for file in sorted((begun / "work").iterdir())] == ["part-0", "part-1"]
    heard = []
    later = run_all(GRID, Store(tmp_path, heard.append))
    assert later.labels == ("undefended", "calor")
    assert later.not_run == ()
    assert [(e.kind, e.key) for e in heard if e.kind in ("start", "resume")] == [
        ("resume", begun.stem)
    ]


def test_a_step_that_has_done_its_work_is_finished(quick, tmp_path, monkeypatch):
    done = run_all(
        GRID, Store(tmp_path, Clock(monkeypatch, "attack", "progress", 3)), time_budget="30m"
    )
    assert done.labels == ("undefended",)


def test_a_finished_audit_is_reported_however_little_time_there_is(quick, tmp_path, monkeypatch):
    """An earlier run finished the second of two; the time is over before the first begins."""
    (_, _), (_, second) = experiments(GRID)
    quick_audit(second, Store(tmp_path))
    done = run_all(
        GRID, Store(tmp_path, Clock(monkeypatch, "split", "cached", 1)), time_budget="30m"
    )
    assert done.labels == ("calor",)
    assert done.not_run == (f"undefended: {BUDGET}",)


def test_a_run_without_a_single_audit_says_so(quick, tmp_path, monkeypatch):
    store = Store(tmp_path, Clock(monkeypatch, "split", "done", 1))
    with pytest.raises(BudgetReached, match=rf"^not run: undefended: {BUDGET}; calor: .*No audit"):
        run_all(GRID, store, time_budget="30m")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A store in which the audit of the toy config is finished."""
    root = tmp_path_factory.mktemp("store")
    audit(experiments(TOY)[0][1], Store(root))
    return root


def test_the_command_reports_what_was_not_run(finished, tmp_path, monkeypatch):
    """On the terminal, in the run folder, in the report and by the exit code."""
    config, out = tmp_path / "toy.toml", tmp_path / "run"
    config.write_text(TOY_FILE + "[grid]\nattack.steps = [3, 4]\n")
    clock = Clock(monkeypatch, "split", "cached", 1)
    monkeypatch.setattr("frostglass.cli.run.progress", lambda: nullcontext(clock))
    monkeypatch.setattr(runs.Run, "vacuous", [])  # a toy proves nothing, which has its own code
    result = frostglass("run", config, "--store", finished, "--out", out, "--time-budget", "30m")
    missing = f"attack.steps=4: {BUDGET}"
    assert result.code == 3
    assert result.errors[-1].startswith(f"frostglass: not run: {missing}. Run the same command")
    assert f"\nnot run: {missing}\n" in result.out
    facts = json.loads((out / "run.json").read_text())
    assert facts["not_run"] == [missing]
    assert [audit["label"] for audit in facts["audits"]] == ["attack.steps=3"]
    page = (out / "report.html").read_text()
    assert f"This audit was not run and is missing here: {missing}" in page
    assert "Audits that were not run" in page


def test_a_bad_time_is_refused_before_anything_is_computed(tmp_path):
    config = tmp_path / "toy.toml"
    config.write_text(TOY_FILE)
    line = error_of(frostglass("run", config, "--store", tmp_path / "s", "--time-budget", "soon"))
    assert line == "time budget: expected a time, such as 2h, 90m, 1h30m or 45s; got 'soon'"
    assert not (tmp_path / "s").exists()


# Queries


def test_a_query_budget_scales_steps_and_pool_of_attack_and_control(finished):
    attack = {"name": "gmi", "steps": 30, "candidates": 2, "keep": 2, "pool": 40}
    found = audit(experiments(TOY | {"attack": attack, "query_budget": 50})[0][1], Store(finished))
    limited = found.experiment.attack
    assert replace(limited, steps=30, pool=40) == Gmi(steps=30, candidates=2, keep=2, pool=40)
    assert 15 < limited.steps < 24
    assert 20 < limited.pool < 32
    assert found.reconstructions.queries <= 50 * 4
    assert found.control.reconstructions.queries <= 50 * 4


def test_more_than_an_attack_asks_changes_nothing():
    assert Mirror().within(10**9, 1) == Mirror()


def test_a_budget_that_is_too_small_is_found_by_check():
    chosen = experiments(TOY | {"query_budget": 1})
    (problem,) = problems(chosen)
    assert problem == (
        "attack: query_budget: gmi shows at least 2 images per person of 4 to the target, got a "
        "budget of 1: raise it, or lower attack.candidates"
    )


@pytest.mark.parametrize("value", [-1, "many"])
def test_what_is_no_query_budget_is_refused(value):
    with pytest.raises(ConfigError, match="query_budget: expected"):
        experiments(TOY | {"query_budget": value})
