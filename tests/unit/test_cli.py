"""The command line as a user meets it: exit codes, one line for each error, and what is written where."""

import io
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import warnings
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from frostglass.audit import pipeline
from frostglass.audit.catalogue import KINDS
from frostglass.cli import work
from frostglass.cli.main import app, guarded
from frostglass.cli.progress import Bars
from frostglass.core.errors import DataError
from frostglass.data.faces import photograph
from frostglass.models.build import build
from frostglass.models.checkpoint import save_weights
from frostglass.plan import cost
from frostglass.store.store import Event

SCRIPT = Path(sys.executable).with_name("frostglass")
SETTINGS = """
[target]
epochs = 2
batch = 16
options = { width = 4 }

[[evaluators]]
model = "resnet"
epochs = 1
options = { width = 4, depth = 1 }

[[evaluators]]
model = "lenet"
epochs = 1

[prior]
name = "wgan"
steps = 4
critic_steps = 1
width = 4
batch = 8

[attack]
name = "gmi"
steps = 3
candidates = 2
keep = 2
batch = 4
"""
TOY = f"""
name = "toy"

[data]
name = "faces"
size = 16
identities = 4
images = 8
public_identities = 30
public_images = 1
{SETTINGS}"""
OWN = f"""
name = "own"

[data]
name = "folder"
private = "photos/private"
public = "photos/public"
size = 16
{SETTINGS}"""


def frostglass(*args):
    """Run a command in this process, as the script does; anything but an exit is a bug and raises."""
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        for hidden in (
            DeprecationWarning,
            PendingDeprecationWarning,
            ResourceWarning,
        ):  # as Python does
            warnings.simplefilter("ignore", hidden)
        result = CliRunner().invoke(app, [str(arg) for arg in args], catch_exceptions=False)
    return SimpleNamespace(
        code=result.exit_code,
        out=result.stdout,
        err=result.stderr,
        warnings=[str(one.message) for one in shown],
    )


def script(*args, **more):
    """Run the installed command."""
    return subprocess.run([SCRIPT, *args], capture_output=True, text=True, timeout=60, **more)


def said(result, code):
    """The one line of an error, after checking that there is no other and that nothing else was printed."""
    assert result.code == code, result.err
    assert result.out == ""
    assert result.warnings == []
    lines = result.err.splitlines()
    assert len(lines) == 1, result.err
    assert lines[0].startswith("frostglass: ")
    return lines[0].removeprefix("frostglass: ")


