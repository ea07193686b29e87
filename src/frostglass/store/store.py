"""The store: a folder of finished steps, each under a key made of everything that made it.

    root/store.json                    {"format": 2}
    root/.gitignore                    *
    root/<step>/<key>/                 what the step saved, manifest.json, timing.json
    root/<step>/<key>.partial/work/    checkpoints of an unfinished step
    root/<step>/<key>.partial/parts/   leases of its parts, if several processes make them
    root/<step>/<key>.lease/           the process that is working on it

A result folder is complete or absent. A run that is killed at any time continues from the last
checkpoint when it is called again, and ends with the same bytes, except in `timing.json`.
"""

import errno
import json
import os
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from frostglass.core.errors import FrostglassError, StoreError
from frostglass.core.ranks import default_devices
from frostglass.core.value_log import ValueLog
from frostglass.runtime.device import default_device
from frostglass.store.executor import Executor
from frostglass.store.files import (
    TAKEN,
    Work,
    full_disk_reported,
    ignore_in_git,
    make_private,
    permissions,
    read_json,
    remove_temporaries,
    remove_tree,
    restrict,
    sync,
    write_json,
)
from frostglass.store.lease import Lease, LeaseLost, described, owner_of
from frostglass.store.manifest import (
    MANIFEST,
    conditions,
    conditions_of,
    differing,
    fingerprints,
    provenance,
    verify,
)
from frostglass.store.sharing import POLL_SECONDS, Leave, SharedWork
from frostglass.store.step import Event, Kind, Step, Task, with_key
from frostglass.store.timing import TIMING, earlier_attempts

T = TypeVar("T")

FORMAT = 2
MARKER = "store.json"
REMEMBERED = 16  # products kept in memory, so that a grid does not read its split every time


