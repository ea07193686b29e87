"""What the process asks of the C library before long work."""

from types import SimpleNamespace

import pytest

from frostglass.runtime import memory as runtime
from frostglass.cli.work import prepare


def test_large_blocks_are_kept_for_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked_of(monkeypatch, most=2**40) == [
        (-3, 2**27),
        (-1, 2**31 - 1),
    ]  # M_MMAP_THRESHOLD and M_TRIM_THRESHOLD of malloc.h


def test_an_older_library_is_asked_for_what_it_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked_of(monkeypatch, most=2**25) == [(-3, 2**27), (-3, 2**25), (-1, 2**31 - 1)]


def test_one_that_allows_nothing_keeps_its_own_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked_of(monkeypatch, most=0) == [
        (-3, 2**27),
        (-3, 2**25),
    ]  # setting the other alone would switch its adapting off


def asked_of(monkeypatch: pytest.MonkeyPatch, most: int) -> list[tuple[int, int]]:
    """What `prepare` asks of a C library that accepts a threshold of so many bytes."""
    asked: list[tuple[int, int]] = []

    def mallopt(parameter: int, value: int) -> int:
        asked.append((parameter, value))
        return int(parameter != -3 or value <= most)

    monkeypatch.setattr(runtime.os, "name", "posix")
    monkeypatch.setattr(runtime.ctypes, "CDLL", lambda name: SimpleNamespace(mallopt=mallopt))
    prepare(None)
    return asked


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime.ctypes, "CDLL", lambda name: SimpleNamespace())
    prepare(None)


def test_without_a_posix_loader_nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime.os, "name", "nt")
    monkeypatch.setattr(runtime.ctypes, "CDLL", lambda name: pytest.fail("loaded"))
    runtime.keep_freed_memory()
