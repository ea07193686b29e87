"""Keys: whatever a result depends on, as plain JSON and as a hash."""

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from enum import Enum
from pathlib import PurePath
from typing import Any

from pydantic import BaseModel

from frostglass.core.errors import StoreError


def digest(identity: dict[str, Any]) -> str:
    """The key of a step: a hash of everything its result depends on."""
    text = json.dumps(identity, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def plain(value: Any, where: str, products: bool) -> Any:
    """A value as plain JSON. With `products`, whatever carries a key stands for itself by that key."""
    if isinstance(value, Enum):
        return plain(value.value, where, products)
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        if math.isnan(value):
            raise StoreError(
                f"{where} is NaN, which equals nothing and so cannot be part of a key: give a number"
            )
        return float(value) if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, PurePath):
        return value.as_posix()
    if isinstance(value, list | tuple):
        return [plain(item, f"{where}[{place}]", products) for place, item in enumerate(value)]
    if isinstance(value, set | frozenset):
        return sorted((plain(item, where, products) for item in value), key=json.dumps)
    if isinstance(value, Mapping):
        if odd := [name for name in value if not isinstance(name, str)]:
            raise StoreError(
                f"{where} has a key {odd[0]!r} that is not text: only text can be a key in JSON"
            )
        return {name: plain(item, f"{where}.{name}", products) for name, item in value.items()}
    if products and hasattr(value, "key"):
        return _product_key(value, where)
    if isinstance(value, BaseModel):
        fields = {name: getattr(value, name) for name in type(value).model_fields} | (
            value.model_extra or {}
        )
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    else:
        raise StoreError(
            f"{where} is a {type(value).__qualname__}, which is neither plain nor a product with a key: pass a step's product"
        )
    # The class is part of what was asked for: two methods with equal fields are two methods.
    name = getattr(type(value), "name", None)
    kind = name if isinstance(name, str) and "name" not in fields else type(value).__name__
    return {kind: {name: plain(item, f"{where}.{name}", products) for name, item in fields.items()}}


def _product_key(product: Any, where: str) -> str:
    """The key of a product; a view of a target without one has a key that starts with a colon."""
    if not isinstance(product.key, str) or not product.key or product.key.startswith(":"):
        raise StoreError(
            f"{where} is a {type(product).__qualname__} without a key, which could be taken for any other: pass what store.step returned"
        )
    return product.key
