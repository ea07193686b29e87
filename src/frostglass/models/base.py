"""The registry of networks, the normalising wrapper, and a test run that changes nothing."""

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
    *(RuntimeError, ValueError, TypeError, AssertionError),
    *(LookupError, AttributeError, ZeroDivisionError),
)


class Preprocess(nn.Module):
    """Normalise images in [0, 1] by channel, then call `net`.

    Mean and std belong to the recipe of the network, not to its weights.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, net: nn.Module, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.net = net
        for name, values in (("mean", mean), ("std", std)):
            tensor = torch.tensor(values, dtype=torch.float32).view(1, -1, 1, 1)
            self.register_buffer(name, tensor, persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        return self.net(as_seen(self, images))


def as_seen(module: nn.Module, images: Tensor) -> Tensor:
    """Return the images as the network itself gets them: normalised inside a `Preprocess`."""
    return (images - module.mean) / module.std if isinstance(module, Preprocess) else images


def inner(module: nn.Module) -> nn.Module:
    """Return the network itself, without its `Preprocess`."""
    return module.net if isinstance(module, Preprocess) else module


def class_name(module: nn.Module) -> str:
    """Return the class name of the network itself, for messages."""
    return type(inner(module)).__name__


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
    """Return noise images in [0, 1] on the module's device, the same ones every time."""
    weight = next(module.parameters(), torch.empty(0))
    return torch.rand(count, *image_shape, generator=generator_for(0, "probe")).to(weight.device)


def probe(module: nn.Module, images: Tensor) -> Any:
    """Return the module's output in evaluation mode, without changing it; refuses NaN."""
    name, size = class_name(module), "x".join(map(str, images.shape[1:]))
    if any(is_lazy(part) for part in [*module.parameters(), *module.buffers()]):
        raise ModelError(f"{name} has lazy layers without weights: run it on a batch of images")
    try:
        with torch.no_grad(), frozen(module):
            output = module(images)
    except MODEL_ERRORS as error:
        raise ModelError(f"{name} cannot take {size} images: {first_line(error)}") from error
    if isinstance(output, Tensor) and not output.isfinite().all():
        raise ModelError(
            f"{name} returns NaN or infinity for {size} images of noise in [0, 1]: check its "
            "weights, its size and its input range"
        )
    return output


def refuse_probabilities(name: str, outputs: Tensor) -> None:
    """Refuse outputs that are probabilities of classes.

    Softmax twice flattens every gradient, which would make any model look hard to invert.
    """
    if outputs.shape[1] > 1 and outputs.min() >= 0:
        totals = outputs.sum(1)
        if torch.allclose(totals, torch.ones_like(totals), atol=1e-3):
            raise ModelError(f"{name} returns probabilities, not logits: remove its softmax")


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or its type."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
