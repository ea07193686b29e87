"""Steps: what the store computes, the events it reports, and the identity of one call."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import torch

from frostglass.store.keys import Product, digest, plain

T = TypeVar("T")
Kind = Literal["start", "resume", "progress", "done", "cached", "waiting"]


@dataclass(frozen=True)
class Step(Generic[T]):
    """One kind of work. Raise `version` when a change of its code changes its result.

    `make(config, seed=..., work=..., device=..., **inputs)` computes the product on `device`; that
    of a step that `trains` also takes `devices`, the number of processes that train together.
    `save(product, folder)` writes it as `*.safetensors` and `*.json`, and must not write anything
    that differs between two runs, such as run times. `load(folder, device)` reads it.
    `facts(product)` is recorded in the manifest for its readers.
    """

    name: str
    version: int
    make: Callable[..., T]
    save: Callable[[T, Path], None]
    load: Callable[[Path, torch.device], T]
    facts: Callable[[T], Mapping[str, Any]] = lambda _: {}
    trains: bool = False


class Event(NamedTuple):
    """What happens to a step, for progress bars."""

    step: str
    key: str
    kind: Kind
    done: int = 0
    total: int = 0
    note: str = ""


@dataclass(frozen=True)
class Task(Generic[T]):
    """One call of `Store.step`: the step, its arguments, and its place under the store's `root`."""

    step: Step[T]
    config: Any
    inputs: Mapping[str, Any]
    seed: int
    identity: Mapping[str, Any]
    key: str
    folder: Path

    @classmethod
    def of(
        cls, step: Step[T], config: Any, inputs: Mapping[str, Any], seed: int, root: Path
    ) -> "Task[T]":
        name = step.name
        identity = {
            "step": name,
            "version": step.version,
            "config": plain(config, f"{name} config", products=False),
            "inputs": {
                key: plain(inputs[key], f"{name} input {key}", products=True)
                for key in sorted(inputs)
            },
            "seed": plain(seed, f"{name} seed", products=False),
        }
        return cls(step, config, inputs, seed, identity, digest(identity), root / step.name)

    @property
    def final(self) -> Path:
        return self.folder / self.key

    @property
    def partial(self) -> Path:
        return self.folder / f"{self.key}.partial"

    @property
    def lease(self) -> Path:
        return self.folder / f"{self.key}.lease"


def with_key(product: T, key: str) -> T:
    """Return the product with its key, and with keys for its parts that have an empty one."""
    if not dataclasses.is_dataclass(product) or isinstance(product, type):
        return product
    parts = {field.name: getattr(product, field.name) for field in dataclasses.fields(product)}
    if "key" not in parts:
        return product
    keyed = {
        name: with_key(part, f"{key}.{name}")
        for name, part in parts.items()
        if isinstance(part, Product) and part.key == ""
    }
    return dataclasses.replace(product, **keyed, key=key)
