"""A small ConvMixer: depthwise and pointwise convolutions on patches."""

from collections import OrderedDict

from torch import Tensor, nn

from frostglass.core.types import Shape
from frostglass.models.base import check_positive, models


class Mix(nn.Module):
    """A depthwise convolution with a shortcut mixes places, a pointwise one mixes channels."""

    def __init__(self, width: int, kernel: int) -> None:
        super().__init__()
        depthwise = nn.Conv2d(width, width, kernel, padding="same", groups=width)
        self.places = nn.Sequential(depthwise, nn.GELU(), nn.BatchNorm2d(width))
        self.channels = nn.Sequential(nn.Conv2d(width, width, 1), nn.GELU(), nn.BatchNorm2d(width))

    def forward(self, maps: Tensor) -> Tensor:
        return self.channels(maps + self.places(maps))


@models.register
def convmixer(
    *,
    classes: int,
    image_shape: Shape,
    width: int = 64,
    depth: int = 4,
    kernel: int = 3,
    patch: int = 2,
) -> nn.Module:
    """Depthwise and pointwise convolutions on patches, an average over space and a linear head.

    Paper: Trockman, Kolter, Patches Are All You Need?, 2022 (arXiv:2201.09792). Differs: far
    smaller.

    Args:
        width: channels of every layer.
        depth: number of layers.
        kernel: side of the depthwise convolutions.
        patch: side of the patches in pixels; twice that for images of 64 px or more.
    """
    check_positive("convmixer", width=width, depth=depth, kernel=kernel, patch=patch)
    patch = patch * 2 if min(image_shape[1:]) >= 64 else patch
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    layers["stem"] = nn.Sequential(
        nn.Conv2d(image_shape[0], width, patch, stride=patch), nn.GELU(), nn.BatchNorm2d(width)
    )
    layers.update((f"stage{number + 1}", Mix(width, kernel)) for number in range(depth))
    layers.update(pool=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten())
    layers["head"] = nn.Linear(width, classes)
    return nn.Sequential(layers)
