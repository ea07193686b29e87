"""How kernels compute with numbers."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

DENORMAL = 1e-39  # below the least normal number of single precision, 1e-38


@contextmanager
def denormals_flushed() -> Iterator[None]:
    """Let numbers below the least normal one count as 0 inside the block, on CPUs that can.

    Kernels take up to 27 times as long for such numbers, and a mask or a saturated layer makes many
    of them. Threads that torch starts inside the block do the same, those it has already do not.
    """
    before = not torch.full((1,), DENORMAL).mul(0.5).count_nonzero()
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)
