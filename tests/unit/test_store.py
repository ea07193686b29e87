"""Keys, results on disk, refusals and leases of the store; kills and races are in test_store_kill.py."""

import dataclasses
import enum
import errno
import gc
import hashlib
import os
import resource
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pydantic
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from frostglass.core.errors import DataError, RunError, StoreError
from frostglass.core.types import Images, Split, Target
from frostglass.store import files as files_module
from frostglass.store import lease as lease_module
from frostglass.store import store as store_module
from frostglass.store.files import (
    Work,
    read_json,
    read_tensors,
    write_bytes,
    write_json,
    write_tensors,
)
from frostglass.store.lease import Lease, LeaseLost, owner_of
from frostglass.store.store import Event, Step, Store
from killing import run, tree


@dataclass(frozen=True)
class Product:
    values: Tensor
    key: str = ""


def make(config: Any, *inputs: Any, seed: int, work: Work) -> Product:
    return Product(torch.arange(4.0) + seed)


def save(product: Product, folder: Path) -> None:
    write_tensors(folder / "values.safetensors", {"values": product.values})


def load(folder: Path) -> Product:
    return Product(read_tensors(folder / "values.safetensors")[0]["values"])


def step(make=make, name="target", version=1, save=save, load=load) -> Step[Product]:
    return Step(name, version, make, save, load)


@dataclass(frozen=True)
class Bido:
    weight: float = 0.5


@dataclass(frozen=True)
class Mid:
    weight: float = 0.5


@pydantic.dataclasses.dataclass(frozen=True)
class Smoothing:
    weight: float = 0.5


class Training(pydantic.BaseModel):
    epochs: int = 3
    rate: float = 0.1
    defenses: tuple[Any, ...] = ()


class Size(enum.Enum):
    SMALL = "small"


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store")


# Keys


def test_the_key_is_the_hash_of_canonical_json(store):
    given = Product(torch.zeros(1), key="abc")
    text = '{"config":{"a":null,"b":[1,0.1,true,"x"]},"inputs":["abc",{"also":["abc"]}],"seed":7,"step":"target","version":2}'
    key = store.key(
        step(version=2), {"b": (1, 0.1, True, "x"), "a": None}, given, {"also": [given]}, seed=7
    )
    assert key == hashlib.sha256(text.encode()).hexdigest()[:24]


def test_everything_that_makes_a_result_changes_the_key(store):
    given = Product(torch.zeros(1), key="abc")
    keys = {
        store.key(step(), Bido(), given, seed=1),
        store.key(step(name="evaluator"), Bido(), given, seed=1),
        store.key(step(version=2), Bido(), given, seed=1),
        store.key(step(), Bido(0.6), given, seed=1),
        store.key(step(), Mid(), given, seed=1),
        store.key(step(), Smoothing(), given, seed=1),
        store.key(step(), [Bido()], given, seed=1),
        store.key(step(), Bido(), dataclasses.replace(given, key="abd"), seed=1),
        store.key(step(), Bido(), given, given, seed=1),
        store.key(step(), Bido(), seed=1),
        store.key(step(), Bido(), given, seed=2),
        store.key(step(), Bido(float("inf")), given, seed=1),
        store.key(step(), Bido("inf"), given, seed=1),
        store.key(step(), Bido(1), given, seed=1),
        store.key(step(), Bido(1.0), given, seed=1),
        store.key(step(), Bido(True), given, seed=1),
    }
    assert len(keys) == 16


def test_what_does_not_make_a_result_leaves_the_key(store):
    assert store.key(step(), {"a": 1, "b": 2}, seed=1) == store.key(
        step(), {"b": 2, "a": 1}, seed=1
    )
    assert store.key(step(), (1, 2), seed=1) == store.key(step(), [1, 2], seed=1)
    assert store.key(step(), {"x", "y", "z"}, seed=1) == store.key(step(), frozenset("zyx"), seed=1)
    assert store.key(step(), Size.SMALL, seed=1) == store.key(step(), "small", seed=1)
    assert store.key(step(), Path("a/b"), seed=1) == store.key(step(), "a/b", seed=1)
    first, second = Product(torch.zeros(1), key="k"), Product(torch.ones(9), key="k")
    assert store.key(step(), None, first, seed=1) == store.key(step(), None, second, seed=1)


def test_two_methods_with_equal_fields_differ_by_their_registered_names(store):
    @dataclass(frozen=True)
    class Method:
        weight: float = 0.5

    keys = []
    for name in ("ppa", "gmi"):
        Method.name = name
        keys.append(store.key(step(), Training(defenses=(Method(),)), seed=1))
    assert keys[0] != keys[1]
    assert store.key(step(), Training(), seed=1) not in keys


