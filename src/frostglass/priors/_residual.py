"""Class-conditional residual networks: a generator with class-conditional batch norm, a critic."""

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from frostglass.core.types import Shape

FLOOR = 4  # pixels a side of the generator's first maps


class LabelledNorm(nn.Module):
    """Batch norm over all rows, then scale γ_y and shift β_y of each row's class."""

    def __init__(self, width: int, classes: int):
        super().__init__()
        self.norm = nn.BatchNorm2d(width, affine=False)
        self.scale = nn.Embedding(classes, width)
        self.shift = nn.Embedding(classes, width)
        nn.init.ones_(self.scale.weight)
        nn.init.zeros_(self.shift.weight)

    def forward(self, maps: Tensor, labels: Tensor) -> Tensor:
        scale, shift = self.scale(labels), self.shift(labels)
        return self.norm(maps) * scale[:, :, None, None] + shift[:, :, None, None]


class UpBlock(nn.Module):
    """Norm, ReLU, upsampling by 2, 3×3; norm, ReLU, 3×3; plus a 1×1 shortcut."""

    def __init__(self, wide: int, narrow: int, classes: int):
        super().__init__()
        self.norm1, self.norm2 = LabelledNorm(wide, classes), LabelledNorm(narrow, classes)
        self.conv1 = nn.Conv2d(wide, narrow, 3, 1, 1)
        self.conv2 = nn.Conv2d(narrow, narrow, 3, 1, 1)
        self.shortcut = nn.Conv2d(wide, narrow, 1)

    def forward(self, maps: Tensor, labels: Tensor) -> Tensor:
        inner = self.conv1(_doubled(F.relu(self.norm1(maps, labels))))
        inner = self.conv2(F.relu(self.norm2(inner, labels)))
        # 1×1 before doubling is the same function at a quarter of the work.
        return inner + _doubled(self.shortcut(maps))


class LabelledGenerator(nn.Module):
    """Images in [0, 1] from latents (N, latent) and class labels (N,).

    `width` channels in the last stage, twice as many in each before.
    """

    def __init__(self, latent: int, width: int, image_shape: Shape, classes: int):
        super().__init__()
        widths = [width * 2**stage for stage in reversed(range(_doublings(image_shape) + 1))]
        self.start = nn.Sequential(
            nn.Linear(latent, widths[0] * FLOOR**2), nn.Unflatten(1, (widths[0], FLOOR, FLOOR))
        )
        self.blocks = nn.ModuleList(
            UpBlock(wide, narrow, classes) for wide, narrow in itertools.pairwise(widths)
        )
        self.end = nn.Sequential(
            nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, image_shape[0], 1), nn.Sigmoid()
        )

    def forward(self, latents: Tensor, labels: Tensor) -> Tensor:
        maps = self.start(latents)
        maps = maps.contiguous(memory_format=torch.channels_last)  # nearly twice as fast on a CPU
        for block in self.blocks:
            maps = block(maps, labels)
        return self.end(maps).contiguous()


class DownBlock(nn.Module):
    """ReLU (unless the input is an image), 3×3, ReLU, 3×3, pooling by 2; plus a 1×1 shortcut.

    Every weight has spectral norm 1.
    """

    def __init__(self, narrow: int, wide: int, *, takes_image: bool = False):
        super().__init__()
        self.takes_image = takes_image
        inner = wide if takes_image else narrow
        self.conv1, self.conv2 = _conv(narrow, inner, 3), _conv(inner, wide, 3)
        self.shortcut = _conv(narrow, wide, 1)

    def forward(self, maps: Tensor) -> Tensor:
        inner = self.conv2(F.relu(self.conv1(maps if self.takes_image else F.relu(maps))))
        return F.avg_pool2d(inner, 2) + self.shortcut(F.avg_pool2d(maps, 2))


class ResidualCritic(nn.Module):
    """The part that critics share: images to features h (N, `size`), the sum of the last maps.

    `width` channels in the first stage, twice as many in each that follows.
    """

    def __init__(self, width: int, image_shape: Shape):
        super().__init__()
        widths = [width * 2**stage for stage in range(_doublings(image_shape) + 1)]
        first = DownBlock(image_shape[0], width, takes_image=True)
        self.blocks = nn.Sequential(
            first, *(DownBlock(narrow, wide) for narrow, wide in itertools.pairwise(widths))
        )
        self.size = widths[-1]

    def features(self, images: Tensor) -> Tensor:
        """Return h, (N, F)."""
        return F.relu(self.blocks(images.contiguous(memory_format=torch.channels_last))).sum((2, 3))


class ProjectionCritic(ResidualCritic):
    """D(x, y) = a·h + ⟨e_y, h⟩ (N,), larger for more realistic images of class y."""

    def __init__(self, width: int, image_shape: Shape, classes: int):
        super().__init__(width, image_shape)
        self.real = _normed(nn.Linear(self.size, 1))
        self.like = _normed(nn.Embedding(classes, self.size))

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        features = self.features(images)
        return self.real(features)[:, 0] + (self.like(labels) * features).sum(1)


class ClassifyingCritic(ResidualCritic):
    """D(x) = a·h (N,), larger for more realistic images, and the logits C(x) (N, K) of classes.

    Neither head has spectral norm.
    """

    def __init__(self, width: int, image_shape: Shape, classes: int):
        super().__init__(width, image_shape)
        self.real, self.classes = nn.Linear(self.size, 1), nn.Linear(self.size, classes)
        for head in (self.real, self.classes):
            nn.init.xavier_uniform_(head.weight)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        features = self.features(images)
        return self.real(features)[:, 0], self.classes(features)


def _doublings(image_shape: Shape) -> int:
    """Return how often the size doubles from the first maps to the image: 4 times for 64 pixels."""
    return (image_shape[1] // FLOOR).bit_length() - 1


def _doubled(maps: Tensor) -> Tensor:
    return F.interpolate(maps, scale_factor=2, mode="bilinear", align_corners=False)


def _conv(narrow: int, wide: int, size: int) -> nn.Module:
    return _normed(nn.Conv2d(narrow, wide, size, 1, size // 2), gain=2**0.5 if size > 1 else 1.0)


def _normed(layer: nn.Conv2d | nn.Linear | nn.Embedding, gain: float = 1.0) -> nn.Module:
    """Give a layer Xavier's weights, divided by their spectral norm at every use."""
    nn.init.xavier_uniform_(layer.weight, gain)
    return spectral_norm(layer)
