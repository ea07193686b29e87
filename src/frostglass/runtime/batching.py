"""Random numbers for the rows of a batch, the same for a row in any company."""

import math

import torch
from torch import Tensor

BATCH_MULTIPLE = 16  # kernels round differently for odd batch sizes; with multiples of this a row's result is the same in any batch


def padded_rows(real: int, batch_multiple: int = BATCH_MULTIPLE) -> Tensor:
    """Places of `real` rows, the last one repeated until they are a multiple of `batch_multiple`."""
    return torch.arange(math.ceil(real / batch_multiple) * batch_multiple).clamp(max=real - 1)
