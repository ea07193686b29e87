"""The registry of networks, the normalising wrapper, and the one way to try a network without changing it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from frostglass.core.errors import ConfigError, ModelError
from frostglass.core.registry import Registry
from frostglass.core.types import Shape
from frostglass.runtime.freezing import frozen
from frostglass.runtime.seeding import generator_for

models = Registry("model", "frostglass.models.architectures")

# What torch, timm and torchvision raise for a size or an option they cannot use.
MODEL_ERRORS = (
    RuntimeError,
    ValueError,
    TypeError,
    AssertionError,
    LookupError,
    AttributeError,
    ZeroDivisionError,
)


class Preprocess(nn.Module):
    """Normalise images in [0, 1] by channel, then call `net`. Mean and spread belong to the recipe, so they are no part of the weights."""

    mean: Tensor
    std: Tensor

    def __init__(self, net: nn.Module, mean: Sequence[float], std: Sequence[float]):
        super().__init__()
        self.net = net
        self.register_buffer(
            "mean", torch.tensor(mean, dtype=torch.float32).view(1, -1, 1, 1), persistent=False
        )
        self.register_buffer(
            "std", torch.tensor(std, dtype=torch.float32).view(1, -1, 1, 1), persistent=False
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.net(as_seen(self, images))


def as_seen(module: nn.Module, images: Tensor) -> Tensor:
    """Images as the network itself gets them: normalised where it stands in a `Preprocess`."""
    return (images - module.mean) / module.std if isinstance(module, Preprocess) else images


def inner(module: nn.Module) -> nn.Module:
    """The network itself, out of its `Preprocess` if it has one."""
    return module.net if isinstance(module, Preprocess) else module


def check_positive(name: str, **options: Any) -> None:
    """Refuse options that are not whole numbers of at least 1."""
    problems = [
        f"{name}: {option} must be a whole number of at least 1, got {value!r}"
        for option, value in options.items()
        if not isinstance(value, int) or isinstance(value, bool) or value < 1
    ]
    if problems:
        raise ConfigError(problems)


def noise_images(module: nn.Module, image_shape: Shape, count: int) -> Tensor:
    """The same few noise images in [0, 1] every time, where the module's weights are."""
    weight = next(module.parameters(), torch.empty(0))
    return torch.rand(count, *image_shape, generator=generator_for(0, "probe")).to(weight.device)


def probe(module: nn.Module, images: Tensor) -> Any:
    """What the module puts out for `images` in evaluation mode, leaving nothing of it changed; refuses NaN and infinity."""
    name, size = type(inner(module)).__name__, "x".join(map(str, images.shape[1:]))
    if any(is_lazy(part) for part in [*module.parameters(), *module.buffers()]):
        raise ModelError(
            f"{name} has lazy layers without weights yet: show it one batch of images first"
        )
    try:
        with torch.no_grad(), frozen(module):
            output = module(images)
    except MODEL_ERRORS as error:
        raise ModelError(f"{name} cannot take {size} images: {first_line(error)}") from error
    if isinstance(output, Tensor) and not output.isfinite().all():
        raise ModelError(
            f"{name} puts out NaN or infinity for {size} images of noise in [0, 1]: its weights, its size or its input range is wrong"
        )
    return output


def first_line(error: Exception) -> str:
    """What an error says, in one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
