"""Results of the store, damage to them, and folders it refuses; kills are in test_store_kill.py."""

import dataclasses
import errno
import hashlib
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from frostglass.core.errors import StoreError
from frostglass.core.types import Images, Split
from frostglass.runtime.device import default_device
from frostglass.store import hashing
from frostglass.store import manifest as manifest_module
from frostglass.store import store as store_module
from frostglass.store.files import Work, read_json, write_json
from frostglass.store.step import Event
from frostglass.store.store import Store
from killing import tree
from steps import Product, fixed, load, save, step


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store")


# Results


def test_a_step_runs_once_and_is_then_loaded(tmp_path):
    calls, events = [], []

    def counted(config: Any, *, seed: int, work: Work, **_: Any) -> Product:
        calls.append((config, seed))
        work.progress(1, 2, "half")
        return Product(torch.full((2,), 3.0))

    first = Store(tmp_path / "store", events.append)
    assert not first.has(step(counted), {"a": 1}, seed=5)
    assert not (tmp_path / "store").exists(), "has() writes nothing"
    product = first.step(step(counted), {"a": 1}, seed=5)
    key = first.key(step(counted), {"a": 1}, seed=5)
    assert product.key == key
    assert torch.equal(product.values, torch.full((2,), 3.0))
    assert first.has(step(counted), {"a": 1}, seed=5)
    assert first.step(step(counted), {"a": 1}, seed=5) is product, "kept in memory"
    again = Store(tmp_path / "store").step(step(counted), {"a": 1}, seed=5)
    assert again is not product
    assert again.key == key
    assert torch.equal(again.values, product.values)
    assert calls == [({"a": 1}, 5)]
    assert events == [
        Event("target", key, "start"),
        Event("target", key, "progress", 1, 2, "half"),
        Event("target", key, "done"),
        Event("target", key, "cached"),
    ]


def test_memory_keeps_a_few_products_only(store):
    first = store.step(step(), 0, seed=0)
    for number in range(1, store_module.REMEMBERED):
        store.step(step(), number, seed=0)
    assert store.step(step(), 0, seed=0) is first, "used again, so it stays"
    store.step(step(), -1, seed=0)
    assert store.step(step(), 0, seed=0) is first
    assert len(store._loaded) == store_module.REMEMBERED


def test_the_product_is_read_from_disk(store):
    lossy = step(
        save=lambda product, folder: write_json(folder / "sum.json", float(product.values.sum()))
    )
    lossy = dataclasses.replace(
        lossy, load=lambda folder, _: Product(torch.tensor(read_json(folder / "sum.json")))
    )
    assert store.step(lossy, None, seed=0).values == 6.0


def test_parts_of_a_product_get_keys_of_their_own(store):
    @dataclass(frozen=True)
    class Pair:
        private: Product
        keyed: Product
        note: str = ""
        key: str = ""

    pair = Pair(Product(torch.zeros(1)), Product(torch.zeros(1), key="keyed"))
    product = store.step(fixed("split", pair), None, seed=0)
    assert (product.private.key, product.keyed.key, product.note) == (
        f"{product.key}.private",
        "keyed",
        "",
    )
    store.key(step(), None, base=product.private, seed=0)


def test_a_split_can_be_an_input_as_a_whole_and_in_parts(store):
    images = Images(
        torch.zeros(1, 3, 2, 2, dtype=torch.uint8),
        torch.zeros(1, dtype=torch.int64),
        ("a",),
        ("a.png",),
    )
    split = Split(images, images, images, images)
    product = store.step(fixed("split", split), None, seed=0)
    keys = {
        store.key(step(), None, base=part, seed=0)
        for part in (product, product.train, product.validation, product.test, product.public)
    }
    assert len(keys) == 5


def test_a_product_that_is_no_dataclass_is_returned_as_it_is(store):
    assert store.step(fixed("scores", [1, 2]), None, seed=0) == [1, 2]


