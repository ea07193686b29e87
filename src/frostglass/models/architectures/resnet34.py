"""ResNet-34 with a 50-d embedding before its head, as in variational model inversion (VMI)."""

from collections import OrderedDict

from torch import Tensor, nn

from frostglass.core.types import Shape
from frostglass.models.base import check_positive, models
from frostglass.models.shortcuts import ResidualBlock, scaled
from frostglass.models.taps import Tapped

STAGES = ((1, 3), (2, 4), (4, 6), (8, 3))  # channels as multiples of the width, and blocks
EMBEDDING = 50


class Block(ResidualBlock):
    """Two convolutions with batch norm, a shortcut around them, then ReLU.

    Nothing is in place: per-sample gradients need that.
    """

    projection = "project"

    def __init__(self, channels: int, wide: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _convolution(channels, wide, 3, stride)
        self.norm1, self.relu1 = nn.BatchNorm2d(wide), nn.ReLU()
        self.conv2 = _convolution(wide, wide, 3, 1)
        self.norm2, self.relu2 = nn.BatchNorm2d(wide), nn.ReLU()
        self.project: nn.Module | None = None
        if channels != wide:
            project = _convolution(channels, wide, 1, stride)
            self.project = nn.Sequential(project, nn.BatchNorm2d(wide))

    def forward(self, maps: Tensor) -> Tensor:
        residual = self.norm2(self.conv2(self.relu1(self.norm1(self.conv1(maps)))))
        if self.shortcut_scale:
            shortcut = maps if self.project is None else self.project(maps)
            residual = residual + scaled(shortcut, self.shortcut_scale)
        return self.relu2(residual)


class ResNet34(Tapped):
    """ResNet-34 with an embedding.

    The layers by name: `stem`, `stage1` to `stage4`, `pool`, `flatten`, `relu`, `norm`,
    `embedding`, `embedding_relu`, `embedding_norm` and `head`.
    """


@models.register
def resnet34(*, classes: int, image_shape: Shape, width: int = 64) -> nn.Module:
    """ResNet-34 with a 50-d embedding of its 512 pooled features, and a linear head.

    ReLU and batch norm come before the embedding and again before the head. Published taps: stem,
    four stages, the embedding, and the embedding after its batch norm. 21.36 million weights for
    1000 classes.

    Paper: Wang et al., Variational Model Inversion Attacks, 2021 (arXiv:2201.10787); He, Zhang,
    Ren, Sun, 2016 (arXiv:1512.03385). Differs: the stem is that of ImageNet at every size, as in
    the published code (a 7x7 convolution and a max-pool, each of stride 2: the first stage gets
    16x16 at 64 px, the last map is 2x2); the average over space takes maps of any size.

    Args:
        width: channels of the first stage; the others have 2, 4 and 8 times as many. 64 is
            ResNet-34.
    """
    check_positive("resnet34", width=width)
    channels = width
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    stem = _convolution(image_shape[0], width, 7, 2)
    layers["stem"] = nn.Sequential(
        stem, nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, stride=2, padding=1)
    )
    for number, (multiple, depth) in enumerate(STAGES, 1):
        wide = width * multiple
        first = Block(channels, wide, 1 if number == 1 else 2)
        layers[f"stage{number}"] = nn.Sequential(
            first, *(Block(wide, wide, 1) for _ in range(depth - 1))
        )
        channels = wide
    layers.update(
        pool=nn.AdaptiveAvgPool2d(1),
        flatten=nn.Flatten(),
        relu=nn.ReLU(),
        norm=nn.BatchNorm1d(channels),
        embedding=nn.Linear(channels, EMBEDDING),
        embedding_relu=nn.ReLU(),
        embedding_norm=nn.BatchNorm1d(EMBEDDING),
        head=nn.Linear(EMBEDDING, classes),
    )
    return ResNet34(
        layers, ("stem", "stage1", "stage2", "stage3", "stage4", "embedding", "embedding_norm")
    )


def _convolution(channels: int, wide: int, kernel: int, stride: int) -> nn.Conv2d:
    layer = nn.Conv2d(channels, wide, kernel, stride=stride, padding=kernel // 2, bias=False)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return layer
