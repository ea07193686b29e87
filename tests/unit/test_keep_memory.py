"""What the process asks of the C library before long work, and the memory it reports."""

import mmap
from types import SimpleNamespace

import pytest

from frostglass.cli.run import prepare
from frostglass.runtime import memory
from frostglass.runtime.memory import keep_freed_memory, most_resident, resident


# The parameters are M_MMAP_THRESHOLD and M_TRIM_THRESHOLD of malloc.h. Without the first, the
# second is not set: alone it would fix the first at its small default.
@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (2**40, [(-3, 2**27), (-1, 2**31 - 1)]),
        (2**25, [(-3, 2**27), (-3, 2**25), (-1, 2**31 - 1)]),
        (0, [(-3, 2**27), (-3, 2**25)]),
    ],
    ids=["glibc", "older glibc", "refuses both"],
)
def test_large_blocks_are_kept_as_far_as_the_library_allows(
    monkeypatch: pytest.MonkeyPatch, most: int, expected: list[tuple[int, int]]
) -> None:
    calls: list[tuple[int, int]] = []

    def mallopt(parameter: int, value: int) -> int:
        calls.append((parameter, value))
        return int(parameter != -3 or value <= most)

    monkeypatch.setattr(memory.os, "name", "posix")
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda name: SimpleNamespace(mallopt=mallopt))
    keep_freed_memory()
    assert calls == expected


def test_commands_with_long_work_keep_freed_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str | None] = []
    monkeypatch.setattr(memory.os, "name", "posix")
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda name: names.append(name) or SimpleNamespace())
    prepare(None)
    assert None in names


def test_without_a_posix_loader_nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory.os, "name", "nt")
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda name: pytest.fail("loaded"))
    keep_freed_memory()


def test_the_memory_of_the_process_grows_with_what_it_writes() -> None:
    # Mapped, not a tensor: after another test a tensor may fit into memory the process has kept.
    before, size = resident(), 2**28
    with mmap.mmap(-1, size) as block:
        for start in range(0, size, mmap.PAGESIZE):
            block[start] = 1
        assert resident() - before > 0.9 * size
    assert most_resident() - before > 0.9 * size