def test_steps_run_and_load_on_the_device_of_the_store(tmp_path):
    devices = []

    def record(config: Any, *, device: torch.device, **_: Any) -> Product:
        devices.append(device)
        return Product(torch.zeros(1))

    def load_on(folder: Path, device: torch.device) -> Product:
        devices.append(device)
        return Product(load(folder, device).values.to(device))

    store = Store(tmp_path, device=torch.device("meta"))
    assert store.step(step(record, load=load_on), None, seed=0).values.is_meta
    assert devices == [torch.device("meta")] * 2
    assert Store(tmp_path).device == default_device()
    assert Store(tmp_path).has(step(), None, seed=0), "the device is not part of the key"


def test_the_manifest_records_what_made_the_result(store):
    base = Product(torch.zeros(1), key="abc")
    product = store.step(step(), {"rate": 0.5}, base=base, seed=3)
    folder = store.root / "target" / product.key
    manifest = read_json(folder / "manifest.json")
    data = (folder / "values.safetensors").read_bytes()
    assert manifest["files"] == {
        "values.safetensors": {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    }
    assert (manifest["step"], manifest["version"], manifest["seed"], manifest["key"]) == (
        *("target", 1, 3),
        product.key,
    )
    assert (manifest["config"], manifest["inputs"]) == ({"rate": 0.5}, {"base": "abc"})
    assert manifest["packages"]["torch"] == torch.__version__
    assert manifest["packages"]["numpy"] == numpy.__version__
    assert set(manifest["packages"]) == {"frostglass", "numpy", "python", "torch"}
    assert manifest["device"]
    assert set(manifest) == {
        *("key", "step", "version", "config", "inputs", "seed"),
        *("packages", "device", "commit", "conditions", "facts", "files"),
    }
    assert manifest["facts"] == {}
    assert set(read_json(folder / "timing.json")) == {"attempts", "seconds", "finished"}
    assert read_json(store.root / "store.json") == {"format": 2}


def test_two_stores_hold_the_same_bytes(tmp_path):
    for name in ("one", "two"):
        Store(tmp_path / name).step(step(), {"rate": 0.5}, seed=3)
        time.sleep(0.01)
    assert tree(tmp_path / "one") == tree(tmp_path / "two")
    assert len(tree(tmp_path / "one")) == 6


def test_the_commit_is_read_from_loose_packed_and_detached_heads(tmp_path, monkeypatch):
    module = tmp_path / "src" / "frostglass" / "store" / "manifest.py"
    git = tmp_path / ".git"
    monkeypatch.setattr(manifest_module, "__file__", str(module))
    assert manifest_module._commit() is None
    (git / "refs" / "heads").mkdir(parents=True)
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    assert manifest_module._commit() is None
    (git / "packed-refs").write_text(
        f"# pack-refs\n{'a' * 40} refs/heads/other\n{'b' * 40} refs/heads/main\n"
    )
    assert manifest_module._commit() == "b" * 40
    (git / "refs" / "heads" / "main").write_text("c" * 40 + "\n")
    assert manifest_module._commit() == "c" * 40
    (git / "HEAD").write_text("d" * 40 + "\n")
    assert manifest_module._commit() == "d" * 40


def test_a_step_may_not_save_the_stores_own_files(store):
    with pytest.raises(
        StoreError,
        match=r"step 'target' saved a file named manifest.json, which the store writes itself",
    ):
        store.step(
            step(save=lambda product, folder: write_json(folder / "manifest.json", 1)), None, seed=0
        )


def test_sub_folders_are_kept_and_checked(store):
    def save_deep(product: Product, folder: Path) -> None:
        (folder / "deep").mkdir()
        save(product, folder / "deep")

    deep = step(save=save_deep, load=lambda folder, device: load(folder / "deep", device))
    product = store.step(deep, None, seed=0)
    (store.root / "target" / product.key / "deep" / "values.safetensors").write_bytes(b"")
    with pytest.raises(StoreError, match=r"deep/values.safetensors is missing or has another size"):
        Store(store.root).step(deep, None, seed=0)


# Damage


@pytest.fixture
def finished(store):
    product = store.step(step(), None, seed=0)
    return store.root / "target" / product.key


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_a_flipped_bit_is_detected(store, finished):
    flip(finished / "values.safetensors")
    with pytest.raises(
        StoreError,
        match=rf"values.safetensors is corrupted.*delete the folder {finished} and run again",
    ):
        Store(store.root).step(step(), None, seed=0)


def test_a_flipped_bit_of_a_large_file_is_detected(store):
    size = 2**28 + 1  # bytes; a hole on the disk

    def save_large(product: Product, folder: Path) -> None:
        save(product, folder)
        with open(folder / "large.bin", "wb") as file:
            file.truncate(size)

    large = step(save=save_large)
    folder = store.root / "target" / store.step(large, None, seed=0).key
    with open(folder / "large.bin", "r+b") as file:
        file.seek(size // 2)
        file.write(b"\x01")
    with pytest.raises(StoreError, match=r"large.bin is corrupted"):
        Store(store.root).step(large, None, seed=0)


def test_a_result_is_hashed_again_only_if_its_files_changed(store, finished, monkeypatch):
    path, read = finished / "values.safetensors", []
    read_file = hashing._read
    monkeypatch.setattr(hashing, "_read", lambda each: read.append(each) or read_file(each))
    for seconds in (1_000, 1_000, 2_000):
        os.utime(path, (seconds, seconds))
        Store(store.root).step(step(), None, seed=0)
    assert read == [path, path]


def test_a_missing_file_is_detected(store, finished):
    (finished / "values.safetensors").unlink()
    with pytest.raises(StoreError, match=r"values.safetensors is missing"):
        Store(store.root).step(step(), None, seed=0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "has no manifest.json"),
        ("{", "manifest.json is not JSON"),
        ('{"key": "other"}', "manifest.json does not describe this step"),
    ],
)
def test_a_wrong_manifest_is_detected(store, finished, text, message):
    if text is None:
        (finished / "manifest.json").unlink()
    else:
        (finished / "manifest.json").write_text(text)
    with pytest.raises(StoreError, match=message):
        Store(store.root).step(step(), None, seed=0)


