"""Seeds, threads and the promise to leave the caller's networks as they were."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def seed_for(base: int, *path: str | int) -> int:
    """A seed for one purpose, derived from the base seed and the purpose's path.

    Every random draw of the package comes from here, so no draw depends on the order in which work is done.
    """
    text = "/".join([str(base), *map(str, path)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def generator_for(base: int, *path: str | int) -> torch.Generator:
    """A CPU generator seeded by `seed_for`."""
    return torch.Generator().manual_seed(seed_for(base, *path))


@contextmanager
def seeded(base: int, *path: str | int) -> Iterator[None]:
    """Run code that insists on torch's global generator (initialisers, dropout) under a derived seed; the caller's state survives."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed_for(base, *path))
        yield
