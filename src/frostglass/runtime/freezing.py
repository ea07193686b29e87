"""A context manager that freezes networks and restores them."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def frozen(*modules: nn.Module) -> Iterator[None]:
    """Use evaluation mode without weight gradients inside the block.

    Modes, flags, gradients, buffers and the global random state are restored afterwards.
    """
    modes = [(part, part.training) for module in modules for part in module.modules()]
    flags = [(p, p.requires_grad, p.grad) for module in modules for p in module.parameters()]
    buffers = [(b, b.clone()) for module in modules for b in module.buffers()]
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        try:
            for part, _ in modes:
                part.training = False
            for parameter, _, _ in flags:
                parameter.requires_grad_(False)
            yield
        finally:
            for part, training in modes:
                part.training = training
            for parameter, requires_grad, grad in flags:
                parameter.requires_grad_(requires_grad)
                parameter.grad = grad
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)