def tree(folder):
    """Every file and when it was written."""
    return {
        str(path.relative_to(folder)): path.stat().st_mtime_ns
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Each test calls from a folder of its own, where the default store and runs go."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "toy.toml").write_text(TOY)
    return tmp_path


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """A finished run of the toy config; nobody writes into it but through the same command."""
    folder = tmp_path_factory.mktemp("toy")
    (folder / "toy.toml").write_text(TOY)
    args = ("run", folder / "toy.toml", "--store", folder / "store", "--out", folder / "run")
    return SimpleNamespace(
        folder=folder,
        args=args,
        store=folder / "store",
        run=folder / "run",
        result=frostglass(*args),
    )


# --- help, version, usage -----------------------------------------------------------------------------------------------------------------


def test_help_needs_no_heavy_package():
    code = (
        "import sys\n"
        "from frostglass.cli.main import app\n"
        "try:\n    app(['--help'])\n"
        "except SystemExit as stop:\n    assert not stop.code\n"
        "print('heavy:', *({'torch', 'pydantic', 'lightning_fabric', 'timm', 'numpy', 'jinja2'} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.splitlines()[-1].strip() == "heavy:"
    for command in ("demo", "run", "check", "list", "show", "report", "doctor"):
        assert f" {command} " in done.stdout


@pytest.mark.parametrize("command", ["demo", "run", "check", "list", "show", "report", "doctor"])
def test_every_command_explains_itself(command):
    done = frostglass(command, "--help")
    assert done.code == 0
    assert "Usage" in done.out


def test_version():
    done = frostglass("--version")
    assert (done.code, done.out.strip(), done.err) == (0, metadata.version("frostglass"), "")


@pytest.mark.parametrize(
    "args",
    [
        ["nonsense"],
        ["run"],
        ["show"],
        ["report"],
        ["run", "toy.toml", "--threads", "0"],
        ["list", "x", "--y"],
    ],
)
def test_bad_usage(args):
    done = frostglass(*args)
    assert done.code == 2
    assert done.out == ""
    assert "Error" in done.err


def test_the_installed_command_gives_the_exit_code():
    done = script("nonsense")
    assert (done.returncode, done.stdout) == (2, "")
    assert "No such command 'nonsense'" in done.stderr


def test_formulas_fit_any_terminal():
    done = script("show", "wgan", env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stderr) == (0, "")
    assert r"penalty \xb7 E(" in done.stdout


def test_a_reader_that_leaves_is_no_error_of_ours_and_no_success(monkeypatch, capfd):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        assert guarded(lambda: print("a result")) == 141
    assert capfd.readouterr().err == ""


def test_an_error_is_one_line_whatever_is_in_it(capsys):
    def fail():
        raise DataError("no folder at a\nb")

    assert guarded(fail) == 2
    assert capsys.readouterr().err == "frostglass: no folder at a b\n"


def test_a_bug_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError):
        guarded(lambda: 1 / 0)


# --- list and show ------------------------------------------------------------------------------------------------------------------------

KNOWN = {
    "datasets": {"faces", "digits", "mnist", "folder"},
    "models": {"lenet", "cnn", "resnet"},
    "defenses": {"label_smoothing", "calor"},
    "priors": {"wgan", "pretrained"},
    "attacks": {"gmi"},
    "feature_attacks": {"decoder", "latent"},
    "metrics": {"accuracy", "distance", "manifold"},
}
NAMES = sorted(name for registry in KINDS.values() for name in registry.names())


@pytest.mark.parametrize("kind", KINDS)
def test_list_for_machines_and_people(kind):
    found = json.loads(frostglass("list", kind, "--json").out)
    assert {entry["name"] for entry in found} >= KNOWN[kind]
    assert all(entry["summary"] and entry["kind"] == kind for entry in found)
    text = frostglass("list", kind).out.splitlines()
    assert [line.split()[0] for line in text][: len(found)] == [entry["name"] for entry in found]


def test_list_without_a_kind_gives_an_overview():
    done = frostglass("list")
    *lines, advice = done.out.splitlines()
    assert (done.code, advice) == (
        0,
        "frostglass list KIND says what each is, frostglass show NAME all about one",
    )
    assert {line.split()[0]: line.split(maxsplit=1)[1].split(", ") for line in lines} == {
        kind: KINDS[kind].names() for kind in KINDS
    }
    assert [
        (entry["kind"], entry["name"]) for entry in json.loads(frostglass("list", "--json").out)
    ] == [(kind, name) for kind in KINDS for name in KINDS[kind].names()]


@pytest.mark.parametrize(
    ("kind", "hint"), [("atacks", "did you mean 'attacks'?"), ("zzz", "known: attacks, datasets")]
)
def test_list_of_an_unknown_kind(kind, hint):
    line = said(frostglass("list", kind), 2)
    assert f"no kind named '{kind}'" in line
    assert hint in line


@pytest.mark.parametrize("name", NAMES)
def test_show_explains_a_method(name):
    done = frostglass("show", name)
    assert (done.code, done.err) == (0, "")
    facts = json.loads(frostglass("show", name, "--json").out)
    assert done.out.startswith(f"{name} ({facts['kind']}, {facts['file']})\n\n{facts['text']}")
    for parameter in facts["parameters"]:
        value = (
            "required"
            if parameter["required"]
            else f" = {parameter['default']!r}"
            if not isinstance(parameter["default"], list)
            else " = ("
        )
        assert any(
            line.startswith(f"  {parameter['name']}") and value in line
            for line in done.out.splitlines()
        )


def test_show_of_an_unknown_name():
    line = said(frostglass("show", "gmmi"), 2)
    assert "nothing is named 'gmmi': did you mean 'gmi'?" in line


# --- check --------------------------------------------------------------------------------------------------------------------------------


def test_check_of_a_good_config_writes_nothing(here):
    done = frostglass("check", "toy.toml")
    assert (done.code, done.err) == (0, "")
    assert "no problems; about" in done.out
    costs = json.loads(frostglass("check", "toy.toml", "--json").out)
    assert [row["step"] for row in costs["steps"]] == [
        "split",
        "target",
        "target",
        "target",
        "prior",
        "attack",
        "prior_only",
        "scores",
        "scores",
    ]
    assert not any(row["done"] for row in costs["steps"])
    assert costs["seconds"] == pytest.approx(sum(row["seconds"] for row in costs["steps"]))
    assert [path.name for path in here.iterdir()] == ["toy.toml"]


def test_check_knows_what_is_done(toy):
    costs = json.loads(
        frostglass("check", toy.folder / "toy.toml", "--store", toy.store, "--json").out
    )
    assert all(row["done"] for row in costs["steps"])
    assert costs["seconds"] == 0


def test_the_networks_of_a_grid_are_timed_once(monkeypatch):
    timed = []
    monkeypatch.setattr(cost, "_timed", lambda step: timed.append(step) or 1.0)
    costs = json.loads(
        frostglass("check", "toy.toml", "--set", "grid={seed=[0,1,2]}", "--json").out
    )
    assert len(costs["steps"]) == 27
    assert len(timed) == 4  # target, two evaluators, prior


def test_checking_leaves_the_random_state():
    before = torch.get_rng_state()
    frostglass("check", "toy.toml")
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("command", ["check", "run"])
def test_all_problems_of_a_config_at_once(here, command):
    done = frostglass(
        command,
        "toy.toml",
        "--set",
        "attack.stepz=1",
        "--set",
        "target.epochs=0",
        "--set",
        "sede=1",
    )
    assert (done.code, done.out) == (2, "")
    assert done.err.splitlines()[0] == "frostglass: 3 problems"
    assert done.err.count("\n  ") == 3
    for problem in (
        "attack.stepz: no such parameter; did you mean 'steps'?",
        "target.epochs: ",
        "sede: no such section; did you mean 'seed'?",
    ):
        assert f"\n  {problem}" in done.err
    assert [path.name for path in here.iterdir()] == ["toy.toml"]


@pytest.mark.parametrize("command", ["check", "run"])
def test_all_networks_are_tried_before_any_work(here, command):
    args = [
        "--set",
        "target.model=cnnn",
        "--set",
        "evaluators.1.model=nowhere:make",
        "--set",
        "data.size=24",
    ]
    done = frostglass(command, "toy.toml", *args)
    assert (done.code, done.out) == (2, "")
    first, *problems = done.err.splitlines()
    assert first == "frostglass: 3 problems"
    assert problems[0].startswith("  target: no model named 'cnnn': did you mean 'cnn'? known: ")
    assert (
        problems[1]
        == "  evaluators[1]: cannot import 'nowhere' for 'nowhere:make': No module named 'nowhere'"
    )
    assert problems[2].startswith(
        "  prior: the generator makes square images of 16, 32, 64 or 128 pixels, got 24×24"
    )
    assert [path.name for path in here.iterdir()] == ["toy.toml"]


def test_a_problem_of_a_whole_grid_is_told_once():
    line = said(
        frostglass(
            "check", "toy.toml", "--set", "grid={seed=[0,1,2]}", "--set", "target.model=cnnn"
        ),
        2,
    )
    assert line.startswith("target: no model named 'cnnn'")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read c.toml: No such file"),
        ("a = [", "c.toml is not valid TOML"),
        (b"\xff\xfe\x00", "c.toml is not valid TOML"),
    ],
)
def test_a_config_that_cannot_be_read(here, content, message):
    if content is not None:
        (here / "c.toml").write_bytes(content if isinstance(content, bytes) else content.encode())
    for command in ("check", "run"):
        assert message in said(frostglass(command, "c.toml"), 2)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("attack.steps", "expected name=value, for example attack.steps=100; got 'attack.steps'"),
        ("evaluators.7.epochs=1", "'7' should be a number below 2"),
        ("attack.keep=9", r"attack.keep (9) must not exceed candidates (2)"),
        ("split.test=0.95", "test (0.95) and validation (0.1) leave nothing to train on"),
        ("name=../elsewhere", "name: expected letters, digits"),
    ],
)
def test_bad_settings(setting, message):
    assert message in said(frostglass("run", "toy.toml", "--set", setting), 2)


