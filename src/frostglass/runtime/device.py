"""Seeds, threads and the promise to leave the caller's networks as they were."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


def default_device() -> torch.device:
    """Where networks live: FROSTGLASS_DEVICE if it is set, else a CUDA device if there is one, else the CPU."""
    return torch.device(
        os.environ.get("FROSTGLASS_DEVICE") or ("cuda" if torch.cuda.is_available() else "cpu")
    )


@contextmanager
def override_device(device: torch.device) -> Iterator[None]:
    """Let networks live on a device inside the block, whatever there is else."""
    before = os.environ.get("FROSTGLASS_DEVICE")
    os.environ["FROSTGLASS_DEVICE"] = str(device)
    try:
        yield
    finally:
        if before is None:
            del os.environ["FROSTGLASS_DEVICE"]
        else:
            os.environ["FROSTGLASS_DEVICE"] = before


def device_of(module: nn.Module) -> torch.device:
    """Where a module's weights are; the CPU for a module without any."""
    return next((tensor.device for tensor in module.state_dict().values()), torch.device("cpu"))
