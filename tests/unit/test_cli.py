"""The command line itself: help, version, usage, exit codes, interrupts, the machine."""

import json
import os
import signal
import subprocess
import sys
import time
from importlib import metadata

import pytest
import torch

from commands import SCRIPT, enter, error_of, frostglass, script
from frostglass.cli.main import guarded
from frostglass.core.errors import ConfigError, DataError

COMMANDS = (
    "demo", "run", "check", "protect", "release", "list", "show", "report", "convert", "doctor"
)  # fmt: skip


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    return enter(tmp_path, monkeypatch)


def python(*args, **environment):
    values = {name: value for name, value in {**os.environ, **environment}.items() if value}
    command = [sys.executable, *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=values)


def test_help_imports_no_heavy_package():
    code = (
        "import sys\n"
        "from frostglass.cli.app import app\n"
        "try:\n    app(['--help'])\n"
        "except SystemExit as stop:\n    assert not stop.code\n"
        "heavy = {'torch', 'pydantic', 'lightning_fabric', 'timm', 'numpy', 'jinja2'}\n"
        "print('heavy:', *(heavy & set(sys.modules)))\n"
    )
    done = python("-c", code)
    assert done.stdout.splitlines()[-1].strip() == "heavy:", done.stderr
    for command in COMMANDS:
        assert f" {command} " in done.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command):
    done = frostglass(command, "--help")
    assert done.code == 0
    assert "Usage" in done.out


def test_version():
    done = frostglass("--version")
    assert (done.code, done.out.strip(), done.err) == (0, metadata.version("frostglass"), "")


def test_the_package_runs_as_a_module():
    done = python("-m", "frostglass", "--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip() == metadata.version("frostglass")


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


def test_the_installed_command_returns_the_exit_code():
    done = script("nonsense")
    assert (done.returncode, done.stdout) == (2, "")
    assert "No such command 'nonsense'" in done.stderr


def test_formulas_print_on_any_terminal():
    done = script("show", "wgan", env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stderr) == (0, "")
    assert r"penalty \xb7 E(" in done.stdout


def test_a_closed_pipe_is_neither_an_error_nor_a_success(monkeypatch, capfd):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        assert guarded(lambda: print("a result")) == 141
    assert capfd.readouterr().err == ""


def test_an_error_is_one_line_whatever_it_contains(capsys):
    def fail():
        raise DataError("no folder at a\nb")

    assert guarded(fail) == 2
    assert capsys.readouterr().err == "frostglass: no folder at a b\n"


def test_several_problems_are_one_line_each(capsys):
    def fail():
        raise ConfigError(["a: b\nc", "d"])

    assert guarded(fail) == 2
    assert capsys.readouterr().err == "frostglass: 2 problems\n  a: b c\n  d\n"


def test_a_bug_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError):
        guarded(lambda: 1 / 0)


def test_the_interrupt_key_stops_the_installed_command(here):
    args = [SCRIPT, "run", "toy.toml", "--set", "target.epochs=100000"]
    with subprocess.Popen(
        args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        for _ in range(1200):
            if list(here.glob(".frostglass/target/*.partial/work")):
                break
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert err.splitlines()[-1] == "frostglass: stopped; run the same command again to resume"
    assert "Traceback" not in err
    assert list(here.glob(".frostglass/split/*/manifest.json"))
    assert not list(here.glob(".frostglass/*/*.lease"))


@pytest.mark.parametrize("module", ["typer", "torch", "numpy"])
def test_the_interrupt_key_is_one_line_while_modules_are_imported(module):
    code = (
        "import os, signal, sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, *_):\n"
        f"        if name == {module!r}:\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "from frostglass.cli.main import main\n"
        "sys.argv = ['frostglass', 'run', 'toy.toml']\n"
        "main()\n"
    )
    done = python("-c", code)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "frostglass: stopped; run the same command again to resume\n"


def test_a_background_job_keeps_ignoring_the_interrupt_key():
    code = (
        "import signal, sys\n"
        "from frostglass.cli.main import main, raise_on_interrupt\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "sys.argv = ['frostglass', '--version']\n"
        "try:\n    main()\n"
        "except SystemExit:\n    pass\n"
        "raise_on_interrupt()\n"
        "print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)\n"
    )
    assert python("-c", code).stdout.splitlines()[-1] == "True"


def test_doctor():
    done = frostglass("doctor")
    assert (done.code, done.err) == (0, "")
    facts = json.loads(frostglass("doctor", "--json").out)
    assert facts["versions"]["frostglass"] == metadata.version("frostglass")
    assert facts["cores"] >= 1
    assert facts["store_writable"] is True
    assert [line.split()[0] for line in done.out.splitlines()] == list(facts)
    elsewhere = json.loads(frostglass("doctor", "--store", "toy.toml/x", "--json").out)
    assert elsewhere["store_writable"] is False


@pytest.mark.parametrize(("chosen", "used"), [(None, "AUTO"), ("COMPATIBLE", "COMPATIBLE")])
def test_the_command_line_makes_kernels_reproducible_unless_the_user_chose(chosen, used):
    done = python("-m", "frostglass", "doctor", "--json", MKL_CBWR=chosen)
    assert json.loads(done.stdout)["kernels"]["MKL_CBWR"] == used, done.stderr


def test_doctor_names_the_kernels(monkeypatch):
    monkeypatch.setenv("MKL_CBWR", "AVX2")
    (line,) = (line for line in frostglass("doctor").out.splitlines() if "kernels" in line)
    assert "MKL_CBWR AVX2" in line
    assert f"ATEN_CPU_CAPABILITY {torch.backends.cpu.get_cpu_capability()}" in line


@pytest.mark.parametrize("command", [["run", "toy.toml"], ["check", "toy.toml"], ["doctor"]])
def test_a_missing_device(monkeypatch, command):
    monkeypatch.setenv("FROSTGLASS_DEVICE", "abacus")
    line = error_of(frostglass(*command))
    assert line.startswith("FROSTGLASS_DEVICE names no device of this machine (")
    assert line.endswith("): set it to cpu, or unset it")


@pytest.mark.parametrize("command", [["run", "toy.toml"], ["check", "toy.toml"], ["doctor"]])
def test_a_folder_that_is_no_store(here, command):
    (here / "images").mkdir()
    (here / "images" / "holiday.jpg").touch()
    message = "images is not empty and has no store.json (found holiday.jpg)"
    assert message in error_of(frostglass(*command, "--store", "images"))
    message = "toy.toml is a file and a store is a folder"
    assert message in error_of(frostglass(*command, "--store", "toy.toml"))
    assert [path.name for path in (here / "images").iterdir()] == ["holiday.jpg"]


def test_a_store_of_another_version(here):
    (here / "old").mkdir()
    (here / "old" / "store.json").write_text('{"format": 99}')
    line = error_of(frostglass("run", "toy.toml", "--store", "old"))
    assert "old is a store of format 99, expected " in line
    assert "use another folder or delete it" in line
