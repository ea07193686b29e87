"""Remove steps from a store; the others stay, and a run that needs a removed one makes it again."""

import os
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from frostglass.core.errors import StoreError
from frostglass.store.files import remove_tree
from frostglass.store.lease import Lease
from frostglass.store.store import MARKER, Store, usable

KEY = re.compile("[0-9a-f]{24}")


@dataclass(frozen=True)
class Purged:
    """How many steps of one kind were removed, their size, and the keys of those in use."""

    step: str
    steps: int
    bytes: int
    in_use: tuple[str, ...]


def purge(store: Store, names: Sequence[str]) -> list[Purged]:
    """Remove the steps of these names, unfinished ones too, unless a process works on them."""
    if not (store.root / MARKER).is_file():
        raise StoreError(f"there is no store at {store.root}: give --store the folder of one")
    with usable(store.root):
        return [_purge_kind(store.root / name) for name in names]


def _purge_kind(folder: Path) -> Purged:
    entries = sorted(folder.iterdir()) if folder.is_dir() else []
    found = dict.fromkeys(entry.name.partition(".")[0] for entry in entries if entry.is_dir())
    steps, size, in_use = 0, 0, []
    for key in filter(KEY.fullmatch, found):
        lease = Lease.claim(folder / f"{key}.lease")
        if lease is None:
            in_use.append(key)
            continue
        with lease:
            lease.sweep()
            removed = _remove(folder, key)
        steps, size = steps + (removed is not None), size + (removed or 0)
    return Purged(folder.name, steps, size, tuple(in_use))


def _remove(folder: Path, key: str) -> int | None:
    """Remove the result and the checkpoints of a step; return their size, None if there are none.

    They are renamed first: a purge that is killed leaves no step without some of its files.
    """
    for path in (folder / key, folder / f"{key}.partial"):
        if path.is_dir():
            os.rename(path, folder / f"{key}.purged-{secrets.token_hex(4)}")
    leftovers = list(folder.glob(f"{key}.purged-*"))
    files = [path for each in leftovers for path in each.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    for each in leftovers:
        remove_tree(each)
    return size if leftovers else None
