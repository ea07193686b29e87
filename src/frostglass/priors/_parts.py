"""Images made in parts that fit into a stated memory."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

GIB = 2**30


def rows_at_once(memory: float, image_bytes: int) -> int:
    """Return how many images `memory` GiB hold.

    It is a power of two, so that parts of a padded batch are alike.
    """
    fitting = int(memory * GIB / max(1, image_bytes))
    return 2 ** max(0, fitting.bit_length() - 1)


def in_parts(make: Callable[..., Tensor], rows: int, *columns: Tensor) -> Tensor:
    """Return `make(*columns)`, computed for `rows` rows at a time.

    If there are several parts, gradients recompute each part instead of storing it.
    """
    if len(columns[0]) <= rows:
        return make(*columns)
    parts = zip(*(column.split(rows) for column in columns), strict=True)
    if not torch.is_grad_enabled():
        return torch.cat([make(*part) for part in parts])
    recompute = functools.partial(checkpoint, make, use_reentrant=False, preserve_rng_state=False)
    return torch.cat([recompute(*part) for part in parts])