# --- run and report -----------------------------------------------------------------------------------------------------------------------


def test_a_run_that_proves_nothing_is_written_and_fails(toy):
    assert toy.result.code == 1
    assert toy.result.err.splitlines() == [
        line
        for line in toy.result.err.splitlines()
        if line.startswith("frostglass: VACUOUS: audit: ")
    ]
    assert toy.result.err.count("\n") == 1
    assert "toy: 4 people attacked" in toy.result.out
    assert toy.result.out.splitlines()[-1] == f"report: {toy.run / 'report.html'}"
    assert sorted(path.name for path in toy.run.iterdir()) == [
        "pictures.safetensors",
        "report.html",
        "report.json",
        "rows.csv",
        "run.json",
    ]
    facts = json.loads((toy.run / "run.json").read_text())
    reason = "of held-out pictures, where guessing gives"  # a toy target learns nothing, so there is nothing in it to leak
    assert reason in facts["vacuous"][0]
    assert reason in (toy.run / "report.html").read_text()


def test_progress_is_silent_without_a_terminal(toy):
    assert all(line.startswith("frostglass: VACUOUS") for line in toy.result.err.splitlines())


def test_a_second_run_computes_nothing_and_json_is_one_value(toy):
    before = tree(toy.store)
    done = frostglass(*toy.args, "--json")
    assert done.code == 1
    assert done.out.count("\n") == 1
    facts = json.loads(done.out)
    assert facts["report"] == str(toy.run / "report.html")
    assert {key: value for key, value in facts.items() if key != "report"} == json.loads(
        (toy.run / "run.json").read_text()
    )
    assert tree(toy.store) == before
    assert len(before) > 20