# The folder


def test_a_folder_that_is_not_a_store_is_refused(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(
        StoreError,
        match=r"is not empty and has no store.json \(found thesis.txt\): use another folder",
    ):
        Store(tmp_path)
    with pytest.raises(StoreError, match="is a file and a store is a folder: use another path"):
        Store(tmp_path / "thesis.txt")
    assert tree(tmp_path) == {"thesis.txt": b"mine"}


@pytest.mark.parametrize("content", ['{"format": 1}', '"old"', "[]"])
def test_another_format_is_refused(tmp_path, content):
    (tmp_path / "store.json").write_text(content)
    with pytest.raises(
        StoreError, match=r"is a store of format .*, expected 2: use another folder or delete it"
    ):
        Store(tmp_path)


def test_an_empty_folder_and_an_unfinished_store_become_stores(tmp_path):
    (tmp_path / ".store.json.0a1b2c3d.tmp").write_text("{")
    Store(tmp_path).step(step(), None, seed=0)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *(".gitignore", "store.json", "target")
    ]


def test_a_folder_filled_by_others_before_the_first_step_is_refused(tmp_path):
    store = Store(tmp_path / "store")
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "thesis.txt").write_text("mine")
    with pytest.raises(StoreError, match=r"has no store.json"):
        store.step(step(), None, seed=0)


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS])
def test_a_folder_that_cannot_be_written_is_refused(tmp_path, monkeypatch, code):
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    fresh, existing = Store(tmp_path / "fresh"), Store(tmp_path / "existing")
    existing.step(step(), None, seed=0)
    monkeypatch.setattr(os, "mkdir", refuse)
    for store in (fresh, existing):
        with pytest.raises(
            StoreError,
            match=f"{store.root} cannot be written .*{os.strerror(code)}.*: use another folder",
        ):
            store.step(step(), 1, seed=0)
    Store(tmp_path / "existing").step(step(), None, seed=0)  # reading needs no writing


def test_a_store_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match="cannot be written"):
        Store(tmp_path / "file" / "store").step(step(), None, seed=0)
