"""The commands `run` and `report` at toy scale: what is printed, written, resumed and refused."""

import errno
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from commands import TOY, changed, enter, error_of, frostglass, written
from frostglass.auditing import steps
from frostglass.cli import run as cli_run
from killing import changing, run, tree

THIRD_EVALUATOR = """
[[evaluators]]
model = "cnn"
epochs = 1
options = { width = 4 }
"""
STOPPED = "stopped; run the same command again to resume"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    return enter(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """A finished run of the toy config; tests write into it only through the same command."""
    folder = tmp_path_factory.mktemp("toy")
    (folder / "toy.toml").write_text(TOY)
    config, store, run = folder / "toy.toml", folder / "store", folder / "run"
    stored = ("run", config, "--store", store)
    result = frostglass(*stored, "--out", run)
    return SimpleNamespace(config=config, store=store, run=run, stored=stored, result=result)


def test_a_run_that_proves_nothing_is_written_and_fails(toy):
    assert toy.result.code == 1
    (line,) = toy.result.errors
    assert line.startswith("frostglass: VACUOUS: audit: ")
    assert "toy: 4 people attacked" in toy.result.out
    assert toy.result.out.splitlines()[-1] == f"report: {toy.run / 'report.html'}"
    assert sorted(path.name for path in toy.run.iterdir()) == [
        ".gitignore", "images.safetensors", "manifest.json", "report.html", "report.json",
        "rows.csv", "run.json",
    ]  # fmt: skip
    facts = json.loads((toy.run / "run.json").read_text())
    reason = "of held-out images correctly, where guessing gives"  # a toy target learns nothing
    assert reason in facts["vacuous"][0]
    assert reason in (toy.run / "report.html").read_text()


def test_more_devices_than_a_batch_can_be_shared_by_are_refused_before_compute(toy, here):
    result = frostglass("run", toy.config, "--store", "new", "--devices", 9)
    assert result.code == 2
    assert error_of(result) == (
        "audit: target: a batch of 16 images is too small for 9 devices: raise batch to at least "
        "18, or use fewer devices"
    )
    assert not Path("new").exists()
    assert frostglass("run", toy.config, "--devices", 0).code == 2


def test_without_a_terminal_progress_is_a_line_per_start_and_end_of_a_step(toy):
    starts = [line for line in toy.result.progress if line.endswith(": started")]
    ends = [line for line in toy.result.progress if ": done after " in line]
    assert len(starts) == len(ends) == 12
    assert len(starts) + len(ends) == len(toy.result.progress)
    assert [line.split(":")[0] for line in starts] == [line.split(":")[0] for line in ends]
    assert {line.split()[0] for line in starts} == {
        "split", "target", "verifier", "prior", "attack", "prior_only", "scores", "agreement"
    }  # fmt: skip


def test_a_second_run_computes_nothing_and_json_is_one_value(toy):
    before = written(toy.store)
    done = frostglass(*toy.stored, "--out", toy.run, "--json")
    assert (done.code, done.progress) == (1, [])
    assert done.out.count("\n") == 1
    facts = json.loads(done.out)
    assert facts.pop("report") == str(toy.run / "report.html")
    assert facts == json.loads((toy.run / "run.json").read_text())
    assert written(toy.store) == before
    assert len(before) > 20


def test_check_knows_what_is_done(toy):
    costs = json.loads(frostglass("check", toy.config, "--store", toy.store, "--json").out)
    *stored, controls = costs["steps"]
    assert all(row["done"] for row in stored)
    assert costs["seconds"] == controls["seconds"]


def test_settings_reach_the_run(toy, here):
    settings = changed("attack.steps=4", "name=other")
    facts = json.loads(frostglass(*toy.stored, "--out", here / "out", *settings, "--json").out)
    assert facts["name"] == "other"
    assert facts["settings"]["attack"]["steps"] == facts["audits"][0]["attack"]["steps"] == 4


def test_the_run_goes_where_its_name_says(toy, here):
    frostglass(*toy.stored)
    assert (here / "runs" / "toy" / "report.html").is_file()


def test_brackets_in_a_name_are_printed_as_they_are(toy, here):
    done = frostglass(*toy.stored, "--out", here / "out", *changed("name='[/b] [red]x:smile:'"))
    assert "[/b] [red]x:smile:: 4 people attacked" in done.out


@pytest.mark.parametrize("columns", [40, 80, 400])
def test_three_evaluators_lose_no_column_on_any_terminal(toy, here, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    (here / "three.toml").write_text(TOY + THIRD_EVALUATOR)
    done = frostglass("run", "three.toml", "--store", toy.store, "--out", here / "out")
    facts = json.loads((here / "out" / "run.json").read_text())["audits"][0]
    table = done.out.partition("recognised: share")[0]
    shares = [f"{facts['scores'][f'top1_{number}']['value']:.0%}" for number in (1, 2, 3)]
    assert ", ".join(shares) in table
    for column in ("recognised", "accuracy", "prior only", "target", "queries", "seconds"):
        assert column in table
    assert max(map(len, table.splitlines())) <= max(columns, 48)


def test_an_interrupted_run_says_so_and_resumes(here, monkeypatch):
    def interrupt(*args, **more):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(steps, "invert", interrupt)
        assert error_of(frostglass("run", "toy.toml"), 130, worked=True) == STOPPED
    assert not (here / "runs").exists()
    before = written(here / ".frostglass")
    kept = {name: when for name, when in before.items() if not name.startswith("attack")}
    assert {name.split("/")[0] for name in kept} == {
        ".gitignore", "store.json", "split", "target", "verifier", "prior"
    }  # fmt: skip
    assert frostglass("run", "toy.toml").code == 1
    after = written(here / ".frostglass")
    assert {name: after[name] for name in kept} == kept
    assert (here / "runs" / "toy" / "run.json").is_file()


@pytest.mark.parametrize("out", ["toy.toml", "toy.toml/deeper/still"])
def test_an_out_that_cannot_be_a_folder_is_refused_before_any_work(here, out):
    message = f"--out {out} cannot be created or written: give another folder"
    assert error_of(frostglass("run", "toy.toml", "--out", out)) == message
    assert [path.name for path in here.iterdir()] == ["toy.toml"]


def test_a_folder_that_cannot_be_written_is_refused_before_any_work(here, monkeypatch):
    (here / "locked").mkdir()
    monkeypatch.setattr(cli_run.os, "access", lambda place, mode: Path(place).name != "locked")
    for command, option, place in (
        ("run", "--out", "locked/run"),
        ("check", "--store", "locked/store"),
    ):
        line = error_of(frostglass(command, "toy.toml", option, place))
        assert line == f"{option} {place} cannot be created or written: give another folder"
    assert sorted(path.name for path in here.iterdir()) == ["locked", "toy.toml"]


@pytest.mark.parametrize("name", ["holiday.txt", "run.json", "photos"])
def test_a_folder_with_files_of_something_else_is_refused(here, name):
    (here / "mine").mkdir()
    (here / "mine" / name).mkdir() if name == "photos" else (here / "mine" / name).write_text("{}")
    assert error_of(frostglass("run", "toy.toml", "--out", "mine")) == (
        f"--out mine contains files of something else, such as {name}: give a new folder, or that "
        "of an earlier run"
    )
    assert sorted(path.name for path in here.iterdir()) == ["mine", "toy.toml"]
    assert [path.name for path in (here / "mine").iterdir()] == [name]


def test_an_empty_folder_and_those_of_killed_and_earlier_runs_are_accepted(toy, here):
    out = here / "out"
    out.mkdir()
    (out / ".DS_Store").write_text("")
    args = (*toy.stored, "--out", out)
    assert frostglass(*args).code == 1
    (out / "notes.txt").write_text("mine")  # beside a whole run, whose files alone are replaced
    assert frostglass(*args).code == 1
    for name in ("run.json", "report.html", "report.json", "notes.txt"):
        (out / name).unlink()
    assert frostglass(*args).code == 1
    assert (out / "report.html").is_file()


def test_a_run_folder_that_fails_later_names_the_store(toy, here, monkeypatch):
    def refuse(result, folder):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(cli_run, "write_run", refuse)
    assert error_of(frostglass(*toy.stored, "--out", here / "out"), 1) == (
        f"cannot write {here / 'out'} (Permission denied): the results are in {toy.store}; give "
        "another --out"
    )


@pytest.mark.parametrize("damage", ["corrupted", "cut", "gone"])
def test_a_damaged_store(toy, here, damage):
    shutil.copytree(toy.store, here / "store")
    key = json.loads((toy.run / "run.json").read_text())["audits"][0]["keys"]["target"]
    weights = here / "store" / "target" / key / "weights.safetensors"
    content = weights.read_bytes()
    if damage == "gone":
        weights.unlink()
    else:
        weights.write_bytes(content[:-4] if damage == "cut" else content[:-4] + b"\x01\x02\x03\x04")
    line = error_of(frostglass("run", "toy.toml", "--store", "store"))
    corrupted, incomplete = "weights.safetensors is corrupted", "is missing or has another size"
    assert (corrupted if damage == "corrupted" else incomplete) in line
    assert "delete the folder" in line


def read_only(monkeypatch, root):
    """Refuse changes below a folder, which root itself could make; for child processes."""

    def refuse():
        raise PermissionError(errno.EACCES, "Permission denied")

    changing(root, refuse)
    access = os.access

    def is_allowed(place, mode):
        inside = Path(place).is_relative_to(root)
        return access(place, mode) and not (mode & os.W_OK and inside)

    monkeypatch.setattr(os, "access", is_allowed)


def test_a_finished_store_that_is_read_only_can_be_run_and_reported_on(toy, here, monkeypatch):
    before = tree(toy.store)

    def use():
        read_only(monkeypatch, toy.store)
        with pytest.raises(PermissionError):
            (toy.store / "x").touch()
        done = frostglass(*toy.stored, "--out", here / "out")
        assert done.out.splitlines()[-1] == f"report: {here / 'out' / 'report.html'}"
        assert "VACUOUS" in done.err
        assert frostglass("report", here / "out").code == 0
        line = error_of(frostglass(*toy.stored, "--out", here / "new", "--set", "attack.steps=9"))
        assert line.startswith(f"the store {toy.store} cannot be written for step attack ")
        assert line.endswith("(Permission denied): use another folder or change its permissions")

    run(use)
    assert tree(toy.store) == before


def test_report(toy, here):
    done = frostglass("report", toy.run)
    assert (done.code, done.out, done.err) == (0, "report.html\n", "")
    assert "person 0" in (here / "report.html").read_text()
    assert "person 0" in (here / "report.json").read_text()


def test_report_without_names(toy, here):
    page = here / "deep" / "shown.html"
    done = frostglass("report", toy.run, "--redact", "--out", page, "--json")
    said = json.loads(done.out)
    assert said["report"] == str(page)
    assert [origin["status"] for origin in said["origins"]] == ["verified"]
    for name in ("shown.html", "shown.json"):
        text = (here / "deep" / name).read_text()
        assert "person A" in text
        assert "person 0" not in text


def test_report_on_what_is_no_run(toy, here):
    message = "nowhere is not a folder: give the folder of a finished run"
    assert message in error_of(frostglass("report", "nowhere"))
    (here / "empty").mkdir()
    assert "so it is not a finished run" in error_of(frostglass("report", "empty"))
    shutil.copytree(toy.run, here / "torn")
    (here / "torn" / "run.json").write_text("{")
    message = "torn/run.json is missing or has another size than in the manifest: run the same"
    assert message in error_of(frostglass("report", "torn"))
    bad = frostglass("report", toy.run, "--out", "toy.toml/report.html")
    assert "choose another place" in error_of(bad)
    assert not (here / "report.html").exists()
