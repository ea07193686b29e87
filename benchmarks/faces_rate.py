"""Procedural faces per second."""

import time
from collections.abc import Iterator

import torch

from frostglass.data.faces import photograph

LIMIT = 1000


def measure() -> Iterator[str]:
    who = torch.arange(4096)
    for size in (16, 32, 64):
        photograph(0, who[:512], torch.zeros(512, dtype=torch.long), size)
        began = time.perf_counter()
        photograph(0, who, torch.zeros_like(who), size)
        rate = len(who) / (time.perf_counter() - began)
        wanted = f" (at least {LIMIT} wanted)" if size == 32 else ""
        yield f"faces at {size} pixels: {rate:,.0f} images a second{wanted}"