def test_settings_reach_the_run(toy, here):
    done = frostglass(
        *toy.args[:4],
        "--out",
        here / "out",
        "--set",
        "attack.steps=4",
        "--set",
        "name=other",
        "--json",
    )
    facts = json.loads(done.out)
    assert (
        facts["name"],
        facts["settings"]["attack"]["steps"],
        facts["audits"][0]["attack"]["steps"],
    ) == ("other", 4, 4)


def test_the_run_goes_where_its_name_says(toy, here):
    frostglass(*toy.args[:4])
    assert (here / "runs" / "toy" / "report.html").is_file()


def test_brackets_in_a_name_are_printed_as_they_are(toy, here):
    done = frostglass(*toy.args[:4], "--out", here / "out", "--set", "name='[/b] [red]x:smile:'")
    assert "[/b] [red]x:smile:: 4 people attacked" in done.out


def test_an_interrupted_run_says_so_and_goes_on(here, monkeypatch):
    def interrupt(*args, **more):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "invert", interrupt)
        assert (
            said(frostglass("run", "toy.toml"), 130)
            == "stopped; the same command goes on from here"
        )
    assert not (here / "runs").exists()
    kept = {
        name: when
        for name, when in tree(here / ".frostglass").items()
        if not name.startswith("attack")
    }
    assert {name.split("/")[0] for name in kept} == {"store.json", "split", "target", "prior"}
    assert frostglass("run", "toy.toml").code == 1
    after = tree(here / ".frostglass")
    assert {name: after[name] for name in kept} == kept
    assert (here / "runs" / "toy" / "run.json").is_file()


