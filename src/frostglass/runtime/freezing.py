"""Seeds, threads and the promise to leave the caller's networks as they were."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def frozen(*modules: nn.Module) -> Iterator[None]:
    """Evaluation mode and no weight gradients inside; modes, flags, gradients, buffers and global RNG as before afterwards, also after an exception."""
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


@contextmanager
def channels_last(*modules: nn.Module) -> Iterator[None]:
    """Weights of convolutions laid out channel by channel inside the block, which is faster; the very tensors from before afterwards."""
    before = [
        (tensor, tensor.data)
        for module in modules
        for tensor in (*module.parameters(), *module.buffers())
        if tensor.ndim == 4
    ]
    try:
        for tensor, data in before:
            tensor.data = data.contiguous(memory_format=torch.channels_last)
        yield
    finally:
        for tensor, data in before:
            tensor.data = data
