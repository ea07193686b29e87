"""The digit classifier that GMI and BiDO attack; its evaluator `scnn` shares `convolutions`."""

from collections import OrderedDict

from torch import nn

from frostglass.core.errors import ModelError
from frostglass.core.types import Shape
from frostglass.models.base import models
from frostglass.models.taps import Tapped

Convolution = tuple[int, int, int, bool]  # channels, kernel, padding, whether 2x2 max-pooled


class MCNN(Tapped):
    """The layers by name: `stage1` to `stage3`, `flatten` and `head`."""


@models.register
def mcnn(*, classes: int, image_shape: Shape) -> nn.Module:
    """Three wide convolutions with batch norm and LeakyReLU 0.2, and a linear head on the flat map.

    64, 128 and 256 channels with kernels 7, 5 and 5, the first two max-pooled; 256 features at
    32 px. Published taps: the three convolutions.

    Paper: Zhang et al., 2020 (arXiv:1911.07135), published code; Peng et al., 2022
    (arXiv:2206.05483). Differs: also takes larger and colour images, where the head grows with the
    map; no activation works in place.
    """
    plan = ((64, 7, 1, True), (128, 5, 0, True), (256, 5, 0, False))
    layers = convolutions("mcnn", plan, classes=classes, image_shape=image_shape)
    return MCNN(layers, ("stage1", "stage2", "stage3"))


def convolutions(
    name: str, plan: tuple[Convolution, ...], *, classes: int, image_shape: Shape
) -> OrderedDict[str, nn.Module]:
    """Make a stage for each convolution of the plan, then flatten and a linear head."""
    channels, high, wide = image_shape
    if min(high, wide) < 32:
        raise ModelError(
            f"{name} needs images of at least 32x32 pixels, got {high}x{wide}: resize or pad them"
        )
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for number, (more, kernel, padding, pooled) in enumerate(plan, 1):
        convolution = nn.Conv2d(channels, more, kernel, padding=padding)
        stage = [convolution, nn.BatchNorm2d(more), nn.LeakyReLU(0.2)]
        layers[f"stage{number}"] = nn.Sequential(*stage, *([nn.MaxPool2d(2)] if pooled else []))
        high, wide = (side + 2 * padding - kernel + 1 for side in (high, wide))
        high, wide = (high // 2, wide // 2) if pooled else (high, wide)
        channels = more
    layers.update(flatten=nn.Flatten(), head=nn.Linear(channels * high * wide, classes))
    return layers
