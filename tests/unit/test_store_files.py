"""Files written by the store and the checkpoints of a running step."""

import errno
import gc
import os
from pathlib import Path

import pytest
import torch

from frostglass.core.errors import StoreError
from frostglass.store import files as files_module
from frostglass.store import store as store_module
from frostglass.store.files import (
    Work,
    read_json,
    read_tensors,
    write_bytes,
    write_json,
    write_tensors,
)
from frostglass.store.store import Store
from steps import step


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store")


def test_work_without_a_store(tmp_path):
    work = Work.scratch()
    folder = work.folder
    assert work.names() == []
    assert work.load("state") is None
    generator = torch.Generator().manual_seed(1)
    tied = torch.ones(2)
    tensors = {
        "b": tied,
        "a": tied,
        "rng": generator.get_state(),
        "t": torch.arange(6).reshape(2, 3).t(),
        "none": torch.zeros(0, 3),
    }
    work.save("state", tensors, {"best": float("inf"), "list": [1, None], "done": 3})
    work.save("shard-0001.5", {"x": torch.ones(1, requires_grad=True)})
    assert work.names() == ["shard-0001.5", "state"]
    loaded, values = work.load("state")
    assert str(folder) not in Path("/proc/self/maps").read_text(), (
        "a loaded tensor keeps no file open"
    )
    assert list(loaded) == sorted(tensors)
    assert all(
        torch.equal(loaded[name], tensor) and loaded[name].dtype == tensor.dtype
        for name, tensor in tensors.items()
    )
    assert values == {"best": float("inf"), "list": [1, None], "done": 3}
    work.save("state", {"a": torch.zeros(1)})
    assert work.load("state")[1] == {}
    work.progress(1, 2)
    del work
    gc.collect()
    assert not folder.exists()


@pytest.mark.parametrize("name", ["", "../up", ".hidden", "a/b", "a b"])
def test_a_checkpoint_name_that_is_no_file_name_is_refused(name):
    with pytest.raises(StoreError, match="a checkpoint's name must be made of letters"):
        Work.scratch().save(name, {})


def test_a_checkpoint_replaced_while_writing_fails_stays_the_old_one(monkeypatch):
    work = Work.scratch()
    work.save("state", {"a": torch.ones(1)}, {"done": 1})

    def fail(_: int) -> None:
        raise OSError(errno.EIO, "lost")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="lost"):
        work.save("state", {"a": torch.zeros(1)}, {"done": 2})
    assert work.load("state")[1] == {"done": 1}
    assert [path.name for path in work.folder.iterdir()] == ["state.safetensors"]


def test_a_file_is_synced_before_it_is_renamed_and_its_folder_after(tmp_path, monkeypatch):
    done = []
    synced, replaced = os.fsync, os.replace

    def sync(descriptor: int) -> None:
        done.append(f"sync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).suffix or 'folder'}")
        synced(descriptor)

    def replace(*paths: Path) -> None:
        done.append("rename")
        replaced(*paths)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", replace)
    write_bytes(tmp_path / "x", b"1")
    assert done == ["sync .tmp", "rename", "sync folder"]


def test_a_result_is_synced_before_it_is_published(store, monkeypatch):
    done = []
    synced, renamed = os.fsync, os.rename

    def sync(descriptor: int) -> None:
        done.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        synced(descriptor)

    def rename(source: Path, target: Path) -> None:
        done.append(f"publish {target.name}")
        renamed(source, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(store_module.os, "rename", rename)
    key = store.key(step(), None, seed=0)
    store.step(step(), None, seed=0)
    at = done.index(f"publish {key}")
    before = {path.name for path in done[:at] if isinstance(path, Path) and "result-" in str(path)}
    assert {"values.safetensors", "manifest.json", "timing.json"} <= before
    assert done[at + 1] == store.root / "target"


def test_equal_content_gives_equal_bytes(tmp_path):
    tensors = {f"t{number}": torch.full((number + 1,), number) for number in range(20)}
    write_tensors(tmp_path / "one", tensors, {"b": 1, "a": 2})
    write_tensors(tmp_path / "two", dict(reversed(tensors.items())), {"a": 2, "b": 1})
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    write_json(tmp_path / "three", {"b": 1, "a": "é\udcff"})
    write_json(tmp_path / "four", {"a": "é\udcff", "b": 1})
    assert (tmp_path / "three").read_bytes() == (tmp_path / "four").read_bytes()
    assert read_json(tmp_path / "three") == {"a": "é\udcff", "b": 1}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {1, 2}, torch.zeros(1)])
def test_results_hold_finite_plain_values(tmp_path, value):
    with pytest.raises(
        StoreError, match=r"cannot write scores.json, which takes plain JSON values"
    ):
        write_json(tmp_path / "scores.json", {"accuracy": value})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04 a pickle", b"\xff" * 40])
def test_a_file_that_is_no_safetensors_is_refused(tmp_path, data):
    (tmp_path / "x.safetensors").write_bytes(data)
    with pytest.raises(StoreError, match=r"x.safetensors is not a whole safetensors file .*delete"):
        read_tensors(tmp_path / "x.safetensors")


def test_a_tree_that_another_process_removes_too_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "x" / "y").mkdir(parents=True)
    remove, calls = files_module.shutil.rmtree, []

    def racing(folder: Path) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise FileNotFoundError
        remove(folder)

    monkeypatch.setattr(files_module.shutil, "rmtree", racing)
    files_module.remove_tree(tmp_path / "x")
    assert not (tmp_path / "x").exists()
    assert len(calls) == 2
