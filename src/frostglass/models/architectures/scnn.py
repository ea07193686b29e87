"""The digit classifier that GMI and BiDO use as evaluator."""

from torch import nn

from frostglass.core.types import Shape
from frostglass.models.architectures.mcnn import convolutions
from frostglass.models.base import models


@models.register
def scnn(*, classes: int, image_shape: Shape) -> nn.Module:
    """Five convolutions with batch norm and LeakyReLU 0.2, and a linear head on the flat map.

    32, 64, 128, 256 and 512 channels with kernels 7, 5, 5, 3 and 3, the first two max-pooled; 512
    features at 32 px.

    Paper: Zhang et al., 2020 (arXiv:1911.07135), published code. Differs: also takes larger and
    colour images, where the head grows with the map; no activation works in place.
    """
    pooled = ((32, 7, 1, True), (64, 5, 0, True))
    plan = (*pooled, (128, 5, 0, False), (256, 3, 1, False), (512, 3, 1, False))
    return nn.Sequential(convolutions("scnn", plan, classes=classes, image_shape=image_shape))
