"""How the search for near copies between private and public images grows with their number."""

import time
from collections.abc import Iterator

import torch

from benchmarks.measured import Measured
from frostglass.data._duplicates import near_copies
from frostglass.data.faces import PUBLIC_START, photograph

SIZES = (2_000, 8_000, 32_000)  # public images; there are a quarter as many private ones
LIMIT = 8.0  # for four times as many images on both sides; comparing all pairs would take 16 times


def measure() -> Iterator[Measured]:
    public = _faces(PUBLIC_START, SIZES[-1])
    private = _faces(0, SIZES[-1] // 4)
    near_copies(private[:100], public[:1000])
    seconds = []
    for size in SIZES:
        began = time.process_time()
        near_copies(private[: size // 4], public[:size])
        seconds.append(time.process_time() - began)
        if len(seconds) > 1:
            yield Measured(
                f"near copies of {size // 4:,} among {size:,}, over a quarter",
                seconds[-1] / seconds[-2],
                f"{seconds[-1]:.2f} s against {seconds[-2]:.2f} s",
                most=LIMIT,
            )


def _faces(first: int, count: int) -> torch.Tensor:
    people = torch.arange(first, first + count)
    return photograph(0, people, torch.zeros_like(people), 32)[0]
