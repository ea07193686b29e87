"""The memory layout of networks: channels last is faster where a network takes it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from frostglass.runtime.device import device_of
from frostglass.runtime.freezing import frozen
from frostglass.runtime.seeding import generator_for

# With channels-last images and fewer input channels than a vector register holds, oneDNN's gradient
# of a strided 1×1 convolution writes beyond its output on CPUs with AVX2 (torch 2.15 crashes).
# AVX2 holds 8 numbers; 16 leaves room for the kernels of other CPUs.
NARROW = 16


@contextmanager
def channels_last(*modules: nn.Module) -> Iterator[None]:
    """Store convolution weights in channels-last layout inside the block, which is faster.

    The original tensors are restored afterwards.
    """
    before = [(tensor, tensor.data) for module in modules for tensor in _any_layout(module)]
    hooks = [hook for module in modules for hook in protect_narrow_projections(module)]
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


def protect_narrow_projections(module: nn.Module) -> list[RemovableHandle]:
    """Let these convolutions see the usual layout, whatever the network's input has."""
    return [layer.register_forward_pre_hook(_usual_layout) for layer in narrow_projections(module)]


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


@contextmanager
def fast_training(module: nn.Module, image_shape: Sequence[int]) -> Iterator[None]:
    """Lay a network out for training inside the block; its weights are as usual afterwards."""
    layout = fastest_layout(module, image_shape)
    lay_out(module, layout)
    try:
        with gradients_laid_out(module, layout):
            yield
    finally:
        lay_out(module, torch.contiguous_format)


@contextmanager
def gradients_laid_out(module: nn.Module, layout: torch.memory_format) -> Iterator[None]:
    """Give batch norms their gradients in the layout of the network inside the block.

    The gradient of an average over space has the usual layout, and the backward pass of a batch
    norm takes 10 to 20 times as long if its gradient and its input differ in layout.
    """

    def hook(_layer: nn.Module, _inputs: object, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda gradient: gradient.contiguous(memory_format=layout))

    with ExitStack() as hooks:
        for layer in module.modules():
            if isinstance(layer, nn.BatchNorm2d):
                hooks.enter_context(layer.register_forward_hook(hook))
        yield


def fastest_layout(module: nn.Module, image_shape: Sequence[int]) -> torch.memory_format:
    """Return the memory layout to train in: channels last, if the network takes such images."""
    if narrow_projections(module):
        return torch.contiguous_format
    images = torch.rand(2, *image_shape, generator=generator_for(0, "trial"))
    images = images.to(device_of(module)).contiguous(memory_format=torch.channels_last)

    def trial() -> None:
        with frozen(module), torch.no_grad():
            module.train()(images)

    last = takes_channels_last(trial, module)
    return torch.channels_last if last else torch.contiguous_format
