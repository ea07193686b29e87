"""Seeds of random draws, each derived from the base seed and a path that names its purpose."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def seed_for(base: int, *path: str | int) -> int:
    """Derive a seed for one purpose from the base seed and the purpose's path.

    All random draws use such seeds, so none depends on the order in which work is done.
    """
    text = "/".join([str(base), *map(str, path)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def generator_for(base: int, *path: str | int) -> torch.Generator:
    """Return a CPU generator seeded by `seed_for`."""
    return torch.Generator().manual_seed(seed_for(base, *path))


@contextmanager
def seeded(base: int, *path: str | int) -> Iterator[None]:
    """Seed the global generator, which initialisers and dropout use, inside the block only."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed_for(base, *path))
        yield