def test_the_interrupt_key_stops_the_installed_command(here):
    args = [SCRIPT, "run", "toy.toml", "--set", "target.epochs=100000"]
    with subprocess.Popen(
        args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        for _ in range(600):
            if list(here.glob(".frostglass/target/*.partial/work")):
                break
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (
        130,
        "",
        "frostglass: stopped; the same command goes on from here\n",
    )
    assert list(here.glob(".frostglass/split/*/manifest.json"))
    assert not list(here.glob(".frostglass/*/*.lease"))


@pytest.mark.parametrize("out", ["toy.toml", "toy.toml/deeper/still"])
def test_a_place_for_the_run_that_is_none_is_refused_before_any_work(here, out):
    assert (
        said(frostglass("run", "toy.toml", "--out", out), 2)
        == f"--out {out} cannot be made or written: give a folder of your own"
    )
    assert [path.name for path in here.iterdir()] == ["toy.toml"]


def test_a_folder_without_the_right_to_write_is_refused_before_any_work(here, monkeypatch):
    (here / "locked").mkdir()
    monkeypatch.setattr(work.os, "access", lambda place, mode: Path(place).name != "locked")
    assert "--out locked/run cannot be made or written" in said(
        frostglass("run", "toy.toml", "--out", "locked/run"), 2
    )
    assert "--store locked/store cannot be made or written" in said(
        frostglass("check", "toy.toml", "--store", "locked/store"), 2
    )
    assert sorted(path.name for path in here.iterdir()) == ["locked", "toy.toml"]


@pytest.mark.parametrize("name", ["holiday.txt", "run.json", "photos"])
def test_a_folder_of_other_things_is_no_place_for_a_run(here, name):
    (here / "mine").mkdir()
    (here / "mine" / name).mkdir() if name == "photos" else (here / "mine" / name).write_text("{}")
    message = f"--out mine holds other things than a run, such as {name}: give a new folder, or that of an earlier run"
    assert said(frostglass("run", "toy.toml", "--out", "mine"), 2) == message
    assert sorted(path.name for path in here.iterdir()) == ["mine", "toy.toml"]
    assert [path.name for path in (here / "mine").iterdir()] == [name]


def test_a_run_goes_into_an_empty_folder_a_killed_ones_and_an_earlier_ones(toy, here):
    out = here / "out"
    out.mkdir()
    (out / ".DS_Store").write_text("")
    args = (*toy.args[:4], "--out", out)
    assert frostglass(*args).code == 1
    (out / "notes.txt").write_text(
        "mine"
    )  # beside a whole run, which is overwritten by its own kind
    assert frostglass(*args).code == 1
    for name in ("run.json", "report.html", "report.json", "notes.txt"):
        (out / name).unlink()
    assert frostglass(*args).code == 1
    assert (out / "report.html").is_file()


def test_a_run_folder_that_fails_later_points_to_what_is_kept(toy, here, monkeypatch):
    def refuse(result, folder):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(work, "write_run", refuse)
    line = said(frostglass(*toy.args[:4], "--out", here / "out"), 1)
    assert (
        line
        == f"cannot write {here / 'out'} (Permission denied): what was computed is in {toy.store}; give another --out"
    )


def test_a_device_that_is_not_there(monkeypatch):
    monkeypatch.setenv("FROSTGLASS_DEVICE", "abacus")
    for args in (["run", "toy.toml"], ["check", "toy.toml"], ["doctor"]):
        assert "FROSTGLASS_DEVICE names no device of this machine" in said(frostglass(*args), 2)


def test_report(toy, here):
    done = frostglass("report", toy.run)
    assert (done.code, done.out, done.err) == (0, "report.html\n", "")
    assert "person 0" in (here / "report.html").read_text()
    assert "person 0" in (here / "report.json").read_text()


def test_report_without_names(toy, here):
    done = frostglass(
        "report", toy.run, "--redact", "--out", here / "deep" / "shown.html", "--json"
    )
    assert json.loads(done.out) == {"report": str(here / "deep" / "shown.html")}
    for name in ("shown.html", "shown.json"):
        text = (here / "deep" / name).read_text()
        assert "person A" in text
        assert "person 0" not in text


def test_report_on_what_is_no_run(toy, here):
    assert "nowhere is not a folder: give the folder of a finished run" in said(
        frostglass("report", "nowhere"), 2
    )
    (here / "empty").mkdir()
    assert "so it is not a finished run" in said(frostglass("report", "empty"), 2)
    shutil.copytree(toy.run, here / "torn")
    (here / "torn" / "run.json").write_text("{")
    assert "run.json is not JSON" in said(frostglass("report", "torn"), 2)
    assert "choose another place" in said(
        frostglass("report", toy.run, "--out", "toy.toml/report.html"), 2
    )
    assert not (here / "report.html").exists()


def test_doctor():
    done = frostglass("doctor")
    assert (done.code, done.err) == (0, "")
    facts = json.loads(frostglass("doctor", "--json").out)
    assert facts["versions"]["frostglass"] == metadata.version("frostglass")
    assert facts["cores"] >= 1
    assert facts["store_writable"] is True
    assert [line.split()[0] for line in done.out.splitlines()] == list(facts)
    assert (
        json.loads(frostglass("doctor", "--store", "toy.toml/x", "--json").out)["store_writable"]
        is False
    )


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(("stream", "drawn"), [(Terminal, True), (io.StringIO, False)])
def test_bars_are_drawn_on_a_terminal_only(monkeypatch, stream, drawn):
    monkeypatch.setattr(sys, "stderr", stream())
    with Bars() as bars:
        bars(Event("split", "a", "cached"))
        bars(Event("target", "b", "start"))
        bars(Event("target", "b", "progress", 3, 7, "accuracy 0.25"))
    text = sys.stderr.getvalue()
    assert bool(text) is drawn
    assert all((word in text) is drawn for word in ("target", "3/7", "accuracy 0.25"))
    assert "split" not in text


# --- stores -------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [["run", "toy.toml"], ["check", "toy.toml"], ["doctor"]])
def test_a_folder_that_is_no_store(here, command):
    (here / "pictures").mkdir()
    (here / "pictures" / "holiday.jpg").touch()
    assert "pictures is not empty and has no store.json (found holiday.jpg)" in said(
        frostglass(*command, "--store", "pictures"), 2
    )
    assert "toy.toml is a file and a store is a folder" in said(
        frostglass(*command, "--store", "toy.toml"), 2
    )
    assert [path.name for path in (here / "pictures").iterdir()] == ["holiday.jpg"]


def test_a_store_of_another_version(here):
    (here / "old").mkdir()
    (here / "old" / "store.json").write_text('{"format": 99}')
    line = said(frostglass("run", "toy.toml", "--store", "old"), 2)
    assert "old is a store of format 99, expected 1: use another folder or delete it" in line


@pytest.mark.parametrize("damage", ["corrupted", "cut", "gone"])
def test_a_damaged_store(toy, here, damage):
    shutil.copytree(toy.store, here / "store")
    weights = next((here / "store" / "target").glob("*/weights.safetensors"))
    content = weights.read_bytes()
    if damage == "gone":
        weights.unlink()
    else:
        weights.write_bytes(content[:-4] if damage == "cut" else content[:-4] + b"\x01\x02\x03\x04")
    line = said(frostglass("run", "toy.toml", "--store", "store"), 2)
    assert (
        "weights.safetensors is corrupted" in line
        if damage == "corrupted"
        else "is missing or has another size" in line
    )
    assert "delete the folder" in line


# --- a user's own data and model ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def album(tmp_path_factory):
    """Photos of three private and eight public people, one folder each."""
    root = tmp_path_factory.mktemp("album")
    for side, first, people, shots in (("private", 0, 3, 6), ("public", 1_000_000, 8, 2)):
        for number in range(people):
            folder = root / side / f"{side} {number}"
            folder.mkdir(parents=True)
            pixels, _ = photograph(0, torch.full((shots,), first + number), torch.arange(shots), 16)
            for shot, picture in enumerate(pixels):
                Image.fromarray(picture.permute(1, 2, 0).numpy()).save(folder / f"{shot}.png")
    return root


@pytest.fixture
def photos(here, album):
    """A copy of the album to spoil, and a config that reads it."""
    shutil.copytree(album, here / "photos")
    (here / "own.toml").write_text(OWN)
    return here / "photos"


def copy_identity(photos):
    shutil.copytree(photos / "private" / "private 0", photos / "public" / "PRIVATE 0")


def copy_picture(photos):
    shutil.copy(
        photos / "private" / "private 0" / "0.png", photos / "public" / "public 1" / "copy.png"
    )


def leave_one_picture(photos):
    for path in list((photos / "private" / "private 1").iterdir())[1:]:
        path.unlink()


def leave_one_person(photos):
    for number in (1, 2):
        shutil.rmtree(photos / "private" / f"private {number}")


def cut_picture(photos):
    path = photos / "public" / "public 1" / "0.png"
    path.write_bytes(path.read_bytes()[:100])


def empty_picture(photos):
    (photos / "private" / "private 0" / "0.png").write_bytes(b"")


def disguise_text(photos):
    (photos / "private" / "private 0" / "0.png").write_text("no picture")


def empty_identity(photos):
    for path in (photos / "private" / "private 0").iterdir():
        path.unlink()


def empty_side(photos):
    shutil.rmtree(photos / "public")
    (photos / "public").mkdir()


def remove_side(photos):
    shutil.rmtree(photos / "private")


def loosen(photos):
    (photos / "private" / "private 0" / "0.png").rename(photos / "private" / "0.png")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            copy_identity,
            "1 identities are both private and public: private 0; keep each on one side",
        ),
        (
            copy_picture,
            r"1 pictures are both private and public: \w+ private 0/0.png = public public 1/copy.png; remove them from one side",
        ),
        (
            leave_one_picture,
            r"1 private identities have fewer than 3 different pictures.*: private 1 \(1\); add pictures or leave",
        ),
        (leave_one_person, "private identities: 1; a classifier needs at least 2"),
        (
            cut_picture,
            r"1 of 34 pictures cannot be used: photos/public/public 1/0.png \(.*\); mend or remove them",
        ),
        (
            empty_picture,
            r"1 of 34 pictures cannot be used: photos/private/private 0/0.png \(empty, 0 bytes\); mend or remove them",
        ),
        (
            disguise_text,
            r"photos/private/private 0/0.png \(not a PNG, JPEG, .* picture, whatever its name says\)",
        ),
        (
            empty_identity,
            "1 sub-folders of photos/private hold no pictures: private 0; fill or remove them",
        ),
        (empty_side, "no pictures in photos/public .*: expected files ending in .bmp, "),
        (
            remove_side,
            "no folder at photos/private: expected one with a sub-folder of pictures per identity",
        ),
        (
            loosen,
            "photos/private holds 1 loose pictures beside its sub-folders: photos/private/0.png; move them",
        ),
    ],
)
def test_bad_pictures(here, photos, spoil, message):
    spoil(photos)
    assert re.search(message, said(frostglass("run", "own.toml"), 2))
    assert not (here / "runs").exists()


