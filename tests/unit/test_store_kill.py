"""A run killed at any time and started again ends with the bytes of an unbroken run."""

import os
import random
import signal
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from frostglass.runtime.seeding import generator_for
from frostglass.store import lease as lease_module
from frostglass.store import store as store_module
from frostglass.store.files import Work, read_json, read_tensors, write_json, write_tensors
from frostglass.store.step import Event, Step
from frostglass.store.store import Store
from killing import changing, die_before_change, ended, fork, run, run_until_done, tree


@dataclass(frozen=True)
class Numbers:
    values: Tensor
    key: str = ""


@dataclass(frozen=True)
class Walk:
    """A random walk of `steps` steps that take `pause` seconds each."""

    steps: int
    pause: float


def save_numbers(product: Numbers, folder: Path) -> None:
    write_tensors(folder / "numbers.safetensors", {"values": product.values})


def load_numbers(folder: Path, device: torch.device) -> Numbers:
    return Numbers(read_tensors(folder / "numbers.safetensors")[0]["values"])


def save_summary(product: Numbers, folder: Path) -> None:
    write_json(folder / "summary.json", product.values.tolist())


def load_summary(folder: Path, device: torch.device) -> Numbers:
    return Numbers(torch.tensor(read_json(folder / "summary.json"), dtype=torch.float64))


def draw(size: int, *, seed: int, **_: Any) -> Numbers:
    return Numbers(torch.randn(size, generator=generator_for(seed, "draw")))


def walker(log: Path):
    """Make a walk that checkpoints every step, and logs each outside the store as it runs."""

    def walk(config: Walk, *, start: Numbers, seed: int, work: Work, **_: Any) -> Numbers:
        generator, values, done = generator_for(seed, "walk"), start.values, 0
        if checkpoint := work.load("state"):
            tensors, kept = checkpoint
            generator.set_state(tensors["generator"])
            values, done = tensors["values"], kept["done"]
        for number in range(done, config.steps):
            with open(log, "a") as file:
                file.write(f"{os.getpid()} {number}\n")
            time.sleep(config.pause)
            values = values + torch.randn(values.shape, generator=generator)
            work.save(
                "state",
                {"values": values, "generator": generator.get_state()},
                {"done": number + 1},
            )
            work.progress(number + 1, config.steps)
        return Numbers(values)

    return walk


def summarise(config: None, *, walked: Numbers, start: Numbers, **_: Any) -> Numbers:
    return Numbers(
        torch.stack([(walked.values - start.values).double().mean(), walked.values.double().std()])
    )


def pipeline(root: Path, log: Path, config: Walk, listener=None) -> Numbers:
    store = Store(root, listener)
    start = store.step(Step("split", 1, draw, save_numbers, load_numbers), 20, seed=3)
    walked = store.step(
        Step("target", 1, walker(log), save_numbers, load_numbers), config, start=start, seed=3
    )
    return store.step(
        Step("scores", 1, summarise, save_summary, load_summary),
        None,
        walked=walked,
        start=start,
        seed=3,
    )


@pytest.fixture(autouse=True)
def quick_polls(monkeypatch):
    monkeypatch.setattr(store_module, "POLL_SECONDS", 0.01)


def test_killed_at_random_moments_it_ends_with_the_same_bytes(tmp_path):
    config = Walk(steps=8, pause=0.01)
    run(lambda: pipeline(tmp_path / "unbroken", tmp_path / "unbroken.log", config))
    expected = tree(tmp_path / "unbroken")
    assert sum(name.endswith("manifest.json") for name in expected) == 3
    moments = random.Random(0)
    kills = rounds = 0
    while kills < 30:
        rounds += 1
        root, log = tmp_path / f"broken{rounds}", tmp_path / f"{rounds}.log"
        killed = run_until_done(
            lambda root=root, log=log: pipeline(root, log, config),
            (moments.uniform(0, 0.1) for _ in range(12)),
        )
        assert tree(root) == expected
        walked = len(log.read_text().splitlines())
        assert config.steps <= walked <= config.steps + killed, (
            "a kill may lose at most the current step"
        )
        kills += killed
    assert kills >= 30


def test_killed_before_every_file_operation_it_ends_with_the_same_bytes(tmp_path, monkeypatch):
    # The system keeps the unsynced writes of a killed process: syncing only costs time here.
    monkeypatch.setattr(os, "fsync", lambda _: None)
    step = Step("target", 1, walker(tmp_path / "log"), save_numbers, load_numbers)
    config, start, counts = (
        Walk(steps=2, pause=0.0),
        Numbers(torch.zeros(4), key="given"),
        tmp_path / "count",
    )

    def counted() -> None:
        changes = []
        changing(tmp_path / "unbroken", lambda: changes.append(1))
        Store(tmp_path / "unbroken").step(step, config, start=start, seed=3)
        counts.write_text(str(len(changes)))

    run(counted)
    expected, total = tree(tmp_path / "unbroken"), int(counts.read_text())
    assert total > 40
    again = random.Random(0)
    for number in range(1, total + 1):
        root = tmp_path / f"broken{number}"

        def doomed(root: Path = root, number: int = number) -> None:
            die_before_change(root, number)
            Store(root).step(step, config, start=start, seed=3)

        assert ended(fork(doomed)) == -signal.SIGKILL
        assert ended(fork(partial(doomed, number=again.randint(1, 30)))) in (0, -signal.SIGKILL)
        began = time.monotonic()
        run(lambda root=root: Store(root).step(step, config, start=start, seed=3))
        assert tree(root) == expected, f"killed before change {number} of {total}"
        assert time.monotonic() - began < 5, "a dead process on this machine must not be waited for"


