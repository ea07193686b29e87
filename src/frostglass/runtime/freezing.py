"""Context managers that change networks and restore them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

# With channels-last images and fewer input channels than a vector register holds, oneDNN's gradient
# of a strided 1×1 convolution writes beyond its output on CPUs with AVX2 (torch 2.15 crashes).
# AVX2 holds 8 numbers; 16 leaves room for the kernels of other CPUs.
NARROW = 16


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


@contextmanager
def channels_last(*modules: nn.Module) -> Iterator[None]:
    """Store convolution weights in channels-last layout inside the block, which is faster.

    The original tensors are restored afterwards.
    """
    before = [(tensor, tensor.data) for module in modules for tensor in _any_layout(module)]
    hooks = [
        layer.register_forward_pre_hook(_usual_layout)
        for module in modules
        for layer in narrow_projections(module)
    ]
    try:
        for tensor, data in before:
            tensor.data = data.contiguous(memory_format=torch.channels_last)
        yield
    finally:
        for tensor, data in before:
            tensor.data = data
        for hook in hooks:
            hook.remove()


def narrow_projections(module: nn.Module) -> list[nn.Conv2d]:
    """Return the strided 1×1 convolutions of few channels, which must not see channels last."""
    return [
        layer
        for layer in module.modules()
        if isinstance(layer, nn.Conv2d)
        and layer.kernel_size == (1, 1)
        and max(layer.stride) > 1
        and layer.in_channels // layer.groups < NARROW
    ]


def _any_layout(module: nn.Module) -> list[Tensor]:
    """Return the weights of four dimensions that may be stored in any layout."""
    fixed = {id(layer.weight) for layer in narrow_projections(module)}
    tensors = (*module.parameters(), *module.buffers())
    return [tensor for tensor in tensors if tensor.ndim == 4 and id(tensor) not in fixed]


def _usual_layout(_layer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(each.contiguous() for each in inputs)


def takes_channels_last(trial: Callable[[], object], *modules: nn.Module) -> bool:
    """Return whether a trial of networks works with channels-last weights.

    Checked empirically: some models reshape by `Tensor.view`.
    """
    try:
        with channels_last(*modules):
            trial()
    except RuntimeError as error:
        if "view size is not compatible" not in str(error):
            raise
        return False
    return True


def lay_out(module: nn.Module, layout: torch.memory_format) -> None:
    """Store a network's weights of four dimensions in a layout, from now on."""
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.ndim == 4:
            # Copied, because `contiguous` keeps the strides of weights that fit both layouts.
            tensor.data = torch.empty_like(tensor.data, memory_format=layout).copy_(tensor.data)
