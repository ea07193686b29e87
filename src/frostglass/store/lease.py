"""One worker a step, across processes and machines, with nothing but renames: no locks, which network folders do not keep.

A lease is a folder holding one file named after its owner. Renaming a prepared folder into place succeeds for one process only and
brings the owner's name with it, so no kill leaves a lease without an owner. A stale lease is evicted by removing the file of *that* owner:
whoever judged it too late finds no such file and cannot hurt the next owner.
"""

import errno
import hashlib
import os
import re
import secrets
import socket
import threading
from contextlib import suppress
from pathlib import Path

from frostglass.core.errors import RunError
from frostglass.store.files import TAKEN, remove_tree

HEARTBEAT_SECONDS = 5.0
STALE_SECONDS = 60.0


class LeaseLost(RunError):
    """This process was silent for so long that another one took its step over."""


class Lease:
    """The right to work on one step; alive, as other machines see it, while the `with` block runs."""

    def __init__(self, folder: Path, owner: str):
        self.folder = folder
        self.owner = owner
        self._file = folder / owner
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="lease heartbeat", daemon=True)

    @classmethod
    def claim(cls, folder: Path) -> "Lease | None":
        """The lease at `folder`, or None while a living owner has it."""
        owner = f"{_machine()}~{os.getpid()}~{secrets.token_hex(4)}"
        prepared = folder.with_name(f"{folder.name}-{owner}")
        prepared.mkdir()
        try:
            (prepared / owner).touch(exist_ok=False)
            # The file system's own clock, which stamps the heartbeats too: clocks of machines may differ.
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
                f"{self.folder.name} was taken over by another process: nothing to do, its result will be used"
            ) from None

    def sweep(self) -> None:
        """Remove claims that were killed before they were decided."""
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
        except OSError as error:  # the next owner may already be in, or be gone again
            if error.errno not in (*TAKEN, errno.ENOENT):
                raise

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT_SECONDS):
            # A beat that fails is not hidden: the worker meets the same error at its next `check`.
            with suppress(OSError):
                os.utime(self._file)


def owner_of(folder: Path) -> str:
    """Who holds the lease at `folder`; empty when nobody does."""
    try:
        return next(iter(sorted(os.listdir(folder))), "")
    except FileNotFoundError:
        return ""


def _stale(path: Path, owner: str, now: float) -> bool:
    """Whether the owner of a lease file, or of a prepared folder, is dead, silent for too long, or gone."""
    machine, _, rest = owner.partition("~")
    pid = rest.partition("~")[0]
    if machine == _machine() and pid.isdigit() and not _alive(int(pid)):
        return True
    try:
        descriptor = os.open(
            path, os.O_RDONLY
        )  # opening makes network folders ask the server instead of their cache
    except FileNotFoundError:
        return True
    try:
        return now - os.fstat(descriptor).st_mtime > STALE_SECONDS
    finally:
        os.close(descriptor)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _machine() -> str:
    """This machine's name, and a mark of what its process numbers mean: two machines or containers may share a name."""
    name = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname())
    boot, space = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    numbers = f"{boot.read_text()}{space.stat().st_ino}" if boot.exists() and space.exists() else ""
    return f"{name}-{hashlib.sha256(numbers.encode()).hexdigest()[:8]}"
