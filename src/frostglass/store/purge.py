"""Look into a store, and remove steps: a run that needs a removed one computes it again."""

import os
import re
import secrets
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from frostglass.store.files import remove_tree
from frostglass.store.lease import Lease, living_owner
from frostglass.store.store import Store, usable

KEY = re.compile("[0-9a-f]{24}")
UNFINISHED = (".partial", ".purged-")  # what a key is followed by in the names of such folders


@dataclass(frozen=True)
class Unfinished:
    """A step that a stopped run left, or that a process is working on now (`owner`)."""

    step: str
    key: str
    bytes: int
    changed: str
    owner: str


@dataclass(frozen=True)
class Kind:
    """The steps of one name in a store: finished ones, their size, and unfinished ones."""

    step: str
    steps: int
    bytes: int
    unfinished: tuple[Unfinished, ...]


@dataclass(frozen=True)
class Purged:
    """How many steps of one kind were removed, their size, and the keys of those in use."""

    step: str
    steps: int
    bytes: int
    in_use: tuple[str, ...]


def contents(store: Store) -> list[Kind]:
    """List what a store holds, by kind of step; writes nothing."""
    store.check_exists()
    with usable(store.root):
        return [_contents(folder) for folder in _kinds(store)]


def purge(store: Store, names: Sequence[str]) -> list[Purged]:
    """Remove the steps of these names, unfinished ones too, unless a process works on them."""
    store.check_exists()
    with usable(store.root):
        return [_purge_kind(store.root / name, ("", *UNFINISHED)) for name in names]


def clean(store: Store) -> list[Purged]:
    """Remove unfinished steps of all kinds, unless a process works on them."""
    store.check_exists()
    with usable(store.root):
        return [_purge_kind(folder, UNFINISHED) for folder in _kinds(store)]


def _kinds(store: Store) -> list[Path]:
    return sorted(path for path in store.root.iterdir() if path.is_dir())


def _contents(folder: Path) -> Kind:
    finished = [path for path in folder.iterdir() if KEY.fullmatch(path.name)]
    left = [_unfinished(path) for path in _parts(folder, "*", UNFINISHED)]
    return Kind(folder.name, len(finished), _size(finished), tuple(left))


def _unfinished(path: Path) -> Unfinished:
    key = path.name.partition(".")[0]
    times = [0.0]
    with suppress(FileNotFoundError):  # a living process changes it while it is listed
        times += [each.stat().st_mtime for each in (path, *path.rglob("*"))]
    changed = datetime.fromtimestamp(max(times), UTC).isoformat(timespec="seconds")
    owner = living_owner(path.with_name(f"{key}.lease"))
    return Unfinished(path.parent.name, key, _size([path]), changed, owner)


def _parts(folder: Path, key: str, parts: Iterable[str]) -> list[Path]:
    """Return the folders of one step, or of all (`*`), whose names end in one of these ways."""
    patterns = [f"{key}{part}*" if part.endswith("-") else f"{key}{part}" for part in parts]
    found = (path for pattern in patterns for path in folder.glob(pattern) if path.is_dir())
    return sorted(path for path in found if KEY.fullmatch(path.name.partition(".")[0]))


def _size(folders: Iterable[Path]) -> int:
    size = 0
    for path in (each for folder in folders for each in folder.rglob("*")):
        with suppress(FileNotFoundError):
            size += path.stat().st_size if path.is_file() else 0
    return size


def _purge_kind(folder: Path, parts: Sequence[str]) -> Purged:
    """Remove these parts of the steps of one kind; leases of dead processes go with them."""
    entries = sorted(folder.iterdir()) if folder.is_dir() else []
    names = [path.name for path in entries if path.is_dir()]
    found = dict.fromkeys(name.partition(".")[0] for name in names if "." in name or "" in parts)
    keys, steps, size = list(filter(KEY.fullmatch, found)), 0, 0
    for ask in (Lease.claim, Lease.claim_after_watching):  # silent owners are watched together
        busy = []
        for key in keys:
            lease = ask(folder / f"{key}.lease")
            if lease is None:
                busy.append(key)
                continue
            with lease:
                lease.sweep()
                removed = _remove(folder, key, parts)
            steps, size = steps + (removed is not None), size + (removed or 0)
        keys = busy
    return Purged(folder.name, steps, size, tuple(keys))


def _remove(folder: Path, key: str, parts: Sequence[str]) -> int | None:
    """Remove parts of a step, such as its checkpoints; return their size, None if there are none.

    They are renamed first: a purge that is killed leaves no step without some of its files.
    """
    for path in _parts(folder, key, parts):
        if ".purged-" not in path.name:
            os.rename(path, folder / f"{key}.purged-{secrets.token_hex(4)}")
    leftovers = _parts(folder, key, [".purged-"])
    size = _size(leftovers)
    for each in leftovers:
        remove_tree(each)
    return size if leftovers else None