class Store:
    """A folder of steps; many processes and machines may use it at once.

    The folder is created by the first step. Products are computed and loaded on `device`, and
    `devices` processes train each network; neither enters their keys. `obtain` ensures that a step
    is finished, and `executor` has other processes make steps: see `frostglass.workers`.
    """

    def __init__(
        self,
        root: Path | str,
        listener: Callable[[Event], None] | None = None,
        *,
        device: torch.device | None = None,
        devices: int | None = None,
    ) -> None:
        self.root = Path(root)
        self.device, self.devices = device or default_device(), devices or default_devices()
        self.executor: Executor | None = None
        self.obtain: Callable[[Task[Any]], bool] = self.ensure
        self._listener = listener
        self.log: ValueLog | None = None  # receives values, changes nothing
        self._loaded: OrderedDict[str, Any] = OrderedDict()
        self._conditions: dict[str, list[dict[str, Any]]] = {}  # of each step that was used
        self.check: Callable[[], None] = lambda: None
        with usable(self.root):
            self._check_root()

    def step(self, step: Step[T], config: Any, /, *, seed: int, **inputs: Any) -> T:
        """Return the product of a step, computed now or earlier.

        It is always read from disk, so a resumed run continues with what an unbroken one would.
        A dataclass with a `key` field gets its key, and its parts whose key is empty get
        `<key>.<field>`, so that both can be inputs of later steps.
        """
        task = Task.of(step, config, inputs, seed, self.root)
        computed = False
        if task.key not in self._loaded:
            with full_disk_reported(self.root):
                computed = self.obtain(task)
                self._conditions[task.key] = conditions_of(verify(task.final))
                self._loaded[task.key] = with_key(step.load(task.final, self.device), task.key)
        self._loaded.move_to_end(task.key)
        while len(self._loaded) > REMEMBERED:
            self._loaded.popitem(last=False)
        self.report(task.step.name, task.key, "done" if computed else "cached")
        return self._loaded[task.key]

    def record(self, what: str, step: int, values: Mapping[str, float]) -> None:
        """Send values to the log of this store, if it has one."""
        if self.log:
            self.log.record(what, step, values)

    def read(self, make: Callable[..., T], *args: Any) -> T:
        """Return what `make` reads from files: such products are not stored."""
        return make(*args)

    def key(self, step: Step[Any], config: Any, /, *, seed: int, **inputs: Any) -> str:
        """Return the name under which the step's result is kept."""
        return Task.of(step, config, inputs, seed, self.root).key

    def has(self, step: Step[Any], config: Any, /, *, seed: int, **inputs: Any) -> bool:
        """Return whether the step is finished; computes and writes nothing."""
        return (Task.of(step, config, inputs, seed, self.root).final / MANIFEST).is_file()

    @property
    def exists(self) -> bool:
        """Whether the folder is a store already."""
        return (self.root / MARKER).is_file()

    def check_exists(self) -> None:
        """Refuse a folder that is yet to become a store, where one is to be read."""
        if not self.exists:
            raise StoreError(f"there is no store at {self.root}: give --store the folder of one")

    def mixed_conditions(self) -> str:
        """Say in what the conditions differ under which used steps were made; "" if in nothing."""
        return differing(each for made in self._conditions.values() for each in made)

    def report(
        self, step: str, key: str, kind: Kind, done: int = 0, total: int = 0, note: str = ""
    ) -> None:
        """Tell the listener what happens to a step."""
        if self._listener:
            self._listener(Event(step, key, kind, done, total, note))

    def help(self, task: Task[Any]) -> None:
        """Make parts of a step that another process is making, until none is free."""
        work = SharedWork(task.partial / "work", maps_results=True, now=conditions(), helping=True)
        # A folder that is gone: the other process finished the step or was replaced.
        with suppress(Leave, LeaseLost, FileNotFoundError):
            self._compute(task, work)

    @contextmanager
    def interrupted_by(self, check: Callable[[], None]) -> Iterator[None]:
        """Call `check` before steps are computed and at their checkpoints: it may raise.

        The store is then as after a kill: the same call goes on from the last checkpoint.
        """
        before, self.check = self.check, check
        try:
            yield
        finally:
            self.check = before

    def ensure(self, task: Task[Any]) -> bool:
        """Ensure that the result is on disk; return True if this call computed it."""
        if not task.final.exists():
            self.create()
        owner = ""
        while not task.final.exists():
            self.check()
            lease = self._claim(task)
            if lease is None:
                owner = self._wait(task, owner)
                continue
            with suppress(LeaseLost), lease:
                lease.sweep()
                # Another process may have finished the step before our claim.
                if not task.final.exists():
                    self._make(task, lease)
                    return True
        # Remove what a process left that was killed after finishing or lost its lease. A live
        # owner cleans up itself.
        leftovers = any(task.folder.glob(f"{task.key}.*")) and os.access(task.folder, os.W_OK)
        if leftovers and (lease := self._claim(task)):
            with suppress(LeaseLost), lease:
                lease.sweep()
                remove_tree(task.partial)
        return False

    def _make(self, task: Task[Any], lease: Lease) -> None:
        """Compute, save and publish the product; stop where the lease was lost."""
        origin = provenance(self.device)  # now: the checkout may change while the step runs
        try:
            lease.check()
            earlier, started = _prepare(task.partial), time.monotonic()
            attempts = earlier["attempts"] + 1
            # Checkpoints of an earlier attempt may have been made under other conditions.
            before, now = earlier.get("conditions", []), conditions() | self._devices_of(task)
            origin["conditions"] = [*before, now] if now not in before else before

            def timing() -> dict[str, Any]:
                seconds = round(earlier["seconds"] + time.monotonic() - started, 3)
                return {"attempts": attempts, "seconds": seconds}

            def before_save() -> None:
                lease.check()
                made_under = origin["conditions"]
                write_json(task.partial / TIMING, {**timing(), "conditions": made_under})

            def on_progress(done: int, total: int, note: str) -> None:
                self.report(task.step.name, task.key, "progress", done, total, note)
                if done < total:  # else the step is as good as finished
                    self.check()

            folder, seen = task.partial / "work", origin["conditions"]
            work = SharedWork(
                folder, on_progress, before_save, maps_results=True, now=now, seen=seen
            )
            work.on_values = partial(self.record, f"{task.step.name} {task.key[:8]}")
            write_json(task.partial / TIMING, {**earlier, "attempts": attempts})
            self.report(
                task.step.name, task.key, "resume" if any(work.folder.iterdir()) else "start"
            )
            product = self._compute(task, work)
            lease.check()
            result = self._save(task, product, lease, origin)
            finished = datetime.now(UTC).isoformat(timespec="seconds")
            write_json(result / TIMING, {**timing(), "finished": finished})
            for path in (*result.rglob("*"), result):
                restrict(path, permissions(self.root))
                sync(path)
            lease.check()
            _publish(result, task.final)
            remove_tree(task.partial)
        except (OSError, FrostglassError):
            # If another process took over, it may have removed our files: then raise LeaseLost.
            lease.check()
            raise

    def _compute(self, task: Task[T], work: Work) -> T:
        more = {**task.inputs, **self._devices_of(task)}
        return task.step.make(task.config, seed=task.seed, work=work, device=self.device, **more)

    def _devices_of(self, task: Task[Any]) -> dict[str, Any]:
        return {"devices": self.devices} if task.step.trains else {}

    def _save(self, task: Task[Any], product: Any, lease: Lease, origin: Mapping[str, Any]) -> Path:
        """Save the product and its manifest in a folder of this attempt alone.

        A process that lost its lease unnoticed then cannot write into another one's result.
        """
        result = task.partial / f"result-{lease.owner}"
        result.mkdir(permissions(self.root))
        task.step.save(product, result)
        files = fingerprints(result)
        if reserved := {MANIFEST, TIMING} & set(files):
            raise StoreError(
                f"step {task.step.name!r} saved a file named {min(reserved)}, which the store "
                "writes itself: choose another name"
            )
        manifest = {"key": task.key, **task.identity, **origin}
        facts = dict(task.step.facts(product))
        write_json(result / MANIFEST, {**manifest, "facts": facts, "files": files})
        return result

    def _claim(self, task: Task[Any]) -> Lease | None:
        with usable(self.root, f"for step {task.step.name} {task.key[:8]}"):
            task.folder.mkdir(permissions(self.root), exist_ok=True)
            return Lease.claim(task.lease)

    def _wait(self, task: Task[Any], known: str) -> str:
        """Sleep briefly while another process works on the step; report each owner once."""
        owner = owner_of(task.lease)
        if owner and owner != known:
            note = f"{described(owner)} is making it"
            self.report(task.step.name, task.key, "waiting", note=note)
        time.sleep(POLL_SECONDS)
        return owner

    def _check_root(self) -> None:
        """Refuse a folder that is not a store, without writing."""
        if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", str(self.root)):
            raise StoreError(
                f"{self.root} is a URL, and a store needs the atomic renames and the leases of a "
                "POSIX folder, which object stores do not have: give a folder, for many machines "
                "one that all of them share"
            )
        marker = self.root / MARKER
        if self.root.exists() and not self.root.is_dir():
            raise StoreError(f"{self.root} is a file and a store is a folder: use another path")
        # Listed before the marker is looked for: a store that another process is creating now has
        # its marker before anything else.
        entries = self.root.iterdir() if self.root.exists() else ()
        others = sorted(path.name for path in entries if MARKER not in path.name)
        if marker.exists() and not marker.is_file():  # reading a named pipe would never end
            raise StoreError(f"{marker} is no regular file: use another folder")
        if marker.exists():
            content = read_json(marker)
            version = content.get("format") if isinstance(content, dict) else content
            if version != FORMAT:
                raise StoreError(
                    f"{self.root} is a store of format {json.dumps(version)}, expected {FORMAT}: "
                    "use another folder or delete it"
                )
        elif others:
            raise StoreError(
                f"{self.root} is not empty and has no {MARKER} (found {', '.join(others[:3])}): "
                "use another folder or delete it"
            )

    def create(self) -> None:
        """Create the folder, unless it is there."""
        with usable(self.root):
            make_private(self.root)
            self._check_root()
            if not (self.root / MARKER).exists():
                # Fails if another process creates the store first and removes our temporary file;
                # `_check_root` then reads its marker.
                with suppress(FileNotFoundError):
                    write_json(self.root / MARKER, {"format": FORMAT})
                self._check_root()
            remove_temporaries(self.root)
            with suppress(FileNotFoundError):  # another process removed our temporary file
                ignore_in_git(self.root)


def _prepare(partial: Path) -> dict[str, Any]:
    """Create or clean the folder of an unfinished step; return the timing of earlier attempts."""
    for folder in (partial, partial / "work"):
        folder.mkdir(permissions(folder.parent), exist_ok=True)
    for leftover in partial.glob("result-*"):
        remove_tree(leftover)
    remove_temporaries(partial)
    remove_temporaries(partial / "work")
    return earlier_attempts(partial)


def _publish(result: Path, final: Path) -> None:
    """Rename a finished result to its place, unless another process was first."""
    try:
        os.rename(result, final)
    except OSError as error:
        if error.errno not in TAKEN:
            raise
    sync(final.parent)


@contextmanager
def usable(root: Path, reason: str = "") -> Iterator[None]:
    """Turn missing permissions inside the block into a `StoreError`."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR):
            raise
        raise StoreError(
            f"the store {root} cannot be written {reason and reason + ' '}({error.strerror}): use "
            "another folder or change its permissions"
        ) from error
