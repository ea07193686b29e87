"""`frostglass check` stays quick for every shipped config that needs no data of the user's."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
CONFIGS = [
    ROOT / "src" / "frostglass" / "auditing" / "demo.toml",
    *sorted((ROOT / "configs" / "faces").glob("*.toml")),
]
LIMIT = 10  # seconds of CPU time, imports included


@pytest.mark.skipif(not hasattr(os, "wait4"), reason="needs the CPU time of a child process")
@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_a_check_takes_few_seconds(config, tmp_path):
    command = [sys.executable, "-m", "frostglass", "check", str(config), "--store", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (tmp_path / "output").open("w") as output:
        child = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    assert child.returncode == 0, (tmp_path / "output").read_text()
    assert usage.ru_utime + usage.ru_stime < LIMIT
