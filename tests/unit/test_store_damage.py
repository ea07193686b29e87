"""Damaged checkpoints and results: nothing is computed from them, and they are named."""

from pathlib import Path
from typing import Any

import pytest
import torch

from frostglass.store.files import Work, write_tensors
from frostglass.store.store import Store
from killing import tree
from steps import Product, step


class Stopped(Exception):
    """Stands for a kill after some checkpoints."""


def counting(stop_at: int | None):
    """Return a step's work: three checkpoints and a running one, stopped after some saves."""

    def make(config: Any, *, seed: int, work: Work, **_: Any) -> Product:
        parts, saves = [], 0

        def save(name: str, tensors: dict, values: dict) -> None:
            nonlocal saves
            work.save(name, tensors, values)
            saves += 1
            if saves == stop_at:
                raise Stopped

        total = torch.zeros(4)
        for number in range(3):
            checkpoint = work.load(f"part-{number}")
            if checkpoint is None:
                checkpoint = {"values": torch.full((4,), float(number) + seed)}, {"weight": 2.0}
                save(f"part-{number}", *checkpoint)
            parts.append(checkpoint[0]["values"] * checkpoint[1]["weight"])
            total = total + parts[-1]
        return Product(total)

    return make


def flip(path: Path, at: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


@pytest.mark.parametrize("at", [-1, 4, 12, 60, -40])
def test_a_damaged_checkpoint_is_named_and_its_work_is_done_again(tmp_path, caplog, at):
    Store(tmp_path / "whole").step(step(counting(None)), None, seed=1)
    store = Store(tmp_path / "broken")
    with pytest.raises(Stopped):
        store.step(step(counting(2)), None, seed=1)
    (damaged,) = store.root.glob("target/*.partial/work/part-0.safetensors")
    flip(damaged, at)
    store.step(step(counting(None)), None, seed=1)
    assert tree(tmp_path / "broken") == tree(tmp_path / "whole")
    assert [record.getMessage() for record in caplog.records] == [
        f"the checkpoint {damaged} is damaged: it is removed, and its work done again"
    ]


def test_no_flipped_bit_of_a_checkpoint_is_used():
    work = Work.scratch()
    tensors = {"a": torch.arange(3.0), "b": torch.tensor([True, False])}
    work.save("state", tensors, {"done": 3, "best": float("inf")})
    file = work.folder / "state.safetensors"
    whole = file.read_bytes()
    used = []
    for place in range(len(whole) * 8):
        file.write_bytes(whole)
        flip(file, place // 8, place % 8)
        if (loaded := work.load("state")) is not None:
            used.append(loaded)
    same = [
        loaded[1] == {"done": 3, "best": float("inf")}
        and list(loaded[0]) == ["a", "b"]
        and all(torch.equal(loaded[0][name], tensor) for name, tensor in tensors.items())
        for loaded in used
    ]
    assert all(same)
    assert len(used) < 8, "only a bit that changes no content, such as a space, may go unnoticed"


def test_a_checkpoint_without_a_hash_is_not_used(caplog):
    work = Work.scratch()
    write_tensors(work.folder / "state.safetensors", {"a": torch.ones(1)}, {"done": 1})
    assert work.load("state") is None
    assert work.names() == []
    assert len(caplog.records) == 1
