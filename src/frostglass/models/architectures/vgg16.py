"""VGG16 with batch norm and one linear layer, as inversion papers use it on small images."""

from collections import OrderedDict

from torch import nn

from frostglass.core.errors import ConfigError, ModelError
from frostglass.core.types import Shape
from frostglass.models.base import check_positive, models
from frostglass.models.taps import Tapped

# Channels as multiples of the width, and convolutions, before each of five max-pools.
BLOCKS = ((1, 2), (2, 2), (4, 3), (8, 3), (8, 3))


class VGG16(Tapped):
    """The layers by name: `features`, `flatten`, `norm` (optional) and `head`."""


@models.register
def vgg16(
    *, classes: int, image_shape: Shape, width: int = 64, feature_norm: bool = True
) -> nn.Module:
    """13 convolutions with batch norm in five max-pooled blocks, and a head on the flat features.

    2048 features at 64 px, 512 at 32 px, normalised by a batch norm whose shift is fixed at zero.
    `features` has the names of torchvision's vgg16_bn, so that part of its file can be read.
    Published taps: the five blocks after max-pool, the fifth after that batch norm. 16.77 million
    trainable weights for 1000 classes at 64 px.

    Paper: Simonyan, Zisserman, 2015 (arXiv:1409.1556); this head: Zhang et al., 2020
    (arXiv:1911.07135). Differs: without starting weights it begins at random, where the papers
    begin with ImageNet's; no ReLU works in place, which per-sample gradients need.

    Args:
        width: channels of the first block; the others have 2, 4, 8 and 8 times as many. 64 is
            VGG16.
        feature_norm: normalise the flat features; MID's network does not.
    """
    check_positive("vgg16", width=width)
    if not isinstance(feature_norm, bool):
        raise ConfigError(f"vgg16: feature_norm must be true or false, got {feature_norm!r}")
    channels, high, wide = image_shape
    if min(high, wide) < 32:
        raise ModelError(
            f"vgg16 needs images of at least 32x32 pixels, got {high}x{wide}: resize them"
        )
    features: list[nn.Module] = []
    pools = []
    for multiple, convolutions in BLOCKS:
        for _ in range(convolutions):
            convolution = _convolution(channels, width * multiple)
            channels = width * multiple
            features += [convolution, nn.BatchNorm2d(channels), nn.ReLU()]
        pools.append(f"features.{len(features)}")
        features.append(nn.MaxPool2d(2))
    length = channels * (high // 32) * (wide // 32)
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        features=nn.Sequential(*features), flatten=nn.Flatten()
    )
    if feature_norm:
        layers["norm"] = norm = nn.BatchNorm1d(length)
        norm.bias.requires_grad_(False)
    layers["head"] = nn.Linear(length, classes)
    return VGG16(layers, (*pools[:4], "norm" if feature_norm else pools[4]))


def _convolution(channels: int, wide: int) -> nn.Conv2d:
    """Make a 3x3 convolution, initialised like torchvision's."""
    layer = nn.Conv2d(channels, wide, 3, padding=1)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer
