"""Keys of steps: what changes them, what does not, and what is refused."""

import dataclasses
import enum
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pydantic
import pytest
import torch
from torch import nn

from frostglass.core.assets import Assets
from frostglass.core.errors import StoreError
from frostglass.core.types import Target
from frostglass.store import hashing
from frostglass.store.keys import fingerprint, plain
from frostglass.store.store import Store
from steps import Product, step


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


def test_the_key_is_the_hash_of_canonical_json(store):
    product = Product(torch.zeros(1), key="abc")
    text = (
        '{"config":{"a":null,"b":[1,0.1,true,"x"]},"inputs":{"first":"abc","second":'
        '{"also":["abc"]}},"seed":7,"step":"target","version":2}'
    )
    config = {"b": (1, 0.1, True, "x"), "a": None}
    key = store.key(step(version=2), config, second={"also": [product]}, first=product, seed=7)
    assert key == hashlib.sha256(text.encode()).hexdigest()[:24]


def test_everything_that_makes_a_result_changes_the_key(store):
    product = Product(torch.zeros(1), key="abc")
    keys = {
        store.key(step(), Bido(), base=product, seed=1),
        store.key(step(name="evaluator"), Bido(), base=product, seed=1),
        store.key(step(version=2), Bido(), base=product, seed=1),
        store.key(step(), Bido(0.6), base=product, seed=1),
        store.key(step(), Mid(), base=product, seed=1),
        store.key(step(), Smoothing(), base=product, seed=1),
        store.key(step(), [Bido()], base=product, seed=1),
        store.key(step(), Bido(), base=dataclasses.replace(product, key="abd"), seed=1),
        store.key(step(), Bido(), base=product, second=product, seed=1),
        store.key(step(), Bido(), renamed=product, seed=1),
        store.key(step(), Bido(), seed=1),
        store.key(step(), Bido(), base=product, seed=2),
        store.key(step(), Bido(float("inf")), base=product, seed=1),
        store.key(step(), Bido("inf"), base=product, seed=1),
        store.key(step(), Bido(1), base=product, seed=1),
        store.key(step(), Bido(1.0), base=product, seed=1),
        store.key(step(), Bido(True), base=product, seed=1),
    }
    assert len(keys) == 17


def test_what_does_not_make_a_result_leaves_the_key(store):
    key = store.key(step(), {"a": 1, "b": 2}, seed=1)
    assert key == store.key(step(), {"b": 2, "a": 1}, seed=1)
    assert store.key(step(), (1, 2), seed=1) == store.key(step(), [1, 2], seed=1)
    assert store.key(step(), {"x", "y", "z"}, seed=1) == store.key(step(), frozenset("zyx"), seed=1)
    assert store.key(step(), Size.SMALL, seed=1) == store.key(step(), "small", seed=1)
    assert store.key(step(), Path("a/b"), seed=1) == store.key(step(), "a/b", seed=1)
    first, second = Product(torch.zeros(1), key="k"), Product(torch.ones(9), key="k")
    assert store.key(step(), None, base=first, seed=1) == store.key(
        step(), None, base=second, seed=1
    )


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


def test_a_pydantic_model_is_reduced_to_its_fields():
    config = Training(epochs=5, defenses=(Bido(0.25), Smoothing()))
    defenses = [{kind(Bido): {"weight": 0.25}}, {kind(Smoothing): {"weight": 0.5}}]
    fields = {"epochs": 5, "rate": 0.1, "defenses": defenses}
    assert plain(config, "config", products=False) == {kind(Training): fields}


def kind(cls: type) -> str:
    return f"{cls.__name__} ({cls.__module__}:{cls.__name__})"


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        ("frostglass.defenses.bido", "bido"),
        ("one.plugin", "bido (one.plugin:Method)"),
        ("another.plugin", "bido (another.plugin:Method)"),
    ],
)
def test_a_method_is_keyed_by_its_name_and_a_plugin_by_its_module_too(module, expected):
    method = dataclasses.make_dataclass("Method", [("weight", float)], frozen=True)
    method.__module__, method.name = module, "bido"
    assert plain(method(0.5), "config", products=False) == {expected: {"weight": 0.5}}


def test_a_dataclass_without_a_key_stands_for_the_keys_of_its_fields(store):
    target = Target(nn.Linear(1, 1), ("a",), (1, 1, 1), head="", key="abc")
    assets = Assets(embedder=target)
    assert plain(assets, "assets", products=True) == {
        "Assets": dict.fromkeys(field.name for field in dataclasses.fields(Assets))
        | {"embedder": "abc"}
    }
    other = dataclasses.replace(assets, embedder=None, perceptual=target)
    keys = {store.key(step(), None, assets=case, seed=1) for case in (assets, other, Assets())}
    assert len(keys) == 3
    without = Assets(embedder=dataclasses.replace(target, key=""))
    with pytest.raises(StoreError, match=r"input assets\.embedder is a Target without a key"):
        store.key(step(), None, assets=without, seed=1)


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
        match=r"target input bases\[0\] is a Product without a key.*pass what store.step returned",
    ):
        store.key(step(), None, note="fine", bases=[Product(torch.zeros(1))], seed=1)
    with pytest.raises(
        StoreError,
        match="target input base is a Linear, which is neither plain nor a product with a key",
    ):
        store.key(step(), None, base=nn.Linear(1, 1), seed=1)
    target = Target(nn.Linear(1, 1), ("a",), (1, 1, 1), head="")
    with pytest.raises(StoreError, match="target input base is a ModelView without a key"):
        store.key(step(), None, base=target.view(["scores"]), seed=1)


def test_a_view_stands_for_its_target_and_its_access(store):
    target = Target(nn.Linear(1, 1), ("a",), (1, 1, 1), head="", key="abc")
    scores, gradients = (
        store.key(step(), None, base=target.view([access]), seed=1)
        for access in ("scores", "gradients")
    )
    assert scores != gradients


@dataclass(frozen=True)
class Reads:
    path: Path

    def files(self):
        return [self.path]


def test_a_file_is_hashed_once_until_it_changes(tmp_path, monkeypatch):
    path, read = tmp_path / "weights", []
    read_file = hashing._read
    monkeypatch.setattr(hashing, "_read", lambda each: read.append(each) or read_file(each))

    def written(text, seconds):
        path.write_text(text)
        os.utime(path, (seconds, seconds))
        return [fingerprint(Reads(path)) for _ in range(3)]

    old, new = written("one", 1_000), written("two", 2_000)
    assert len(set(old)) == len(set(new)) == 1
    assert old != new
    assert len(read) == 2


def test_a_recent_file_is_hashed_again(tmp_path):
    """Two writes may have the same size and time."""
    path, found = tmp_path / "weights", set()
    for text in ("one", "two"):
        path.write_text(text)
        found.add(fingerprint(Reads(path)))
    assert len(found) == 2
