"""Batch sizes for which a row's result does not depend on the other rows of its batch."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

BATCH_MULTIPLE = 16  # for multiples of this, kernels round a row alike in every batch

_unpadded = ContextVar("unpadded", default=False)


@contextmanager
def unpadded() -> Iterator[None]:
    """Search rows without padding inside the block.

    Only for rows that are searched together whatever else is: the same rows in the same shapes
    need no padding to give the same bits.
    """
    before = _unpadded.set(True)
    try:
        yield
    finally:
        _unpadded.reset(before)


def search_multiple(batch_multiple: int) -> int:
    """Return the multiple to pad searched rows to: 1 inside `unpadded`."""
    return 1 if _unpadded.get() else batch_multiple


def padded_rows(real: int, batch_multiple: int = BATCH_MULTIPLE) -> Tensor:
    """Return the indices of `real` rows, the last repeated up to a multiple of `batch_multiple`."""
    return torch.arange(math.ceil(real / batch_multiple) * batch_multiple).clamp(max=real - 1)