def kill_after_a_checkpoint(root: Path, log: Path, config: Walk) -> None:
    pid = fork(lambda: pipeline(root, log, config))
    wait_for(root, "target/*.partial/work/*.safetensors")
    os.kill(pid, signal.SIGKILL)
    assert ended(pid) == -signal.SIGKILL


def wait_for(root: Path, pattern: str) -> Path:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if path := next(root.glob(pattern), None):
            return path
        time.sleep(0.002)
    raise AssertionError(f"no file {pattern} appeared")


def test_seconds_and_attempts_add_up_over_kills(tmp_path):
    config, root, log = Walk(steps=3, pause=0.1), tmp_path / "store", tmp_path / "log"
    kill_after_a_checkpoint(root, log, config)
    pipeline(root, log, config)
    timing = read_json(wait_for(root, "target/*/timing.json"))
    assert timing["attempts"] == 2
    assert 0.3 <= timing["seconds"] < 3
    assert timing["finished"].endswith("+00:00")


def test_a_resumed_step_is_reported(tmp_path):
    config, root, log, events = Walk(steps=4, pause=0.1), tmp_path / "store", tmp_path / "log", []
    kill_after_a_checkpoint(root, log, config)
    pipeline(root, log, config, events.append)
    kinds = [event.kind for event in events if event.step == "target"]
    assert kinds[0] == "resume"
    assert kinds[-1] == "done"
    assert 1 <= kinds.count("progress") < config.steps
    assert [event.kind for event in events if event.step == "split"] == ["cached"]


def test_many_processes_run_a_step_once(tmp_path):
    config = Walk(steps=3, pause=0.02)
    for number in range(4):
        root, log, gate = (
            tmp_path / f"store{number}",
            tmp_path / f"{number}.log",
            time.monotonic() + 0.05,
        )

        def body(root: Path = root, log: Path = log, gate: float = gate) -> None:
            time.sleep(max(0, gate - time.monotonic()))  # so that they race to create the store
            pipeline(root, log, config)

        assert [ended(pid) for pid in [fork(body) for _ in range(4)]] == [0, 0, 0, 0]
        assert [line.split()[1] for line in log.read_text().splitlines()] == ["0", "1", "2"]
        assert len({line.split()[0] for line in log.read_text().splitlines()}) == 1
        assert not [name for name in tree(root) if ".partial" in name or ".lease" in name]


def test_many_waiters_take_over_from_a_dead_process_once(tmp_path):
    config = Walk(steps=3, pause=0.1)
    for number in range(4):
        root, log = tmp_path / f"store{number}", tmp_path / f"{number}.log"
        kill_after_a_checkpoint(root, log, config)
        assert len(list(root.glob("target/*.lease/*"))) == 1
        log.unlink()
        gate = time.monotonic() + 0.05

        def body(root: Path = root, log: Path = log, gate: float = gate) -> None:
            time.sleep(max(0, gate - time.monotonic()))
            pipeline(root, log, config)

        assert [ended(pid) for pid in [fork(body) for _ in range(4)]] == [0, 0, 0, 0]
        lines = [line.split() for line in log.read_text().splitlines()]
        assert [number for _, number in lines] == ["1", "2"]
        assert len({pid for pid, _ in lines}) == 1


def test_a_suspended_process_that_lost_its_lease_loads_the_result(tmp_path, monkeypatch):
    monkeypatch.setattr(lease_module, "HEARTBEAT_SECONDS", 0.05)
    monkeypatch.setattr(lease_module, "STALE_SECONDS", 1.0)
    config, root, log = Walk(steps=6, pause=0.03), tmp_path / "store", tmp_path / "log"
    run(lambda: pipeline(tmp_path / "unbroken", tmp_path / "other", config))
    sleeper = fork(lambda: pipeline(root, log, config))
    wait_for(root, "target/*.partial/work/*.safetensors")
    os.kill(sleeper, signal.SIGSTOP)
    events: list[Event] = []
    pipeline(root, log, config, events.append)
    assert [event.kind for event in events if event.step == "target"][:2] == ["waiting", "resume"]
    os.kill(sleeper, signal.SIGCONT)
    assert ended(sleeper) == 0
    assert tree(root) == tree(tmp_path / "unbroken")


def test_a_heartbeat_keeps_a_long_step_from_being_taken_over(tmp_path, monkeypatch):
    monkeypatch.setattr(lease_module, "HEARTBEAT_SECONDS", 0.05)
    monkeypatch.setattr(lease_module, "STALE_SECONDS", 1.0)
    config, root, log = Walk(steps=1, pause=2.5), tmp_path / "store", tmp_path / "log"
    worker = fork(lambda: pipeline(root, log, config))
    wait_for(root, "target/*.lease/*")
    events: list[Event] = []

    def listen(event: Event) -> None:
        assert (event.step, event.kind) not in {("target", "start"), ("target", "resume")}, (
            "taken over"
        )
        events.append(event)

    pipeline(root, log, config, listen)
    assert ended(worker) == 0
    waited = [event for event in events if event.step == "target"]
    assert [event.kind for event in waited] == ["waiting", "cached"]
    assert f"process {worker} on " in waited[0].note
    assert len(log.read_text().splitlines()) == 1
