"""Whole commands with workers, and a Ray cluster that loses a node: the same bytes in the end."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from commands import TOY
from frostglass.auditing.config_file import read_config
from frostglass.auditing.run import run_all
from frostglass.runtime.processes import is_alive
from frostglass.store.store import Store
from killing import tree

pytestmark = pytest.mark.slow
COMMAND = [sys.executable, "-m", "frostglass"]
# Eight shards that take a while, so that a node can be lost in the middle of the attack.
LONG = TOY.replace("steps = 3\ncandidates = 2\nkeep = 2", "steps = 150\ncandidates = 16\nkeep = 2")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The config, and the store of one process with one thread."""
    folder = tmp_path_factory.mktemp("alone")
    config = folder / "long.toml"
    config.write_text(LONG.replace("identities = 4\n", "identities = 8\n"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    run_all(read_config(config), Store(folder / "store"))
    torch.set_num_threads(threads)
    return config, folder / "store"


def wait_for(condition, seconds=600.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def shards(root: Path) -> list[Path]:
    return list(root.glob("attack/*.partial/work/shard-*.safetensors"))


def children(pid: int) -> list[int]:
    """Return all processes below one."""
    listed = subprocess.run(["ps", "-eo", "pid,ppid"], capture_output=True, text=True, check=True)
    parents = dict(tuple(map(int, line.split())) for line in listed.stdout.splitlines()[1:])
    found = [each for each, parent in parents.items() if parent == pid]
    return found + [one for each in found for one in children(each)]


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGKILL])
def test_a_stopped_command_leaves_no_process_and_resumes_to_the_same_bytes(alone, tmp_path, stop):
    config, expected = alone
    root = tmp_path / "store"
    command = [*COMMAND, "run", config, "--store", root, "--out", tmp_path / "run", "--workers", 2]
    command = [str(word) for word in command]
    # A session of its own, with interrupts as on a terminal.
    started = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    try:
        wait_for(lambda: shards(root))
        below = children(started.pid)
        assert len(below) >= 3, "the server of forks and two workers"
        if stop == signal.SIGINT:
            os.killpg(started.pid, stop)
        else:
            os.kill(started.pid, stop)
        _, err = started.communicate(timeout=60)
    finally:
        started.kill()  # if it was not stopped in time
    if stop == signal.SIGINT:
        assert started.returncode == 130
        assert err.splitlines()[-1] == "frostglass: stopped; run the same command again to resume"
        assert "Traceback" not in err
    wait_for(lambda: not any(map(is_alive, below)), 30)
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1, "a toy proves nothing"
    assert "VACUOUS" in done.stderr
    shutil.rmtree(root / "run")  # what the command wrote, which only the command records
    assert tree(root, ("timing.json", "plan.json")) == tree(expected)


def test_a_cluster_that_loses_a_node_ends_with_the_same_bytes(alone, tmp_path):
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    from frostglass.workers.cluster import ray_cluster

    config, expected = alone
    events = []
    store = Store(tmp_path / "store", listener=events.append)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    node = cluster.add_node(num_cpus=1)
    lost = threading.Thread(
        target=lambda: (
            wait_for(lambda: shards(store.root)),
            cluster.remove_node(node, allow_graceful=False),
        )
    )
    try:
        lost.start()
        with ray_cluster(store, cluster.address):
            run_all(read_config(config), store)
        lost.join()
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert any(event.note.startswith("its worker died") for event in events), "nothing was lost"
    assert tree(store.root) == tree(expected)
    assert store.mixed_conditions() == ""
