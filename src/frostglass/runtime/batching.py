"""Batch sizes for which a row's result does not depend on the other rows of its batch."""

import math

import torch
from torch import Tensor

BATCH_MULTIPLE = 16  # for multiples of this, kernels round a row alike in every batch


def padded_rows(real: int, batch_multiple: int = BATCH_MULTIPLE) -> Tensor:
    """Return the indices of `real` rows, the last repeated up to a multiple of `batch_multiple`."""
    return torch.arange(math.ceil(real / batch_multiple) * batch_multiple).clamp(max=real - 1)
