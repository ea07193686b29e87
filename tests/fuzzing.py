"""Changes valid files at random, and watches what a reader makes of them.

Any outcome but a result or an error of the package is a bug. So is a reader that hangs, or that
runs code which a file names.
"""

import copy
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from frostglass.core.errors import FrostglassError

LITTLE = 12  # cases of each target in `make test`
SOUND = 6  # cases that change nothing, before all others: a test of refusals alone proves little
LONG = int(os.environ.get("FROSTGLASS_FUZZ", "1000"))  # in `make slow`
SECONDS = 60  # for one case; a sound reader takes less than one, even on a busy machine
HOSTILE = ("torch files", "NVIDIA pickles")  # some of the files hold code, and are refused
# That code would create this file.
CANARY = "code-of-a-file-was-run"
INTERESTING = (b"\x00", b"\xff", b"\x7f", b"\x80", b"{", b"}", b'"', b"\n", b",", b":", b"9", b"-")
ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 3, 2**31, 2**63, 2**70, 20_000, 1e308, -0.5, 0.5, float("nan"),
    float("inf"), "", "x", "0", "a\nb", "é\u0000", "self", "spy:Code", "../x", [], {}, [[]], [{}],
    [0], ["x"], {"x": 1}, {"name": "x"},
)  # fmt: skip
RUNS_CODE = ("os.system", "os.exec", "os.posix_spawn", "os.spawn", "subprocess.Popen", "pty.spawn")


class NoChange(random.Random):
    """Chooses among files and leaves them as they are."""


def changed_bytes(data: bytes, rng: random.Random) -> bytes:
    """Flip, replace, remove, repeat, insert or cut off bytes, once or a few times."""
    if isinstance(rng, NoChange):
        return data
    for _ in range(rng.choice((1, 1, 1, 1, 2, 4))):
        place = rng.randrange(len(data) + 1)
        other = min(len(data), place + rng.choice((1, 1, 2, 4, 16, 64)))
        kind = rng.randrange(7)
        if kind == 0 and place < len(data):
            new = bytes([data[place] ^ (1 << rng.randrange(8))])
        elif kind == 1:
            new = rng.choice(INTERESTING) * (other - place)
        elif kind == 2:
            new = b""
        elif kind == 3:
            new = data[place:other] * rng.choice((2, 3, 50))
        elif kind == 4:
            new, other = rng.randbytes(rng.choice((1, 2, 4, 8))), place
        elif kind == 5:
            start = rng.randrange(len(data) + 1)
            new = data[start : start + other - place]
        else:
            new, other = b"", len(data) if rng.random() < 0.3 else other
        data = data[:place] + new + data[other:]
    return data


def changed_values(value: Any, rng: random.Random) -> Any:
    """Replace, remove, rename, copy or wrap a part of nested JSON values, once or a few times."""
    if isinstance(rng, NoChange):
        return value
    value = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        places = list(_places(value))
        if not places:
            return rng.choice(ODD)
        holder, key = rng.choice(places)
        kind = rng.randrange(6)
        if kind == 0:
            del holder[key]
        elif kind == 1 and isinstance(holder, dict):
            holder[str(rng.choice(ODD))] = holder.pop(key)
        elif kind == 2:
            from_holder, from_key = rng.choice(places)
            holder[key] = copy.deepcopy(from_holder[from_key])
        elif kind == 3:
            holder[key] = rng.choice(([holder[key]], {"x": holder[key]}, str(holder[key])))
        else:
            holder[key] = copy.deepcopy(rng.choice(ODD))
    return value


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each part of nested values as a container and a key."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in list(items):
        yield value, key
        if isinstance(item, dict | list):
            yield from _places(item)


class Watch:
    """Notes calls that start programs while it is active; an audit hook cannot be removed."""

    def __init__(self) -> None:
        self.active = False
        self.seen: list[str] = []
        sys.addaudithook(self._note)

    def _note(self, event: str, arguments: Any) -> None:
        if self.active and event.startswith(RUNS_CODE):
            self.seen.append(f"{event} {arguments!r}")


_WATCH: list[Watch] = []


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    def late(*_: Any) -> None:
        raise TimeoutError(f"not finished after {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def fuzz(name: str, count: int, case: Callable[[random.Random], Any], folder: Path) -> int:
    """Run a target `count` times; return how many cases gave a result and not an error.

    `case(rng)` changes a file and reads it. It runs in `folder`, whose code must not be run.
    """
    if not _WATCH:
        _WATCH.append(Watch())
    watch, read, before = _WATCH[0], 0, os.getcwd()
    os.chdir(folder)
    (folder / "spy.py").write_text(f"open({CANARY!r}, 'w')\n")
    sys.path.insert(0, str(folder))
    watch.seen.clear()
    watch.active = True
    try:
        for number in range(-SOUND, count):
            rng = (NoChange if number < 0 else random.Random)(f"{name} {number}")
            try:
                with time_limit(SECONDS):
                    case(rng)
                read += number >= 0
            except FrostglassError as error:  # the command line prints it as one line
                if number < 0 and name not in HOSTILE:
                    raise AssertionError(f"{name}: a sound file is refused: {error}") from error
            except (Exception, SystemExit) as error:
                text = f"{type(error).__name__}: {error}"
                raise AssertionError(f"{name}, case {number}: {text[:300]}") from error
            assert not watch.seen, f"{name}, case {number} starts a program: {watch.seen[0]}"
            assert not (folder / CANARY).exists(), f"{name}, case {number} runs code of the file"
    finally:
        watch.active = False
        sys.path.remove(str(folder))
        sys.modules.pop("spy", None)
        os.chdir(before)
    return read
