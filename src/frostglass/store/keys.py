"""Keys: everything a result depends on, as plain JSON and as a hash."""

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path, PurePath
from typing import Any, Protocol, runtime_checkable

from pydantic import BaseModel

from frostglass.core.errors import ConfigError, StoreError
from frostglass.store.hashing import file_hash

PACKAGE = Path(__file__).resolve().parents[1]


@runtime_checkable
class Product(Protocol):
    """The result of a step, which stands for itself by its key; an empty one is not yet set."""

    @property
    def key(self) -> str: ...


class ReadsFiles(Protocol):
    def files(self) -> Sequence[Path | str]: ...


def fingerprint(method: ReadsFiles) -> str:
    """Hash the files a method reads, so that keys change when they do; "" if it reads none."""
    paths = sorted(map(Path, method.files()))
    total = hashlib.sha256()
    for path in paths:
        try:
            content = file_hash(path)
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
        # A file of the package is the same wherever it is installed.
        name = path.relative_to(PACKAGE) if path.is_relative_to(PACKAGE) else path
        total.update(f"{name}\0{content}\n".encode())
    return total.hexdigest() if paths else ""


def digest(identity: dict[str, Any]) -> str:
    """Return the key of a step: a hash of everything its result depends on."""
    text = json.dumps(identity, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def plain(value: Any, where: str, products: bool) -> Any:
    """Return a value as plain JSON. With `products`, a product is represented by its key."""
    if isinstance(value, Enum):
        return plain(value.value, where, products)
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        if math.isnan(value):
            raise StoreError(
                f"{where} is NaN, which equals nothing and cannot be part of a key: pass a number"
            )
        return float(value) if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, PurePath):
        return value.as_posix()
    if isinstance(value, list | tuple):
        return [plain(item, f"{where}[{index}]", products) for index, item in enumerate(value)]
    if isinstance(value, set | frozenset):
        return sorted((plain(item, where, products) for item in value), key=json.dumps)
    if isinstance(value, Mapping):
        if wrong := [name for name in value if not isinstance(name, str)]:
            raise StoreError(f"{where} has a key {wrong[0]!r} that is not text: use text keys")
        return {name: plain(item, f"{where}.{name}", products) for name, item in value.items()}
    if products and isinstance(value, Product):
        return _product_key(value, where)
    if isinstance(value, BaseModel):
        fields = {name: getattr(value, name) for name in type(value).model_fields}
        fields |= value.model_extra or {}
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        unkeyed = getattr(type(value), "unkeyed", {})  # only methods have it
        fields = {n: item for n, item in fields.items() if n not in unkeyed or item != unkeyed[n]}
    else:
        raise StoreError(
            f"{where} is a {type(value).__qualname__}, which is neither plain nor a product with "
            "a key: pass a step's product"
        )
    kind = _kind(type(value), fields)
    return {kind: {name: plain(item, f"{where}.{name}", products) for name, item in fields.items()}}


def _kind(cls: type, fields: Mapping[str, Any]) -> str:
    """Name a class: methods with equal fields differ, also two plugins of the same class name."""
    name = getattr(cls, "name", None)  # set by a registry; only methods have it
    kind = name if isinstance(name, str) and "name" not in fields else cls.__name__
    inside = cls.__module__.split(".")[0] == "frostglass"
    return kind if inside else f"{kind} ({cls.__module__}:{cls.__qualname__})"


def _product_key(product: Product, where: str) -> str:
    """Return the key of a product; that of a view of a target without a key starts with a colon."""
    key = product.key
    if not isinstance(key, str) or not key or key.startswith(":"):
        raise StoreError(
            f"{where} is a {type(product).__qualname__} without a key, so it cannot be told from "
            "others: pass what store.step returned"
        )
    return key
