"""Private images at rest: permissions, git, purging, and what killed processes leave."""

import json
import os
import stat
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save as save_bytes

from commands import error_of, frostglass
from frostglass.auditing.run_folder import NUMBERS
from frostglass.auditing.steps import PRIVATE
from frostglass.core.errors import StoreError
from frostglass.report.build import build_report
from frostglass.runtime.processes import machine_name
from frostglass.store.files import Work
from frostglass.store.lease import Lease
from frostglass.store.purge import purge
from frostglass.store.store import Store
from killing import dead_owner, tree
from run_folders import BROKEN, make_run
from steps import Product, step

NAMES = [each.name for each in PRIVATE]


@pytest.fixture(autouse=True)
def generous():
    """Without a umask, only the code itself withholds permissions."""
    before = os.umask(0)
    yield
    os.umask(before)


def modes(root: Path) -> dict[str, int]:
    paths = (root, *root.rglob("*"))
    return {path.relative_to(root).as_posix(): stat.S_IMODE(path.stat().st_mode) for path in paths}


def private(root: Path) -> bool:
    """Whether a folder and all it holds is for its owner alone."""
    return all(
        mode == (0o700 if (root / name).is_dir() else 0o600) for name, mode in modes(root).items()
    )


def save_deep(product: Product, folder: Path) -> None:
    """Save with a library that knows nothing of permissions."""
    (folder / "deep").mkdir()
    for place in (folder, folder / "deep"):
        (place / "values.safetensors").write_bytes(save_bytes({"values": product.values}))


def stopping(config: Any, *, work: Work, **_: Any) -> Product:
    work.save("state", {"values": torch.ones(1)})
    raise KeyboardInterrupt


def test_a_store_is_for_its_owner_alone(tmp_path):
    store = Store(tmp_path / "deep" / "store")
    store.step(step(save=save_deep), None, seed=0)
    with pytest.raises(KeyboardInterrupt):
        store.step(step(stopping), 1, seed=0)
    assert private(store.root), modes(store.root)
    assert len(modes(store.root)) > 8
    assert stat.S_IMODE((tmp_path / "deep").stat().st_mode) == 0o777, "not the store's own"


def test_a_store_in_a_folder_that_others_may_read_is_shared(tmp_path):
    (tmp_path / "store").mkdir(0o750)
    store = Store(tmp_path / "store")
    store.step(step(save=save_deep), None, seed=0)
    assert set(modes(store.root).values()) == {0o750, 0o640}


def test_a_run_folder_and_its_report_are_for_their_owner_alone(tmp_path):
    run = make_run(tmp_path / "run", [BROKEN])
    build_report([run], run / "report.html")
    assert private(run), modes(run)
    assert {*NUMBERS, "report.html", "report.json"} < set(modes(run))


def test_stores_and_run_folders_are_ignored_by_git(tmp_path):
    Store(tmp_path / "store").step(step(), None, seed=0)
    make_run(tmp_path / "run", [BROKEN])
    for folder in ("store", "run"):
        assert (tmp_path / folder / ".gitignore").read_text() == "*\n"
    (tmp_path / "run" / ".gitignore").write_text("mine\n")
    make_run(tmp_path / "run", [BROKEN])
    assert (tmp_path / "run" / ".gitignore").read_text() == "mine\n"


def test_temporary_files_of_a_killed_run_are_removed_by_the_next(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".images.safetensors.0a1b2c3d.tmp").write_bytes(b"half")
    run = make_run(tmp_path / "run", [BROKEN])
    assert sorted(path.name for path in run.iterdir()) == sorted(
        [*NUMBERS, "manifest.json", ".gitignore"]
    )


def test_temporary_folders_of_dead_processes_are_removed_by_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dead, other = f"frostglass-{dead_owner()}", "frostglass-elsewhere-00000000~1~x"
    for name in (dead, other, f"frostglass-{machine_name()}~x~y"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "state.safetensors").write_bytes(b"faces")
    first, second = Work.scratch(), Work.scratch()
    assert not (tmp_path / dead).exists()
    assert len(list(tmp_path.iterdir())) == 4
    assert private(first.folder)
    assert second.folder.is_dir()


# Purging


def filled(root: Path) -> Store:
    store = Store(root)
    for name in (*NAMES, "scores"):
        for config in (1, 2):
            store.step(step(name=name), config, seed=0)
    with pytest.raises(KeyboardInterrupt):
        store.step(step(stopping, name=NAMES[0]), 3, seed=0)
    return store


def test_a_purge_leaves_the_rest_and_is_undone_by_computing_again(tmp_path):
    store = filled(tmp_path / "store")
    before = tree(store.root)
    purged = purge(Store(store.root), NAMES)
    assert [(kind.step, kind.steps) for kind in purged] == [
        *(("split", 3), ("release", 2), ("attack", 2))
    ]
    for kind in purged:
        files = [data for path, data in before.items() if path.startswith(f"{kind.step}/") and data]
        assert kind.bytes >= sum(map(len, files)) > 0
    left = tree(store.root)
    assert {path.split("/")[0] for path, data in left.items() if data} == {
        *("store.json", ".gitignore", "scores")
    }
    assert all(before[path] == data for path, data in left.items())
    again = Store(store.root)
    for name in (*NAMES, "scores"):
        for config in (1, 2):
            again.step(step(name=name), config, seed=0)
    after = tree(store.root)
    assert all(after[path] == data for path, data in before.items() if ".partial" not in path)
    assert [kind.steps for kind in purge(again, NAMES)] == [2, 2, 2]
    assert [(kind.steps, kind.bytes) for kind in purge(again, NAMES)] == [(0, 0)] * 3


def test_what_a_killed_purge_left_is_removed_by_the_next(tmp_path):
    store = Store(tmp_path)
    key = store.step(step(name="split"), None, seed=0).key
    (tmp_path / "split" / key).rename(tmp_path / "split" / f"{key}.purged-00")
    assert store.root.joinpath("split").is_dir()
    (kind,) = purge(store, ["split"])
    assert kind.steps == 1
    assert list((tmp_path / "split").iterdir()) == []


def test_the_command_names_what_it_removed_and_keeps_what_is_in_use(tmp_path):
    store = filled(tmp_path / "store")
    key = store.key(step(name="attack"), 1, seed=0)
    lease = Lease.claim(store.root / "attack" / f"{key}.lease")
    assert lease
    with lease:
        done = frostglass("store", "purge", "--store", store.root)
        assert done.code == 1
        assert done.out.splitlines()[0].startswith("split: 3 removed, 0.0 MB")
        assert "attack: 1 removed" in done.out
        assert f"in all 0.0 MB removed from {store.root}" in done.out
        assert f"kept attack {key[:8]}, which a process is working on: repeat" in done.err
        assert (store.root / "attack" / key / "manifest.json").is_file()
    done = frostglass("store", "purge", "--store", store.root, "--json")
    assert done.code == 0
    assert [kind["steps"] for kind in json.loads(done.out)["removed"]] == [0, 0, 1]
    assert not (store.root / "attack" / key).exists()


def test_a_folder_that_is_no_store_is_not_purged(tmp_path):
    with pytest.raises(StoreError, match="there is no store at"):
        purge(Store(tmp_path / "absent"), NAMES)
    assert not (tmp_path / "absent").exists()
    (tmp_path / "split").mkdir()
    (tmp_path / "split" / "photo.png").write_bytes(b"mine")
    assert "is not empty and has no store.json" in error_of(
        frostglass("store", "purge", "--store", tmp_path)
    )
    assert (tmp_path / "split" / "photo.png").read_bytes() == b"mine"