def test_a_pydantic_model_is_reduced_to_its_fields(store):
    store.step(step(), Training(epochs=5, defenses=(Bido(0.25), Smoothing())), seed=1)
    config = read_json(next(store.root.glob("target/*/manifest.json")))["config"]
    assert config == {
        "Training": {
            "epochs": 5,
            "rate": 0.1,
            "defenses": [{"Bido": {"weight": 0.25}}, {"Smoothing": {"weight": 0.5}}],
        }
    }


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (float("nan"), r"target config\.rate\[0\] is NaN"),
        (
            torch.zeros(1),
            r"target config\.rate\[0\] is a Tensor, which is neither plain nor a product",
        ),
        (len, r"target config\.rate\[0\] is a builtin_function_or_method"),
        (Bido, r"target config\.rate\[0\] is a type"),
        (numpy.int64(1), r"target config\.rate\[0\] is a int64"),
        ({1: 2}, r"target config\.rate\[0\] has a key 1 that is not text"),
        (Product(torch.zeros(1), key="abc"), r"target config\.rate\[0\]\.values is a Tensor"),
    ],
)
def test_a_config_that_cannot_be_part_of_a_key_is_refused(store, value, message):
    with pytest.raises(StoreError, match=message):
        store.key(step(), {"rate": [value]}, seed=1)


def test_inputs_without_a_key_are_refused(store):
    with pytest.raises(
        StoreError,
        match=r"target input 1\[0\] is a Product without a key.*pass what store.step returned",
    ):
        store.key(step(), None, "fine", [Product(torch.zeros(1))], seed=1)
    with pytest.raises(
        StoreError,
        match="target input 0 is a Linear, which is neither plain nor a product with a key",
    ):
        store.key(step(), None, nn.Linear(1, 1), seed=1)
    target = Target(nn.Linear(1, 1), ("a",), (1, 1, 1), head="")
    with pytest.raises(StoreError, match="target input 0 is a ModelView without a key"):
        store.key(step(), None, target.view(["scores"]), seed=1)


def test_a_view_stands_for_its_target_and_its_access(store):
    target = Target(nn.Linear(1, 1), ("a",), (1, 1, 1), head="", key="abc")
    scores, gradients = (
        store.key(step(), None, target.view([access]), seed=1) for access in ("scores", "gradients")
    )
    assert scores != gradients


# Results


def test_a_step_runs_once_and_is_then_found(tmp_path):
    calls, events = [], []

    def counted(config: Any, *, seed: int, work: Work) -> Product:
        calls.append((config, seed))
        work.progress(1, 2, "half")
        return Product(torch.full((2,), 3.0))

    first = Store(tmp_path / "store", events.append)
    assert not first.has(step(counted), {"a": 1}, seed=5)
    assert not (tmp_path / "store").exists(), "asking makes nothing"
    made = first.step(step(counted), {"a": 1}, seed=5)
    key = first.key(step(counted), {"a": 1}, seed=5)
    assert made.key == key
    assert torch.equal(made.values, torch.full((2,), 3.0))
    assert first.has(step(counted), {"a": 1}, seed=5)
    assert first.step(step(counted), {"a": 1}, seed=5) is made, "kept in memory"
    again = Store(tmp_path / "store").step(step(counted), {"a": 1}, seed=5)
    assert again is not made
    assert again.key == key
    assert torch.equal(again.values, made.values)
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


def test_the_product_is_what_was_read_not_what_was_made(store):
    lossy = step(
        save=lambda product, folder: write_json(folder / "sum.json", float(product.values.sum()))
    )
    lossy = dataclasses.replace(
        lossy, load=lambda folder: Product(torch.tensor(read_json(folder / "sum.json")))
    )
    assert store.step(lossy, None, seed=0).values == 6.0


def test_parts_of_a_product_get_keys_of_their_own(store):
    @dataclass(frozen=True)
    class Pair:
        private: Product
        given: Product
        note: str = ""
        key: str = ""

    pair = Pair(Product(torch.zeros(1)), Product(torch.zeros(1), key="given"))
    found = store.step(
        Step(
            "split",
            1,
            lambda config, seed, work: pair,
            lambda product, folder: None,
            lambda folder: pair,
        ),
        None,
        seed=0,
    )
    assert (found.private.key, found.given.key, found.note) == (f"{found.key}.private", "given", "")
    store.key(step(), None, found.private, seed=0)


