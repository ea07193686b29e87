"""Leases: one worker per step, across processes and machines.

They use renames only, because network folders do not always support locks. A lease is a folder
with one file named after its owner. Renaming a prepared folder into place succeeds for one process
only and includes the owner's name, so a kill never leaves a lease without an owner. A stale lease
is evicted by removing the file of *that* owner: a process that does so too late finds no such file
and cannot harm the next owner.

An owner on another machine is stale when this process has watched its heartbeat for a minute and
seen no change. The time in the file is only compared with itself: clocks of machines may differ.
"""

import errno
import os
import secrets
import threading
import time
from contextlib import suppress
from pathlib import Path

from frostglass.core.errors import RunError
from frostglass.runtime.processes import is_alive, machine_name
from frostglass.store.files import TAKEN, remove_tree

HEARTBEAT_SECONDS = 5.0
STALE_SECONDS = 60.0
# For each lease, the last heartbeat that was seen of its owner, and since when by our own clock.
_heartbeats: dict[Path, tuple[tuple[str, int], float]] = {}


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
            while True:
                try:
                    os.rename(prepared, folder)
                    _heartbeats.pop(folder, None)
                    return cls(folder, owner)
                except OSError as error:
                    if error.errno not in TAKEN:
                        raise
                other = owner_of(folder)
                if other and not _stale(folder, other):
                    return None
                if other:
                    (folder / other).unlink(missing_ok=True)
        finally:
            remove_tree(prepared)

    @classmethod
    def claim_after_watching(cls, folder: Path) -> "Lease | None":
        """Like `claim`, but first watch an owner on another machine until it shows life or not.

        For commands that ask once; a run asks again and again.
        """
        while (lease := cls.claim(folder)) is None:
            owner = owner_of(folder)
            heartbeat, since = _heartbeats.get(folder, (None, 0.0))
            if owner.startswith(f"{machine_name()}~") or not heartbeat:
                return None
            left = STALE_SECONDS - (time.monotonic() - since)
            time.sleep(max(0.0, min(HEARTBEAT_SECONDS, left)) + 0.01)
            if _heartbeat(folder, owner) not in (None, heartbeat):
                return None
        return lease

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
            owner = prepared.name.removeprefix(f"{self.folder.name}-")
            with suppress(FileNotFoundError):  # its process has just renamed or removed it
                # Such a folder lives for a moment and is seen once, so its time has to do.
                if _is_dead(owner) or now - prepared.stat().st_mtime > STALE_SECONDS:
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


def living_owner(folder: Path) -> str:
    """Say who has the lease at `folder`, as far as can be told without waiting; "" if nobody."""
    owner = owner_of(folder)
    return "" if not owner or _is_dead(owner) else described(owner)


def described(owner: str) -> str:
    machine, pid, *_ = [*owner.split("~"), "?"]
    return f"process {pid} on {machine}"


def _stale(folder: Path, owner: str) -> bool:
    """Return whether the owner of a lease is dead, or was silent while this process watched it."""
    heartbeat, now = _heartbeat(folder, owner), time.monotonic()
    if heartbeat is None or _is_dead(owner):
        return True
    known, since = _heartbeats.get(folder, (None, now))
    if known != heartbeat:
        _heartbeats[folder] = heartbeat, now
        return False
    return now - since > STALE_SECONDS


def _is_dead(owner: str) -> bool:
    """Return whether an owner was a process of this machine that has ended."""
    machine, _, rest = owner.partition("~")
    pid = rest.partition("~")[0]
    return machine == machine_name() and pid.isdigit() and not is_alive(int(pid))


def _heartbeat(folder: Path, owner: str) -> tuple[str, int] | None:
    """Return what changes whenever the owner of a lease shows life; None if it has left."""
    try:
        # Opening makes a network folder ask its server instead of its cache.
        descriptor = os.open(folder / owner, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        return owner, os.fstat(descriptor).st_mtime_ns
    finally:
        os.close(descriptor)
