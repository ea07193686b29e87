"""Records of run folders in the store that made them: which bytes a run wrote.

The hashes inside a run folder are no signature. Who edits the folder and its hashes would have to
edit the store too.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from frostglass.core.errors import StoreError
from frostglass.store.files import read_json, write_json
from frostglass.store.hashing import file_hash
from frostglass.store.step import Step
from frostglass.store.store import Store


def _make(files: Mapping[str, Any], **_: Any) -> dict[str, Any]:
    return dict(files)


def _save(files: Mapping[str, Any], folder: Path) -> None:
    write_json(folder / "record.json", files)


def _load(folder: Path, device: torch.device) -> Any:
    return read_json(folder / "record.json")


RUN = Step("run", 1, _make, _save, _load)


def record_run(store: str, folder: Path, names: Sequence[str]) -> None:
    """Record the files of a run in its store; one that is read-only stays without a record."""
    with suppress(StoreError):
        Store(store).step(RUN, _files(folder, names), seed=0)


def is_recorded(store: Store, folder: Path, names: Sequence[str]) -> bool:
    """Return whether a run that used this store wrote exactly these files."""
    return store.has(RUN, _files(folder, names), seed=0)


def _files(folder: Path, names: Sequence[str]) -> dict[str, Any]:
    return {name: file_hash(folder / name) for name in names}
