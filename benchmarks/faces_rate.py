"""Procedural faces generated per second."""

import time
from collections.abc import Iterator

import torch

from benchmarks.measured import Measured
from frostglass.data.faces import photograph

LIMIT = 1000


def measure() -> Iterator[Measured]:
    people = torch.arange(4096)
    for size in (16, 32, 64):
        photograph(0, people[:512], torch.zeros(512, dtype=torch.long), size)
        began = time.perf_counter()
        photograph(0, people, torch.zeros_like(people), size)
        rate = len(people) / (time.perf_counter() - began)
        least = LIMIT if size == 32 else None
        yield Measured(f"faces at {size} pixels, images a second", rate, least=least)
