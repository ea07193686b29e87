"""What stopped runs leave in a store: it is listed, resumed or removed, and damage is no crash."""

import json
import os
from typing import Any

import pytest
import torch

from commands import error_of, frostglass
from frostglass.store import lease as lease_module
from frostglass.store.files import Work, read_json, write_json
from frostglass.store.lease import Lease
from frostglass.store.store import Store
from killing import dead_owner, tree
from steps import Product, step

DAMAGED_TIMINGS = [
    None, "", "{", "[]", "{}", '{"attempts": 1}', '{"attempts": "1", "seconds": 1.0}',
    '{"attempts": 1, "seconds": NaN}', '{"attempts": 1, "seconds": 1, "conditions": [1]}',
]  # fmt: skip


def stopping(config: Any, *, work: Work, **_: Any) -> Product:
    """Stop after a checkpoint; the next attempt finishes."""
    if work.load("state") is None:
        work.save("state", {"values": torch.ones(1)})
        raise KeyboardInterrupt
    return Product(torch.zeros(1))


def leave_unfinished(root, name="target", config=None):
    store = Store(root)
    with pytest.raises(KeyboardInterrupt):
        store.step(step(stopping, name=name), config, seed=0)
    return store.key(step(name=name), config, seed=0)


@pytest.mark.parametrize("timing", DAMAGED_TIMINGS)
def test_an_unfinished_step_without_its_timing_is_resumed_and_its_conditions_are_unknown(
    tmp_path, caplog, timing
):
    key = leave_unfinished(tmp_path)
    file = tmp_path / "target" / f"{key}.partial" / "timing.json"
    file.unlink() if timing is None else file.write_text(timing)
    store, events = Store(tmp_path, listener=lambda event: events.append(event.kind)), []
    store.step(step(stopping), None, seed=0)
    assert events == ["resume", "done"]
    assert "timing.json is missing or damaged: checkpoints are kept" in caplog.text
    unknown, here = read_json(tmp_path / "target" / key / "manifest.json")["conditions"]
    assert set(unknown.values()) == {"unknown"}
    assert set(unknown) == set(here)
    assert "threads: " in store.mixed_conditions()


def test_a_step_that_left_no_checkpoint_needs_no_timing(tmp_path, caplog):
    key = leave_unfinished(tmp_path)
    partial = tmp_path / "target" / f"{key}.partial"
    (partial / "timing.json").write_text("{")
    (partial / "work" / "state.safetensors").unlink()
    Store(tmp_path).step(step(), None, seed=0)
    assert caplog.text == ""


@pytest.mark.parametrize("damage", [{"conditions": "x"}, {"conditions": [3]}, {"packages": []}])
def test_a_manifest_with_damaged_conditions_is_no_crash(tmp_path, damage):
    key = Store(tmp_path).step(step(), None, seed=0).key
    path = tmp_path / "target" / key / "manifest.json"
    write_json(path, read_json(path) | {"conditions": []} | damage)
    store = Store(tmp_path)
    store.step(step(), None, seed=0)
    store.step(step(), 2, seed=0)
    assert "torch version: " in store.mixed_conditions()


def test_unfinished_steps_of_other_configs_are_listed_and_removed(tmp_path):
    Store(tmp_path).step(step(), 1, seed=0)
    finished = tree(tmp_path)
    keys = [leave_unfinished(tmp_path, "target", 2), leave_unfinished(tmp_path, "attack", 3)]
    (tmp_path / "attack" / f"{keys[1]}.partial" / "timing.json").write_text("{")
    lease = tmp_path / "target" / f"{keys[0]}.lease"
    lease.mkdir()
    (lease / dead_owner()).touch()
    before = tree(tmp_path)
    shown = frostglass("store", "show", "--store", tmp_path)
    assert (shown.code, shown.err, tree(tmp_path)) == (0, "", before)
    lines = shown.out.splitlines()
    assert lines[:2] == [
        "attack: 0 finished, 0.0 MB, shows private people",
        "target: 1 finished, 0.0 MB",
    ]
    assert lines[2].startswith(f"unfinished: attack {keys[1][:8]}, 0.0 MB, changed 2")
    assert lines[3].startswith(f"unfinished: target {keys[0][:8]}")
    assert all(line.endswith(": left by a stopped run") for line in lines[2:4])
    assert "`frostglass store clean` removes" in lines[-1]
    done = frostglass("store", "clean", "--store", tmp_path)
    assert done.code == 0
    assert done.out.splitlines()[:2] == ["attack: 1 removed, 0.0 MB", "target: 1 removed, 0.0 MB"]
    left = {path: data for path, data in tree(tmp_path).items() if path != "attack"}
    assert left == finished
    kinds = json.loads(frostglass("store", "show", "--store", tmp_path, "--json").out)["kinds"]
    assert [kind["unfinished"] for kind in kinds] == [[], []]


def test_a_step_that_a_process_works_on_is_kept(tmp_path):
    key = leave_unfinished(tmp_path)
    with Lease.claim(tmp_path / "target" / f"{key}.lease"):
        assert "process " in frostglass("store", "show", "--store", tmp_path).out
        done = frostglass("store", "clean", "--store", tmp_path)
        assert done.code == 1
        assert f"kept target {key[:8]}, which a process is working on" in done.err
        assert (tmp_path / "target" / f"{key}.partial").is_dir()


def test_what_a_dead_machine_left_is_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(lease_module, "STALE_SECONDS", 0.05)
    monkeypatch.setattr(lease_module, "HEARTBEAT_SECONDS", 0.02)
    key = leave_unfinished(tmp_path)
    lease = tmp_path / "target" / f"{key}.lease"
    lease.mkdir()
    (lease / "elsewhere-00000000~1~00").touch()
    assert "process 1 on elsewhere" in frostglass("store", "show", "--store", tmp_path).out
    assert frostglass("store", "clean", "--store", tmp_path).code == 0
    assert list((tmp_path / "target").iterdir()) == []


@pytest.mark.parametrize("command", ["show", "clean", "purge"])
def test_a_named_pipe_as_the_mark_of_a_store_is_refused_at_once(tmp_path, command):
    os.mkfifo(tmp_path / "store.json")
    message = f"{tmp_path / 'store.json'} is no regular file: use another folder"
    assert error_of(frostglass("store", command, "--store", tmp_path)) == message


@pytest.mark.parametrize("command", ["show", "clean", "purge"])
def test_a_folder_that_is_no_store(tmp_path, command):
    message = f"there is no store at {tmp_path / 'none'}: give --store the folder of one"
    assert error_of(frostglass("store", command, "--store", tmp_path / "none")) == message
