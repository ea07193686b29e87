"""What the process asks of the C library before long work."""

from types import SimpleNamespace

import pytest

from frostglass import runtime
from frostglass.cli.work import prepare


def test_large_blocks_are_kept_for_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[int, int] = {}
    monkeypatch.setattr(runtime.os, "name", "posix")
    monkeypatch.setattr(runtime.ctypes, "CDLL", lambda name: SimpleNamespace(mallopt=asked.__setitem__))
    prepare(None)
    assert asked == {-3: 2**27, -1: 2**31 - 1}  # M_MMAP_THRESHOLD and M_TRIM_THRESHOLD of malloc.h


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime.ctypes, "CDLL", lambda name: SimpleNamespace())
    prepare(None)


def test_without_a_posix_loader_nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime.os, "name", "nt")
    monkeypatch.setattr(runtime.ctypes, "CDLL", lambda name: pytest.fail("loaded"))
    runtime.keep_memory()
