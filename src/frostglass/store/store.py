"""The store: a folder of finished steps, each under a key made of everything that made it.

    root/store.json                    {"format": 1}
    root/<step>/<key>/                 what the step saved, manifest.json, timing.json: whole, or not there
    root/<step>/<key>.partial/work/    checkpoints of a step that is not finished
    root/<step>/<key>.lease/           who is working on it

Whatever progress a run is killed at, the same call goes on from the last checkpoint and ends with the same bytes. Only `timing.json` differs.
"""

import dataclasses
import errno
import hashlib
import json
import os
import platform
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import numpy
import torch

from frostglass.core.errors import FrostglassError, StoreError
from frostglass.store.files import (
    TAKEN,
    Work,
    full_disk_reported,
    read_json,
    remove_temporaries,
    remove_tree,
    sync_folder,
    sync_tree,
    write_json,
)
from frostglass.store.keys import digest, plain
from frostglass.store.lease import Lease, LeaseLost, owner_of

T = TypeVar("T")
Kind = Literal["start", "resume", "progress", "done", "cached", "waiting"]

FORMAT = 1
MARKER = "store.json"
MANIFEST = "manifest.json"
TIMING = "timing.json"
POLL_SECONDS = 0.5
HASHED_BELOW = (
    256 * 1024**2
)  # larger files are checked by size only: hashing them at every load would cost more than reading them
REMEMBERED = 16  # loaded products kept in memory, so that a grid does not read its split again for every experiment


@dataclass(frozen=True)
class Step(Generic[T]):
    """One kind of work. Raise `version` when its code changes its result: results of older versions are then made anew.

    `make(config, *inputs, seed=..., work=...)` computes the product, `save` writes it into a folder as `*.safetensors` and `*.json`, and
    `load` reads it from there. Whatever differs between two runs, such as seconds, must not be in what `save` writes. `facts` are what a
    reader of the manifest should learn about the product.
    """

    name: str
    version: int
    make: Callable[..., T]
    save: Callable[[T, Path], None]
    load: Callable[[Path], T]
    facts: Callable[[T], Mapping[str, Any]] = lambda _: {}


@dataclass(frozen=True)
class Event:
    """What happens to a step, for progress bars."""

    step: str
    key: str
    kind: Kind
    done: int = 0
    total: int = 0
    note: str = ""


@dataclass(frozen=True)
class _Task(Generic[T]):
    """One call of `Store.step`: what was asked for, and where it lives."""

    step: Step[T]
    config: Any
    inputs: tuple[Any, ...]
    seed: int
    identity: Mapping[str, Any]
    key: str
    folder: Path

    @property
    def final(self) -> Path:
        return self.folder / self.key

    @property
    def partial(self) -> Path:
        return self.folder / f"{self.key}.partial"

    @property
    def lease(self) -> Path:
        return self.folder / f"{self.key}.lease"


