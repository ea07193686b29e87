"""A small step for tests of the store."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from frostglass.store.files import Work, read_tensors, write_tensors
from frostglass.store.step import Step


@dataclass(frozen=True)
class Product:
    values: Tensor
    key: str = ""


def make(config: Any, *, seed: int, work: Work, device: torch.device, **inputs: Any) -> Product:
    return Product(torch.arange(4.0) + seed)


def save(product: Product, folder: Path) -> None:
    write_tensors(folder / "values.safetensors", {"values": product.values})


def load(folder: Path, device: torch.device) -> Product:
    return Product(read_tensors(folder / "values.safetensors")[0]["values"])


def step(
    make: Callable[..., Any] = make,
    name: str = "target",
    version: int = 1,
    save: Callable[..., None] = save,
    load: Callable[..., Any] = load,
) -> Step[Any]:
    return Step(name, version, make, save, load)


def fixed(name: str, product: Any) -> Step[Any]:
    """A step that always makes and loads the same product, and saves nothing."""
    return Step(name, 1, lambda _, **__: product, lambda *_: None, lambda *_: product)