def cnn(classes=3, seed=5):
    return build("cnn", classes=classes, image_shape=(3, 16, 16), seed=seed, width=4)


def other_classes(path):
    save_weights(cnn(classes=5), path)


def other_names(path):
    save_file({f"net.{name}": value.clone() for name, value in cnn().state_dict().items()}, path)


def a_pickle(path):
    path.write_bytes(pickle.dumps({"weights": print}, protocol=2))


def a_new_pickle(path):
    path.write_bytes(pickle.dumps({"weights": print}, protocol=4))


def a_text(path):
    path.write_text("these are not weights")


def not_finite(path):
    save_weights(cnn(), path)
    state = load_file(path)
    state["head.bias"][0] = float("nan")
    save_file(state, path)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (other_classes, "does not fit Sequential: the checkpoint has 5 classes, the model 3"),
        (other_names, "missing (stage1.0.weight, stage1.1.weight, stage1.1.bias, ...)"),
        (
            a_pickle,
            "w holds more than tensors or is damaged; unpickling could run any code: re-save its weights as safetensors",
        ),
        (a_new_pickle, "w holds more than tensors or is damaged"),
        (a_text, "w is neither safetensors nor a file of torch.save"),
        (not_finite, "w cannot be used: 1 of its tensors hold NaN or infinity (head.bias)"),
        (lambda path: None, "no checkpoint file at 'w'"),
        (Path.mkdir, "no checkpoint file at 'w'"),
    ],
)
def test_bad_weights_are_refused_before_any_work(here, photos, write, message):
    write(here / "w")
    line = said(frostglass("run", "own.toml", "--set", "target.weights=w"), 2)
    assert line.startswith("target: ")
    assert message in line
    assert not (here / ".frostglass").exists()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("resnet18", "no model named 'resnet18': did you mean 'timm:resnet18'?"),
        ("timm:resnet19", "timm has no model named 'resnet19': did you mean"),
        ("json:make", "no function 'make' in 'json'"),
        ("json:dumps", "json:dumps: missing a required argument: 'obj'"),
    ],
)
def test_bad_models(photos, model, message):
    assert message in said(
        frostglass(
            "run", "own.toml", "--set", f"target.model={model}", "--set", "target.options={}"
        ),
        2,
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ["target.lr=1e30", "target.batch=4"],
            "the loss is not finite at epoch 0, batch 1 (cross_entropy nan)",
        ),
        (["prior.lr=1e30"], "wgan: the loss is not finite at step 0"),
        (
            ["attack.lr=1e38", "attack.weight=1e38", "attack.clamp=0.0"],
            "because the attack's loss was not finite: lower attack.lr",
        ),
        (
            ["target.lr=1e4", "target.optimizer=sgd"],
            "cnn: NaN or infinity after epoch 1: lower the learning rate",
        ),
    ],
)
def test_a_run_that_diverges_says_where(here, photos, settings, message):
    args = [word for setting in settings for word in ("--set", setting)]
    assert message in said(frostglass("run", "own.toml", *args), 1)
    assert not (here / "runs").exists()