class Store:
    """A folder of steps; many processes and machines may work on it at once. Made on the first step, not before."""

    def __init__(self, root: Path | str, listener: Callable[[Event], None] | None = None):
        self.root = Path(root)
        self._listener = listener
        self._loaded: OrderedDict[str, Any] = OrderedDict()
        with _usable(self.root):
            self._check_root()

    def step(self, step: Step[T], config: Any, *inputs: Any, seed: int) -> T:
        """The product of a step, made now or found, and always as read from disk, so that a resumed run hands on what an unbroken one does.

        A dataclass with a `key` field gets its key, and its parts that have an empty one get `<key>.<field>`; so both can be inputs.
        """
        task = self._task(step, config, inputs, seed)
        made = False
        if task.key not in self._loaded:
            with full_disk_reported(self.root):
                made = self._obtain(task)
                _verify(task.final)
                self._loaded[task.key] = _with_key(step.load(task.final), task.key)
        self._loaded.move_to_end(task.key)
        while len(self._loaded) > REMEMBERED:
            self._loaded.popitem(last=False)
        self._tell(task, "done" if made else "cached")
        return self._loaded[task.key]

    def key(self, step: Step[Any], config: Any, *inputs: Any, seed: int) -> str:
        """The name under which the step's result is kept."""
        return self._task(step, config, inputs, seed).key

    def has(self, step: Step[Any], config: Any, *inputs: Any, seed: int) -> bool:
        """Whether the step is finished; computes and writes nothing."""
        return (self._task(step, config, inputs, seed).final / MANIFEST).is_file()

    def _task(self, step: Step[T], config: Any, inputs: tuple[Any, ...], seed: int) -> _Task[T]:
        identity = _identity(step, config, inputs, seed)
        return _Task(step, config, inputs, seed, identity, digest(identity), self.root / step.name)

    def _obtain(self, task: _Task[Any]) -> bool:
        """See to it that the result is on disk; True when this call made it."""
        if not task.final.exists():
            self._create_root()
        owner = ""
        while not task.final.exists():
            lease = self._claim(task)
            if lease is None:
                owner = self._wait(task, owner)
                continue
            try:
                with lease:
                    lease.sweep()
                    if (
                        not task.final.exists()
                    ):  # another process may have finished it between our look and our claim
                        self._make(task, lease)
                        return True
            except LeaseLost:
                continue
        # Whoever was killed just after finishing, or lost its lease, left things behind. A living owner tidies up itself.
        leftovers = any(task.folder.glob(f"{task.key}.*")) and os.access(task.folder, os.W_OK)
        if leftovers and (lease := self._claim(task)):
            with suppress(LeaseLost), lease:
                lease.sweep()
                remove_tree(task.partial)
        return False

    def _make(self, task: _Task[Any], lease: Lease) -> None:
        """Compute, save and publish; the lease is checked before everything that another owner could trip over."""
        step, timing = task.step, task.partial / TIMING
        # A folder of this attempt alone: a process that lost its lease without noticing cannot write into what we are about to publish.
        result = task.partial / f"result-{lease.owner}"
        surroundings = _surroundings()
        started = time.monotonic()
        try:
            lease.check()
            before = _prepare(task.partial)

            def spent() -> dict[str, Any]:
                return {
                    "attempts": before["attempts"] + 1,
                    "seconds": round(before["seconds"] + time.monotonic() - started, 3),
                }

            def before_save() -> None:
                lease.check()
                write_json(timing, spent())

            def on_progress(done: int, total: int, note: str) -> None:
                self._tell(task, "progress", done, total, note)

            work = Work(task.partial / "work", on_progress, before_save)
            write_json(timing, {**before, "attempts": before["attempts"] + 1})
            self._tell(task, "resume" if any(work.folder.iterdir()) else "start")
            product = step.make(task.config, *task.inputs, seed=task.seed, work=work)
            lease.check()
            result.mkdir()
            step.save(product, result)
            files = _fingerprints(result)
            if taken := {MANIFEST, TIMING} & set(files):
                raise StoreError(
                    f"step {step.name!r} saved a file named {min(taken)}, which the store writes itself: choose another name"
                )
            write_json(
                result / MANIFEST,
                {
                    "key": task.key,
                    **task.identity,
                    **surroundings,
                    "facts": dict(step.facts(product)),
                    "files": files,
                },
            )
            write_json(
                result / TIMING,
                {**spent(), "finished": datetime.now(UTC).isoformat(timespec="seconds")},
            )
            sync_tree(result)
            lease.check()
            _publish(result, task.final)
            remove_tree(task.partial)
        except (OSError, FrostglassError):
            lease.check()  # whoever took over may have removed what we were using: then it is not our failure
            raise

    def _claim(self, task: _Task[Any]) -> Lease | None:
        with _usable(self.root):
            task.folder.mkdir(exist_ok=True)
            return Lease.claim(task.lease)

    def _wait(self, task: _Task[Any], known: str) -> str:
        """Sleep a little while another process works on the step; the listener hears of each owner once."""
        owner = owner_of(task.lease)
        if owner and owner != known:
            machine, pid, *_ = [*owner.split("~"), "?"]
            self._tell(task, "waiting", note=f"process {pid} on {machine} is making it")
        time.sleep(POLL_SECONDS)
        return owner

    def _check_root(self) -> None:
        """Refuse a folder that is something else, writing nothing."""
        marker = self.root / MARKER
        if self.root.exists() and not self.root.is_dir():
            raise StoreError(f"{self.root} is a file and a store is a folder: use another path")
        # Listed before looking for the marker: a store being made this progress by another process has its marker before anything else.
        others = (
            sorted(path.name for path in self.root.iterdir() if MARKER not in path.name)
            if self.root.exists()
            else []
        )
        if marker.exists():
            found = read_json(marker)
            found = found.get("format") if isinstance(found, dict) else found
            if found != FORMAT:
                raise StoreError(
                    f"{self.root} is a store of format {json.dumps(found)}, expected {FORMAT}: use another folder or delete it"
                )
        elif others:
            raise StoreError(
                f"{self.root} is not empty and has no {MARKER} (found {', '.join(others[:3])}): use another folder or delete it"
            )

    def _create_root(self) -> None:
        with _usable(self.root):
            self.root.mkdir(parents=True, exist_ok=True)
            self._check_root()
            if not (self.root / MARKER).exists():
                # Lost when another process makes the store first and sweeps our temporary file away; `_check_root` then reads its marker.
                with suppress(FileNotFoundError):
                    write_json(self.root / MARKER, {"format": FORMAT})
                self._check_root()
            remove_temporaries(self.root)

    def _tell(
        self, task: _Task[Any], kind: Kind, done: int = 0, total: int = 0, note: str = ""
    ) -> None:
        if self._listener:
            self._listener(Event(task.step.name, task.key, kind, done, total, note))


