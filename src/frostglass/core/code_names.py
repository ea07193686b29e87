"""Names of code in records that files hold: a file of weights must not make anything run."""

from collections.abc import Iterator, Mapping
from typing import Any

LIBRARIES = ("timm", "torchvision")  # their networks are named like code, and are known


def named_code(record: Any) -> str:
    """Return the first name of code or of a generator's source in nested values; "" if none.

    Methods are named by `name`, networks by `model`, generators by `source`, at any depth: a method
    may take another one as a parameter.
    """
    return next(_codes(record), "")


def _codes(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        source = str(value.get("source") or "")
        if source and not source.isidentifier():  # a bare word is a choice, as of decoys
            yield source
        for name in (value.get("name"), value.get("model")):
            if isinstance(name, str) and ":" in name and name.partition(":")[0] not in LIBRARIES:
                yield name
        for inner in value.values():
            yield from _codes(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _codes(inner)
