"""Run code in forked children, kill them at a moment or a file operation, compare what is left.

A fork starts at once; a new interpreter would spend seconds importing torch.
"""

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path

from frostglass.runtime.processes import machine_name

CHANGES = {"os.rename", "os.mkdir", "os.rmdir", "os.remove", "os.utime"}


def fork(body: Callable[[], object]) -> int:
    """Run `body` in a child process; return its process number."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        body()
        code = 0
    except BaseException:  # noqa: BLE001 - the child must never return into the test runner
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def ended(pid: int, within: float = 60.0) -> int:
    """Wait for a child; return its exit code, or minus the signal that ended it.

    A child that does not end in time is killed and fails the test.
    """
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError(f"the child did not end within {within} s")


def dead_owner() -> str:
    """Return the name of a lease's owner on this machine whose process has ended."""
    pid = fork(lambda: None)
    assert ended(pid) == 0
    return f"{machine_name()}~{pid}~00"


def run(body: Callable[[], object]) -> None:
    """Run `body` in a child and check that it ends without an error."""
    assert ended(fork(body)) == 0


def run_until_done(body: Callable[[], object], moments: Iterable[float]) -> int:
    """Run `body` repeatedly, killed after the next of `moments` seconds, until a run ends itself.

    Returns the number of kills. When `moments` are used up, the last run is not killed.
    """
    kills = 0
    for moment in moments:
        pid = fork(body)
        deadline = time.monotonic() + moment
        while time.monotonic() < deadline:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                assert os.waitstatus_to_exitcode(status) == 0
                return kills
            time.sleep(0.001)
        os.kill(pid, signal.SIGKILL)
        if ended(pid) == 0:  # it ended just before it was killed
            return kills
        kills += 1
    run(body)
    return kills


def changing(root: Path, on_change: Callable[[], None]) -> None:
    """Call `on_change` before every change of this process to files under `root`.

    Cannot be undone: for children only.
    """
    inside = str(root)

    def hook(event: str, args: tuple) -> None:
        if event == "open":
            path, mode, flags = args
            if not (set(mode or "") & set("wxa+") or flags & (os.O_WRONLY | os.O_RDWR)):
                return
        elif event in CHANGES:
            path = args[0]
        else:
            return
        if isinstance(path, str | os.PathLike) and os.fspath(path).startswith(inside):
            on_change()

    sys.addaudithook(hook)


def die_before_change(root: Path, number: int) -> None:
    """Kill this process before its `number`-th change (from 1) under `root`; for children only."""
    left = number

    def count() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    changing(root, count)


def tree(root: Path, without: tuple[str, ...] = ("timing.json",)) -> dict[str, bytes | None]:
    """Return every file under `root` with its bytes, and every folder, by relative path."""
    paths = (path for path in sorted(root.rglob("*")) if path.name not in without)
    return {
        path.relative_to(root).as_posix(): path.read_bytes() if path.is_file() else None
        for path in paths
    }
