"""Loops over many images give unused memory back, and change nothing else."""

import platform

import pytest
import torch

from frostglass.core.pixels import RowsInOne, chunks, per_image, shown_together
from frostglass.runtime import memory


@pytest.fixture
def trims(monkeypatch):
    """The calls of the C library's function."""
    calls: list[int] = []
    monkeypatch.setattr(memory, "return_freed_memory", lambda: calls.append(1))
    monkeypatch.setattr(memory, "CHECKED_AFTER", 3000)
    return calls


def test_parts_are_yielded_in_order_and_memory_is_returned_once_and_when_it_grows(
    trims, monkeypatch
):
    monkeypatch.setattr(memory, "SLACK", 10)
    readings = iter([50, 30, 40, 41, 35])
    monkeypatch.setattr(memory, "own_memory", lambda: next(readings))
    after = []
    for part in memory.trimming(range(16), 1000):
        after.append((part, len(trims)))
    # At the first of five checks, and at the fourth, 11 above the least.
    assert after == [(n, 0 if n < 3 else 1 if n < 12 else 2) for n in range(16)]
    assert list(memory.trimming([], 3000)) == []


def test_rows_of_images_are_divided_as_before(trims):
    rows = torch.arange(150).flip(0)
    parts = list(shown_together(rows, (3, 8, 8)))
    assert [len(part) for part in parts] == [64, 64, 22]
    assert torch.equal(torch.cat(parts), rows)
    assert trims
    assert [part.tolist() for part in shown_together(rows[:0], (3, 8, 8))] == [[]]
    assert list(chunks(5, (1, 2, 2), most=8)) == [slice(0, 2), slice(2, 4), slice(4, 5)]


def test_values_of_images_are_kept_in_one_tensor():
    rows, shown = torch.arange(150).flip(0), []

    def function(part):
        shown.append(len(part))
        return torch.stack([part, part**2], 1).double()

    values = per_image(function, rows, (3, 8, 8))
    assert shown == [64, 64, 22]
    torch.testing.assert_close(values, torch.stack([rows, rows**2], 1).double(), atol=0, rtol=0)
    assert per_image(function, rows[:0], (3, 8, 8)).shape == (0, 2)


def test_rows_are_written_where_the_first_ones_are_and_none_may_be_missing():
    rows = RowsInOne(5)
    rows.add(torch.ones(2, 3))
    place = rows._tensor.data_ptr()
    with pytest.raises(AssertionError, match="2 of 5 rows"):
        _ = rows.tensor
    rows.add(torch.zeros(3, 3))
    assert rows.tensor.data_ptr() == place
    assert rows.tensor.sum(1).tolist() == [3, 3, 0, 0, 0]
    with pytest.raises(RuntimeError):  # too many
        rows.add(torch.ones(1, 3))


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library has no such heap")
def test_freed_blocks_below_a_kept_one_go_back_to_the_system():
    blocks = [torch.ones(2**14) for _ in range(1024)]  # 64 MiB, each too small for a mapping
    kept, most = torch.ones(4), memory.own_memory()
    blocks.clear()
    memory.return_freed_memory()
    assert most - memory.own_memory() > 2**25
    assert kept.sum() == 4
