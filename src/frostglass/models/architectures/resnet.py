"""A small pre-activation residual network."""

from collections import OrderedDict

from torch import Tensor, nn

from frostglass.core.types import Shape
from frostglass.models.base import check_positive, models
from frostglass.models.shortcuts import ResidualBlock, scaled


class Block(ResidualBlock):
    """Two convolutions, each after batch norm and ReLU, with a shortcut around them.

    Nothing is in place: per-sample gradients need that.
    """

    projection = "project"

    def __init__(self, channels: int, wide: int, stride: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv1 = nn.Conv2d(channels, wide, 3, stride=stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(wide)
        self.conv2 = nn.Conv2d(wide, wide, 3, padding=1, bias=False)
        self.relu1, self.relu2 = nn.ReLU(), nn.ReLU()
        self.project: nn.Module | None = None
        if stride > 1 or channels != wide:
            self.project = nn.Conv2d(channels, wide, 1, stride=stride, bias=False)

    def forward(self, maps: Tensor) -> Tensor:
        active = self.relu1(self.norm1(maps))
        residual = self.conv2(self.relu2(self.norm2(self.conv1(active))))
        if not self.shortcut_scale:
            return residual
        shortcut = maps if self.project is None else self.project(active)
        return scaled(shortcut, self.shortcut_scale) + residual


@models.register
def resnet(*, classes: int, image_shape: Shape, width: int = 16, depth: int = 2) -> nn.Module:
    """Three stages of pre-activation blocks with `width` x 1, 2, 4 channels, and a linear head.

    The first stage halves the map only if images have 64 px or more.

    Paper: He, Zhang, Ren, Sun, 2016 (arXiv:1603.05027). Differs: shortcuts that change shape are
    1x1 convolutions.

    Args:
        width: channels of the first stage.
        depth: blocks of each stage.
    """
    check_positive("resnet", width=width, depth=depth)
    channels, side = width, min(image_shape[1:])
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        stem=nn.Conv2d(image_shape[0], width, 3, padding=1, bias=False)
    )
    for number in range(3):
        wide = width * 2**number
        stride = 2 if number or side >= 64 else 1
        first = Block(channels, wide, stride)
        others = (Block(wide, wide, 1) for _ in range(depth - 1))
        layers[f"stage{number + 1}"] = nn.Sequential(first, *others)
        channels = wide
    layers.update(norm=nn.BatchNorm2d(channels), relu=nn.ReLU())
    layers.update(pool=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten())
    layers["head"] = nn.Linear(channels, classes)
    return nn.Sequential(layers)
