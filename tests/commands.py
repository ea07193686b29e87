"""Calls the command line for tests, and the toy config they run."""

import re
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

from typer.testing import CliRunner

from frostglass.cli.app import app

SCRIPT = Path(sys.executable).with_name("frostglass")
FACES = """
[data]
name = "faces"
size = 16
identities = 4
images = 8
public_identities = 30
public_images = 1
"""
ONE_EPOCH = """
[target]
epochs = 1
batch = 16
options = { width = 4 }

[[evaluators]]
model = "lenet"
epochs = 1
"""
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
{FACES}{SETTINGS}"""
PROGRESS = re.compile(r"\w+ \S{1,8}: (started|resumed|(done|\d+/\d+) after \d+ s)( \(.+\))?")
HIDDEN_BY_PYTHON = (DeprecationWarning, PendingDeprecationWarning, ResourceWarning)


def frostglass(*args):
    """Run a command in this process, as the script does; anything but an exit raises."""
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        for hidden in HIDDEN_BY_PYTHON:
            warnings.simplefilter("ignore", hidden)
        result = CliRunner().invoke(app, [str(arg) for arg in args], catch_exceptions=False)
    lines = result.stderr.splitlines()
    return SimpleNamespace(
        code=result.exit_code,
        out=result.stdout,
        err=result.stderr,
        progress=[line for line in lines if PROGRESS.fullmatch(line)],
        errors=[line for line in lines if not PROGRESS.fullmatch(line)],
        warnings=[str(one.message) for one in shown],
    )


def changed(*settings):
    """Return the arguments that change settings of a config."""
    return [word for setting in settings for word in ("--set", setting)]


def script(*args, **more):
    """Run the installed command."""
    return subprocess.run([SCRIPT, *args], capture_output=True, text=True, timeout=120, **more)


def error_of(result, code=2, *, worked=False):
    """Return the one error line, which is all that was printed but for the progress of work."""
    assert result.code == code, result.err
    assert result.out == ""
    assert result.warnings == []
    assert bool(result.progress) is worked, result.err
    (line,) = result.errors
    assert result.err.endswith(f"{line}\n")
    assert line.startswith("frostglass: ")
    return line.removeprefix("frostglass: ")


def written(folder):
    """Return every file below a folder and when it was written."""
    return {
        str(path.relative_to(folder)): path.stat().st_mtime_ns
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def enter(folder, monkeypatch):
    """Make a folder with the toy config the current one: the default store and runs go there."""
    monkeypatch.chdir(folder)
    (folder / "toy.toml").write_text(TOY)
    return folder
