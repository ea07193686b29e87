"""The device networks are on."""

import os
from itertools import chain

import torch
from torch import nn


def default_device() -> torch.device:
    """Return FROSTGLASS_DEVICE if it is set, else a CUDA device if there is one, else the CPU."""
    return torch.device(
        os.environ.get("FROSTGLASS_DEVICE") or ("cuda" if torch.cuda.is_available() else "cpu")
    )


def device_of(module: nn.Module) -> torch.device:
    """Return the device of a module's weights; the CPU for a module without any."""
    tensors = chain(module.parameters(), module.buffers())
    return next((tensor.device for tensor in tensors), torch.device("cpu"))
