"""LeNet-5 for small images of any size."""

from collections import OrderedDict

from torch import nn

from frostglass.core.types import Shape
from frostglass.models.base import models


@models.register
def lenet(*, classes: int, image_shape: Shape) -> nn.Module:
    """Two 5x5 convolutions and two hidden linear layers, with ReLU and max pooling.

    61,706 weights for ten classes of grey 32x32 images.

    Paper: LeCun, Bottou, Bengio, Haffner, 1998. Differs: ReLU and max pooling for the scaled tanh
    and trained subsampling, full connections between the convolutions; a 5x5 average pool (no
    change at 32 px) makes other sizes fit, and images under 32 px are padded.
    """
    channels, height, width = image_shape
    padding = 2 if min(height, width) < 32 else 0
    return nn.Sequential(
        OrderedDict(
            stage1=nn.Sequential(
                nn.Conv2d(channels, 6, 5, padding=padding), nn.ReLU(), nn.MaxPool2d(2)
            ),
            stage2=nn.Sequential(nn.Conv2d(6, 16, 5, padding=padding), nn.ReLU(), nn.MaxPool2d(2)),
            pool=nn.AdaptiveAvgPool2d(5),
            flatten=nn.Flatten(),
            stage3=nn.Sequential(nn.Linear(400, 120), nn.ReLU()),
            stage4=nn.Sequential(nn.Linear(120, 84), nn.ReLU()),
            head=nn.Linear(84, classes),
        )
    )