def test_metrics_that_no_control_can_be_judged_by(toy):
    assert "accuracy" in said(frostglass(*toy.args[:4], "--set", 'metrics=[{name="distance"}]'), 2)


def test_a_good_folder_and_a_model_of_the_users_own(here, photos):
    """From pictures and a module that only the user has, called as a user calls it, to a report."""
    (here / "mynet.py").write_text(
        "from torch import nn\n\n"
        "def make(classes, image_shape, hidden):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, hidden), nn.ReLU(), nn.Linear(hidden, classes))\n"
    )
    net = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(768, 10), torch.nn.ReLU(), torch.nn.Linear(10, 3)
    )
    torch.save({"state_dict": net.state_dict()}, here / "mine.pt")
    settings = [
        "target.model=mynet:make",
        "target.options={hidden=10}",
        "target.weights=mine.pt",
        "judging.identities=2",
    ]
    done = script(
        "run", "own.toml", "--json", *[word for setting in settings for word in ("--set", setting)]
    )
    assert done.returncode == 1, done.stderr
    assert done.stderr.startswith("frostglass: VACUOUS: ")
    assert done.stderr.count("\n") == 1
    facts = json.loads(done.stdout)
    target = facts["audits"][0]["target"]
    assert (target["model"], target["history"], target["parameters"]) == (
        "mynet:make",
        [],
        768 * 10 + 10 + 30 + 3,
    )
    assert facts["identities"] == ["private 0", "private 1"]
    assert facts["data"]["manifest"]["parts"]["public"]["pictures"] == 16
    targets = {
        path.parent: json.loads(path.read_text())["info"]
        for path in here.glob(".frostglass/target/*/target.json")
    }
    loaded = [
        folder
        for folder, info in targets.items()
        if info["model"] == "mynet:make" and not info["history"]
    ]
    assert len(loaded) == 1
    assert torch.equal(load_file(loaded[0] / "weights.safetensors")["1.weight"], net[1].weight)
    assert "private 0" in (here / "runs" / "own" / "report.html").read_text()


def test_the_demo_is_a_config_like_any_other(here):
    shipped = Path(work.__file__).parents[1] / "experiments" / "demo.toml"
    assert work.demo_settings() == tomllib.loads(shipped.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["attack={name='lomma'}"], "attack: lomma.students is on and the prior has none"),
        (
            ["prior={name='conditional',width=4}"],
            "attack: gmi.critic_weight is not 0 and the prior has no critic",
        ),
        (
            ["attack={name='brepmi'}", "prior={name='kplus1',width=4}"],
            "attack: brepmi sees labels alone, and the kplus1 prior is fitted to more",
        ),
        (
            ["prior={name='conditional',width=4,top=9999}", "attack={name='plgmi'}"],
            "conditional.top (9999) is more than the",
        ),
        (
            ["prior={name='pretrained'}"],
            "faces32 makes pictures of 32×32 pixels, the data has 16×16",
        ),
    ],
)
def test_an_attack_that_does_not_fit_its_prior_is_told_before_any_work(here, settings, message):
    args = [part for setting in settings for part in ("--set", setting)]
    for command in ("check", "run"):
        assert message in said(frostglass(command, "toy.toml", *args), 2)