def test_a_split_can_be_an_input_as_a_whole_and_in_parts(store):
    images = Images(
        torch.zeros(1, 3, 2, 2, dtype=torch.uint8),
        torch.zeros(1, dtype=torch.int64),
        ("a",),
        ("a.png",),
    )
    split = Split(images, images, images, images)
    found = store.step(
        Step(
            "split",
            1,
            lambda config, seed, work: split,
            lambda product, folder: None,
            lambda folder: split,
        ),
        None,
        seed=0,
    )
    keys = {
        store.key(step(), None, part, seed=0)
        for part in (found, found.train, found.validation, found.test, found.public)
    }
    assert len(keys) == 5


def test_a_product_that_is_no_dataclass_is_returned_as_it_is(store):
    rows = Step(
        "scores",
        1,
        lambda config, seed, work: [1, 2],
        lambda found, folder: write_json(folder / "rows.json", found),
        load_rows,
    )
    assert store.step(rows, None, seed=0) == [1, 2]


def load_rows(folder: Path) -> list[int]:
    return read_json(folder / "rows.json")


def test_the_manifest_tells_what_made_the_result(store):
    given = Product(torch.zeros(1), key="abc")
    product = store.step(step(), {"rate": 0.5}, given, seed=3)
    folder = store.root / "target" / product.key
    manifest = read_json(folder / "manifest.json")
    data = (folder / "values.safetensors").read_bytes()
    assert manifest["files"] == {
        "values.safetensors": {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    }
    assert (manifest["step"], manifest["version"], manifest["seed"], manifest["key"]) == (
        "target",
        1,
        3,
        product.key,
    )
    assert (manifest["config"], manifest["inputs"]) == ({"rate": 0.5}, ["abc"])
    assert manifest["packages"]["torch"] == torch.__version__
    assert manifest["packages"]["numpy"] == numpy.__version__
    assert set(manifest["packages"]) == {"frostglass", "numpy", "python", "torch"}
    assert manifest["device"]
    assert set(manifest) == {
        "key",
        "step",
        "version",
        "config",
        "inputs",
        "seed",
        "packages",
        "device",
        "commit",
        "facts",
        "files",
    }
    assert manifest["facts"] == {}
    assert set(read_json(folder / "timing.json")) == {"attempts", "seconds", "finished"}
    assert read_json(store.root / "store.json") == {"format": 1}


def test_two_stores_hold_the_same_bytes(tmp_path):
    for name in ("one", "two"):
        Store(tmp_path / name).step(step(), {"rate": 0.5}, seed=3)
        time.sleep(0.01)
    assert tree(tmp_path / "one") == tree(tmp_path / "two")
    assert len(tree(tmp_path / "one")) == 5


def test_the_commit_is_read_from_loose_packed_and_detached_heads(tmp_path, monkeypatch):
    module = tmp_path / "src" / "frostglass" / "experiments" / "store.py"
    git = tmp_path / ".git"
    monkeypatch.setattr(store_module, "__file__", str(module))
    assert store_module._commit() is None
    (git / "refs" / "heads").mkdir(parents=True)
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    assert store_module._commit() is None
    (git / "packed-refs").write_text(
        f"# pack-refs\n{'a' * 40} refs/heads/other\n{'b' * 40} refs/heads/main\n"
    )
    assert store_module._commit() == "b" * 40
    (git / "refs" / "heads" / "main").write_text("c" * 40 + "\n")
    assert store_module._commit() == "c" * 40
    (git / "HEAD").write_text("d" * 40 + "\n")
    assert store_module._commit() == "d" * 40


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

    deep = step(save=save_deep, load=lambda folder: load(folder / "deep"))
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


def test_a_flipped_bit_is_found(store, finished):
    flip(finished / "values.safetensors")
    with pytest.raises(
        StoreError,
        match=rf"values.safetensors is corrupted.*delete the folder {finished} and run again",
    ):
        Store(store.root).step(step(), None, seed=0)


def test_large_files_are_checked_by_size_alone(store, finished, monkeypatch):
    monkeypatch.setattr(store_module, "HASHED_BELOW", 10)
    flip(finished / "values.safetensors")
    Store(store.root).step(step(), None, seed=0)
    with open(finished / "values.safetensors", "ab") as file:
        file.write(b"x")
    with pytest.raises(StoreError, match="has another size"):
        Store(store.root).step(step(), None, seed=0)


def test_a_missing_file_is_found(store, finished):
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
def test_a_manifest_that_is_not_the_steps_is_found(store, finished, text, message):
    if text is None:
        (finished / "manifest.json").unlink()
    else:
        (finished / "manifest.json").write_text(text)
    with pytest.raises(StoreError, match=message):
        Store(store.root).step(step(), None, seed=0)


# The folder


def test_a_folder_that_is_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(
        StoreError,
        match=r"is not empty and has no store.json \(found thesis.txt\): use another folder or delete it",
    ):
        Store(tmp_path)
    with pytest.raises(StoreError, match="is a file and a store is a folder: use another path"):
        Store(tmp_path / "thesis.txt")
    assert tree(tmp_path) == {"thesis.txt": b"mine"}


@pytest.mark.parametrize("content", ['{"format": 2}', '"old"', "[]"])
def test_another_format_is_refused(tmp_path, content):
    (tmp_path / "store.json").write_text(content)
    with pytest.raises(
        StoreError, match=r"is a store of format .*, expected 1: use another folder or delete it"
    ):
        Store(tmp_path)


def test_an_empty_folder_and_a_half_made_store_become_stores(tmp_path):
    (tmp_path / ".store.json.0a1b2c3d.tmp").write_text("{")
    Store(tmp_path).step(step(), None, seed=0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["store.json", "target"]


def test_a_folder_that_turned_into_something_else_before_the_first_step_is_refused(tmp_path):
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
            match=f"{store.root} cannot be written .*{os.strerror(code)}.*: use another folder or change",
        ):
            store.step(step(), 1, seed=0)
    Store(tmp_path / "existing").step(step(), None, seed=0)  # reading needs no writing


def test_a_store_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match="cannot be written"):
        Store(tmp_path / "file" / "store").step(step(), None, seed=0)


