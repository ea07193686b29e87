"""Leases: one worker per step, across processes and machines.

They use renames only, because network folders do not always support locks. A lease is a folder
with one file named after its owner. Renaming a prepared folder into place succeeds for one process
only and includes the owner's name, so a kill never leaves a lease without an owner. A stale lease
is evicted by removing the file of *that* owner: a process that does so too late finds no such file
and cannot harm the next owner.
"""

import errno
import os
import secrets
import threading
from contextlib import suppress
from pathlib import Path

from frostglass.core.errors import RunError
from frostglass.runtime.processes import is_alive, machine_name
from frostglass.store.files import TAKEN, remove_tree

HEARTBEAT_SECONDS = 5.0
STALE_SECONDS = 60.0


class LeaseLost(RunError):
    """Another process took over the step, because this one sent no heartbeat for too long."""


class Lease:
    """The right to work on one step; its heartbeat runs inside the `with` block."""

    def __init__(self, folder: Path, owner: str) -> None:
        self.folder = folder
        self.owner = owner
        self._file = folder / owner
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="lease heartbeat", daemon=True)

    @classmethod
    def claim(cls, folder: Path) -> "Lease | None":
        """Return the lease at `folder`, or None while a live owner has it."""
        owner = f"{machine_name()}~{os.getpid()}~{secrets.token_hex(4)}"
        prepared = folder.with_name(f"{folder.name}-{owner}")
        prepared.mkdir()
        try:
            (prepared / owner).touch(exist_ok=False)
            # The clock of the file system, as for heartbeats: clocks of machines may differ.
            now = (prepared / owner).stat().st_mtime
            while True:
                try:
                    os.rename(prepared, folder)
                    return cls(folder, owner)
                except OSError as error:
                    if error.errno not in TAKEN:
                        raise
                other = owner_of(folder)
                if other and not _stale(folder / other, other, now):
                    return None
                if other:
                    (folder / other).unlink(missing_ok=True)
        finally:
            remove_tree(prepared)

    def check(self) -> None:
        """Raise `LeaseLost` if another process has taken over."""
        try:
            os.utime(self._file)
        except FileNotFoundError:
            raise LeaseLost(
                f"{self.folder.name} was taken over by another process: nothing to do, its result "
                "will be used"
            ) from None

    def sweep(self) -> None:
        """Remove the folders of claims that were killed before their rename."""
        self.check()
        now = self._file.stat().st_mtime
        for prepared in self.folder.parent.glob(f"{self.folder.name}-*"):
            if _stale(prepared, prepared.name.removeprefix(f"{self.folder.name}-"), now):
                remove_tree(prepared)

    def __enter__(self) -> "Lease":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._file.unlink(missing_ok=True)
        try:
            self.folder.rmdir()
        except OSError as error:  # the next owner may have it, or have left already
            if error.errno not in (*TAKEN, errno.ENOENT):
                raise

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT_SECONDS):
            # A failed heartbeat is not hidden: the next `check` raises the same error.
            with suppress(OSError):
                os.utime(self._file)


def owner_of(folder: Path) -> str:
    """Return the owner of the lease at `folder`; empty when there is none."""
    try:
        return next(iter(sorted(os.listdir(folder))), "")
    except FileNotFoundError:
        return ""


def _stale(path: Path, owner: str, now: float) -> bool:
    """Return whether the owner of a lease file or prepared folder is dead, silent or gone."""
    machine, _, rest = owner.partition("~")
    pid = rest.partition("~")[0]
    if machine == machine_name() and pid.isdigit() and not is_alive(int(pid)):
        return True
    try:
        # Opening makes a network folder ask its server instead of its cache.
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return True
    try:
        return now - os.fstat(descriptor).st_mtime > STALE_SECONDS
    finally:
        os.close(descriptor)