def _prepare(partial: Path) -> dict[str, Any]:
    """Make or clean the folder of an unfinished step, and say what earlier attempts spent up to their last checkpoint."""
    (partial / "work").mkdir(parents=True, exist_ok=True)
    for leftover in partial.glob("result-*"):
        remove_tree(leftover)
    remove_temporaries(partial)
    remove_temporaries(partial / "work")
    return (
        read_json(partial / TIMING)
        if (partial / TIMING).exists()
        else {"attempts": 0, "seconds": 0.0}
    )


def _publish(result: Path, final: Path) -> None:
    """Rename a finished result into its place; if another process was there first, its result stands."""
    try:
        os.rename(result, final)
    except OSError as error:
        if error.errno not in TAKEN:
            raise
    sync_folder(final.parent)


@contextmanager
def _usable(root: Path) -> Iterator[None]:
    """Tell a folder that may not be used, which is the user's to mend, from every other failure."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR):
            raise
        raise StoreError(
            f"the store {root} cannot be written ({error.strerror}): use another folder or change its permissions"
        ) from error


def _identity(step: Step[Any], config: Any, inputs: tuple[Any, ...], seed: int) -> dict[str, Any]:
    """Everything a result depends on, as plain JSON."""
    return {
        "step": step.name,
        "version": step.version,
        "config": plain(config, f"{step.name} config", products=False),
        "inputs": [
            plain(value, f"{step.name} input {place}", products=True)
            for place, value in enumerate(inputs)
        ],
        "seed": plain(seed, f"{step.name} seed", products=False),
    }


def _with_key(product: T, key: str) -> T:
    """The product with its key, and with keys for its parts that have none."""
    if not dataclasses.is_dataclass(product) or isinstance(product, type):
        return product
    parts = {field.name: getattr(product, field.name) for field in dataclasses.fields(product)}
    if "key" not in parts:
        return product
    keyed = {
        name: _with_key(part, f"{key}.{name}")
        for name, part in parts.items()
        if getattr(part, "key", None) == ""
    }
    return dataclasses.replace(product, **keyed, key=key)


def _verify(folder: Path) -> None:
    """Compare the files of a finished step with its manifest."""
    if not (folder / MANIFEST).is_file():
        raise StoreError(
            f"{folder} has no {MANIFEST}, so no step finished it: delete that folder and run again"
        )
    manifest = read_json(folder / MANIFEST)
    if (
        not isinstance(manifest, dict)
        or manifest.get("key") != folder.name
        or not isinstance(manifest.get("files"), dict)
    ):
        raise StoreError(
            f"{folder / MANIFEST} does not describe this step: delete the folder {folder} and run again"
        )
    for name, expected in manifest["files"].items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != expected["bytes"]:
            raise StoreError(
                f"{path} is missing or has another size than when it was written: delete the folder {folder} and run again"
            )
        if expected["bytes"] < HASHED_BELOW and _sha256(path) != expected["sha256"]:
            raise StoreError(
                f"{path} is corrupted, its hash is not the one in the manifest: delete the folder {folder} and run again"
            )


def _fingerprints(folder: Path) -> dict[str, Any]:
    """Size and hash of every file in a result."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        for path in files
    }


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _surroundings() -> dict[str, Any]:
    """What made a result besides its inputs; nothing here may change between two runs in one place."""
    return {
        "packages": {
            "frostglass": _version(),
            "numpy": numpy.__version__,
            "python": platform.python_version(),
            "torch": str(torch.__version__),
        },
        "device": torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else f"cpu {platform.machine()}",
        "commit": _commit(),
    }


def _version() -> str | None:
    try:
        return metadata.version("frostglass")
    except metadata.PackageNotFoundError:  # run from its source folder
        return None


def _commit() -> str | None:
    """The commit of the checkout this package runs from, read without starting git; None for an installed package."""
    git = Path(__file__).resolve().parents[3] / ".git"
    if not (git / "HEAD").is_file():
        return None
    head = (git / "HEAD").read_text().strip()
    name = head.removeprefix("ref: ")
    if name == head:
        return head
    if (git / name).is_file():
        return (git / name).read_text().strip()
    packed = (
        (git / "packed-refs").read_text().splitlines() if (git / "packed-refs").is_file() else []
    )
    return next((line.split()[0] for line in packed if line.endswith(f" {name}")), None)