# Full disks


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_says_how_to_go_on_and_keeps_checkpoints(store, monkeypatch, code):
    synced, room = os.fsync, [True]

    def sync(descriptor: int) -> None:
        if not room[0]:
            raise OSError(code, os.strerror(code))
        synced(descriptor)

    def filling(config: Any, *, seed: int, work: Work) -> Product:
        found = work.load("first")
        if not found:
            work.save("first", {"values": torch.ones(3)})
            room[0] = False
        work.save("second", {"values": torch.ones(3)})
        return Product(torch.tensor(float(found is not None)))

    monkeypatch.setattr(os, "fsync", sync)
    with pytest.raises(
        RunError,
        match=r"no space left.*free some and run the same command again: finished steps and checkpoints",
    ) as caught:
        store.step(step(filling), None, seed=0)
    assert caught.value.exit_code == 1
    names = [path.name for path in store.root.rglob("*") if path.is_file()]
    assert sorted(names) == ["first.safetensors", "store.json", "timing.json"], (
        "no lease and no half-written file stays"
    )
    room[0] = True
    assert store.step(step(filling), None, seed=0).values == 1.0


def save_directly(product: Product, folder: Path) -> None:
    save_file({"values": product.values}, folder / "values.safetensors")


@pytest.mark.parametrize("save", [save, save_directly])
def test_a_real_file_size_limit_while_saving(store, save):
    large = step(lambda config, seed, work: Product(torch.zeros(100_000)), save=save)

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
        with pytest.raises(RunError, match="no space left"):
            store.step(large, None, seed=0)

    run(limited)
    assert not list(store.root.glob("target/*.lease"))
    assert len(store.step(large, None, seed=0).values) == 100_000


def test_other_errors_of_the_system_pass(store):
    def failing(config: Any, *, seed: int, work: Work) -> Product:
        raise FileNotFoundError(errno.ENOENT, "no such picture")

    with pytest.raises(FileNotFoundError, match="no such picture"):
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

    def stopping(config: Any, *, seed: int, work: Work) -> Product:
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

    def looking(config: Any, *, seed: int, work: Work) -> Product:
        assert list(work.folder.iterdir()) == []
        assert [path.name for path in partial.iterdir() if path.name != "timing.json"] == ["work"]
        return Product(torch.zeros(1))

    store.step(step(looking), None, seed=0)
    assert not partial.exists()


def test_leftovers_beside_a_finished_step_are_swept_when_it_is_found(store, finished):
    (finished.with_name(f"{finished.name}.partial") / "work").mkdir(parents=True)
    dead = dead_owner()
    for folder in (f"{finished.name}.lease", f"{finished.name}.lease-{dead}"):
        finished.with_name(folder).mkdir()
        (finished.with_name(folder) / dead).touch()
    Store(store.root).step(step(), None, seed=0)
    assert list(finished.parent.iterdir()) == [finished]


def dead_owner() -> str:
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)
    return f"{lease_module._machine()}~{pid}~00"


# Leases


def test_a_lease_has_one_owner(tmp_path):
    with Lease.claim(tmp_path / "x.lease") as lease:
        assert owner_of(tmp_path / "x.lease") == lease.owner
        assert f"~{os.getpid()}~" in lease.owner
        assert Lease.claim(tmp_path / "x.lease") is None
        lease.check()
        assert [path.name for path in tmp_path.iterdir()] == ["x.lease"]
    assert list(tmp_path.iterdir()) == []
    assert owner_of(tmp_path / "x.lease") == ""


