"""Full disks, interruptions and lost leases: checkpoints and other results stay intact."""

import errno
import os
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from frostglass.core.errors import DataError, RunError
from frostglass.store import store as store_module
from frostglass.store.files import Work
from frostglass.store.lease import LeaseLost, owner_of
from frostglass.store.store import Store
from killing import dead_owner, run
from steps import Product, save, step


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store")


# Full disks


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_reported_and_keeps_checkpoints(store, monkeypatch, code):
    synced, room = os.fsync, [True]

    def sync(descriptor: int) -> None:
        if not room[0]:
            raise OSError(code, os.strerror(code))
        synced(descriptor)

    def filling(config: Any, *, work: Work, **_: Any) -> Product:
        checkpoint = work.load("first")
        if not checkpoint:
            work.save("first", {"values": torch.ones(3)})
            room[0] = False
        work.save("second", {"values": torch.ones(3)})
        return Product(torch.tensor(float(checkpoint is not None)))

    monkeypatch.setattr(os, "fsync", sync)
    with pytest.raises(
        RunError,
        match=r"no space left.*free some and run the same command again",
    ) as caught:
        store.step(step(filling), None, seed=0)
    assert caught.value.exit_code == 1
    names = [path.name for path in store.root.rglob("*") if path.is_file()]
    assert sorted(names) == [".gitignore", "first.safetensors", "store.json", "timing.json"], (
        "no lease and no half-written file stays"
    )
    room[0] = True
    assert store.step(step(filling), None, seed=0).values == 1.0


def save_directly(product: Product, folder: Path) -> None:
    save_file({"values": product.values}, folder / "values.safetensors")


@pytest.mark.parametrize("save", [save, save_directly])
def test_a_real_file_size_limit_while_saving(store, save):
    large = step(lambda _, **__: Product(torch.zeros(100_000)), save=save)

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
        with pytest.raises(RunError, match="no space left"):
            store.step(large, None, seed=0)

    run(limited)
    assert not list(store.root.glob("target/*.lease"))
    assert len(store.step(large, None, seed=0).values) == 100_000


def test_other_errors_of_the_system_pass(store):
    def failing(config: Any, *, work: Work, **_: Any) -> Product:
        raise FileNotFoundError(errno.ENOENT, "no such image")

    with pytest.raises(FileNotFoundError, match="no such image"):
        store.step(step(failing), None, seed=0)
    with pytest.raises(SafetensorError, match="No such file"):
        store.step(
            step(save=lambda product, folder: save_directly(product, folder / "absent")),
            None,
            seed=0,
        )
    assert not list(store.root.glob("target/*.lease"))


# Interruptions


@pytest.mark.parametrize("failure", [KeyboardInterrupt, DataError("bad"), ZeroDivisionError])
def test_a_failure_keeps_checkpoints_and_releases_the_lease(store, failure):
    events = []
    store = Store(store.root, events.append)

    def stopping(config: Any, *, work: Work, **_: Any) -> Product:
        if not work.names():
            work.save("state", {"values": torch.ones(1)}, {"done": 1})
            raise failure
        tensors, values = work.load("state")
        return Product(tensors["values"] + values["done"])

    with pytest.raises(failure if isinstance(failure, type) else type(failure)):
        store.step(step(stopping), None, seed=0)
    assert not store.has(step(stopping), None, seed=0)
    assert [path.suffix for path in (store.root / "target").iterdir()] == [".partial"]
    assert store.step(step(stopping), None, seed=0).values == 2.0
    assert [event.kind for event in events] == ["start", "resume", "done"]
    assert [path.suffix for path in (store.root / "target").iterdir()] == [""]


def test_leftovers_of_a_killed_attempt_are_not_published(store):
    key = store.key(step(), None, seed=0)
    partial = store.root / "target" / f"{key}.partial"
    store.step(step(), 1, seed=0)
    for path in (
        "work/.state.safetensors.00.tmp",
        "result-dead/values.safetensors",
        ".timing.json.00.tmp",
    ):
        (partial / path).parent.mkdir(parents=True, exist_ok=True)
        (partial / path).write_bytes(b"half")

    def check_clean(config: Any, *, work: Work, **_: Any) -> Product:
        assert list(work.folder.iterdir()) == []
        assert [path.name for path in partial.iterdir() if path.name != "timing.json"] == ["work"]
        return Product(torch.zeros(1))

    store.step(step(check_clean), None, seed=0)
    assert not partial.exists()


def test_leftovers_beside_a_finished_step_are_removed_when_it_is_loaded(store):
    finished = store.root / "target" / store.step(step(), None, seed=0).key
    (finished.with_name(f"{finished.name}.partial") / "work").mkdir(parents=True)
    dead = dead_owner()
    for folder in (f"{finished.name}.lease", f"{finished.name}.lease-{dead}"):
        finished.with_name(folder).mkdir()
        (finished.with_name(folder) / dead).touch()
    Store(store.root).step(step(), None, seed=0)
    assert list(finished.parent.iterdir()) == [finished]


# Lost leases


@pytest.mark.parametrize("use", ["save", "own file", "nothing"])
def test_a_step_whose_lease_is_lost_loads_the_result_of_the_next_owner(store, use):
    runs = []

    def overtaken(config: Any, *, work: Work, **_: Any) -> Product:
        runs.append(1)
        if len(runs) == 1:
            place = next(store.root.glob("target/*.lease"))
            (place / owner_of(place)).unlink()
            Store(store.root).step(step(overtaken), None, seed=0)
            if use == "save":
                work.save("state", {"values": torch.ones(1)})
            if use == "own file":
                (work.folder / "mine").write_text("x")
        return Product(torch.tensor(float(len(runs))))

    assert store.step(step(overtaken), None, seed=0).values == 2.0
    assert len(runs) == 2
    assert [path.suffix for path in (store.root / "target").iterdir()] == [""]


def test_a_step_whose_lease_is_lost_cannot_overwrite_checkpoints_of_the_next_owner(store):
    runs = []

    def overtaken(config: Any, *, work: Work, **_: Any) -> Product:
        runs.append(1)
        if len(runs) == 1:
            work.save("state", {"values": torch.ones(1)})
            place = next(store.root.glob("target/*.lease"))
            (place / owner_of(place)).unlink()
            with pytest.raises(LeaseLost):
                work.save("state", {"values": torch.zeros(1)})
            work.save("state", {"values": torch.zeros(1)})
        return Product(work.load("state")[0]["values"])

    assert store.step(step(overtaken), None, seed=0).values == 1.0
    assert len(runs) == 2


def test_the_first_of_two_results_counts(store, monkeypatch):
    """The lease is lost after its last check: of two results the first one published counts."""
    publish = store_module._publish

    def too_late(result: Path, final: Path) -> None:
        shutil.copytree(result, final)
        (result / "values.safetensors").write_bytes(b"the slower one")
        publish(result, final)

    monkeypatch.setattr(store_module, "_publish", too_late)
    assert torch.equal(store.step(step(), None, seed=0).values, torch.arange(4.0))
    assert [path.suffix for path in (store.root / "target").iterdir()] == [""]
