"""The generator and critic of GMI's code: strided 5×5 convolutions."""

import itertools

from torch import nn

from frostglass.core.errors import ConfigError
from frostglass.core.types import Shape


def build_generator(latent: int, width: int, image_shape: Shape, first: int = 4) -> nn.Sequential:
    """Build the published generator of square images, which starts at `first` × `first`, 4 or 8.

    It has `width` channels before its last layer. 32 and 64 pixels are published; a start at 8×8
    is that of Crafter, one stage shorter.
    """
    channels, height, breadth = image_shape
    if height != breadth or height not in (16, 32, 64, 128):
        raise ConfigError(
            "the generator makes square images of 16, 32, 64 or 128 pixels, got "
            f"{height}×{breadth}: choose another data.size"
        )
    stages = (height // first).bit_length() - 1
    widths = [width * 2**stage for stage in reversed(range(stages))]
    layers: list[nn.Module] = [
        nn.Linear(latent, widths[0] * first**2, bias=False),
        nn.BatchNorm1d(widths[0] * first**2),
        nn.ReLU(),
        nn.Unflatten(1, (widths[0], first, first)),
    ]
    for wide, narrow in itertools.pairwise(widths):
        upscale = nn.ConvTranspose2d(wide, narrow, 5, 2, 2, 1, bias=False)
        layers += [upscale, nn.BatchNorm2d(narrow), nn.ReLU()]
    last = nn.ConvTranspose2d(widths[-1], channels, 5, 2, 2, 1)
    return nn.Sequential(*layers, last, nn.Sigmoid())


def build_critic(width: int, channels: int, side: int) -> nn.Sequential:
    """Build the published critic of square images, which ends at 4×4.

    Its first stage has `width` channels. 32 and 64 pixels are published.
    """
    widths = [width * 2**stage for stage in range(side.bit_length() - 3)]
    layers: list[nn.Module] = [nn.Conv2d(channels, widths[0], 5, 2, 2), nn.LeakyReLU(0.2)]
    for narrow, wide in itertools.pairwise(widths):
        downscale = nn.Conv2d(narrow, wide, 5, 2, 2)
        layers += [downscale, nn.InstanceNorm2d(wide, affine=True), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers, nn.Conv2d(widths[-1], 1, 4), nn.Flatten())