def test_a_dead_owner_on_this_machine_is_evicted_at_once(tmp_path):
    (tmp_path / "x.lease").mkdir()
    (tmp_path / "x.lease" / dead_owner()).touch()
    with Lease.claim(tmp_path / "x.lease") as lease:
        assert os.listdir(tmp_path / "x.lease") == [lease.owner]


@pytest.mark.parametrize(("age", "taken"), [(50, False), (70, True)])
@pytest.mark.parametrize("owner", ["elsewhere-00000000~1~00", "not an owner"])
def test_an_owner_elsewhere_is_evicted_after_a_minute_of_silence(tmp_path, owner, age, taken):
    (tmp_path / "x.lease").mkdir()
    beat = tmp_path / "x.lease" / owner
    beat.touch()
    os.utime(beat, (time.time() - age, time.time() - age))
    lease = Lease.claim(tmp_path / "x.lease")
    assert (lease is not None) == taken
    assert beat.exists() != taken


def test_an_owner_of_another_machine_is_not_judged_by_its_process_number(tmp_path):
    machine, pid, token = dead_owner().split("~")
    (tmp_path / "x.lease").mkdir()
    (tmp_path / "x.lease" / f"other-{machine}~{pid}~{token}").touch()
    assert Lease.claim(tmp_path / "x.lease") is None


def test_a_late_eviction_does_not_hurt_the_next_owner(tmp_path, monkeypatch):
    """Two waiters judge the same lease stale; the slower one acts when the faster one already owns it."""
    place = tmp_path / "x.lease"
    place.mkdir()
    (place / dead_owner()).touch()
    judged, winner = lease_module._stale, []

    def slow(path: Path, owner: str, now: float) -> bool:
        verdict = judged(path, owner, now)
        if not winner:
            winner.append("about to be")
            winner[0] = Lease.claim(place)
        return verdict

    monkeypatch.setattr(lease_module, "_stale", slow)
    assert Lease.claim(place) is None
    assert os.listdir(place) == [winner[0].owner]
    winner[0].check()


def test_losing_a_lease_is_noticed_and_leaves_the_next_owner_alone(tmp_path):
    with Lease.claim(tmp_path / "x.lease") as lost:
        (tmp_path / "x.lease" / lost.owner).unlink()
        with Lease.claim(tmp_path / "x.lease") as next_owner:
            with pytest.raises(LeaseLost, match=r"x.lease was taken over by another process"):
                lost.check()
            lost.__exit__()
            next_owner.check()
        assert list(tmp_path.iterdir()) == []


def test_claims_in_the_making_are_not_swept(tmp_path):
    living = tmp_path / f"x.lease-{lease_module._machine()}~{os.getpid()}~00"
    living.mkdir()  # made a progress ago, its owner's file not yet
    dead = tmp_path / f"x.lease-{dead_owner()}"
    dead.mkdir()
    with Lease.claim(tmp_path / "x.lease") as lease:
        lease.sweep()
    assert list(tmp_path.iterdir()) == [living]


@pytest.mark.parametrize("use", ["save", "own file", "nothing"])
def test_a_step_whose_lease_is_lost_takes_the_result_of_whoever_took_over(store, use):
    runs = []

    def overtaken(config: Any, *, seed: int, work: Work) -> Product:
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


def test_a_step_whose_lease_is_lost_does_not_write_over_the_checkpoints_of_the_next_owner(store):
    runs = []

    def overtaken(config: Any, *, seed: int, work: Work) -> Product:
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


def test_a_result_that_came_first_stands(store, monkeypatch):
    """The lease is lost after its last check: two results are ready, and the first one published is everybody's."""
    publish = store_module._publish

    def too_late(result: Path, final: Path) -> None:
        shutil.copytree(result, final)
        (result / "values.safetensors").write_bytes(b"the slower one")
        publish(result, final)

    monkeypatch.setattr(store_module, "_publish", too_late)
    assert torch.equal(store.step(step(), None, seed=0).values, torch.arange(4.0))
    assert [path.suffix for path in (store.root / "target").iterdir()] == [""]


# Files and work


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
    found, values = work.load("state")
    assert str(folder) not in Path("/proc/self/maps").read_text(), (
        "a loaded tensor holds on to no file"
    )
    assert list(found) == sorted(tensors)
    assert all(
        torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype
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
    with pytest.raises(StoreError, match="a checkpoint's name is made of letters"):
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
