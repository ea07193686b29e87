"""A compact convolutional network that trains in minutes on a laptop."""

from collections import OrderedDict

from torch import nn

from frostglass.core.types import Shape
from frostglass.models.base import check_positive, models


@models.register
def cnn(*, classes: int, image_shape: Shape, width: int = 32) -> nn.Module:
    """Four stages of convolution, batch norm and ReLU, an average over space and a linear head.

    The stages have `width` x 1, 2, 4, 8 channels, and each halves the map until it is about 4x4. A
    32x32 image costs 15 million multiplications at the default width.

    Args:
        width: channels of the first stage.
    """
    check_positive("cnn", width=width)
    channels, side = image_shape[0], min(image_shape[1:])
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for number in range(4):
        wide = width * 2**number
        convolution = nn.Conv2d(channels, wide, 3, padding=1, bias=False)
        stage: list[nn.Module] = [convolution, nn.BatchNorm2d(wide)]
        if side >= 8:
            stage.append(nn.MaxPool2d(2))
            side //= 2
        # After the pool it has a quarter of the numbers, and the same result.
        layers[f"stage{number + 1}"] = nn.Sequential(*stage, nn.ReLU())
        channels = wide
    layers.update(pool=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten())
    layers["head"] = nn.Linear(channels, classes)
    return nn.Sequential(layers)
