"""StyleGAN2's critic: how real raw images look."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frostglass.core.errors import ConfigError
from frostglass.networks.stylegan2.network import (
    FLOOR,
    TINY,
    Dense,
    StyleSettings,
    activated,
    drawn,
    low_passed,
)


class Conv(nn.Module):
    """Plain convolution, then activation if `bent`; `down` halves the size after the filter."""

    def __init__(
        self, inputs: int, outputs: int, kernel: int, *, down: bool = False, bent: bool = True,
        clamp: float | None = None,
    ):  # fmt: skip
        super().__init__()
        self.pad, self.down, self.bent, self.clamp = kernel // 2, down, bent, clamp
        self.gain = 1 / (inputs * kernel**2) ** 0.5
        self.weight = nn.Parameter(drawn(outputs, inputs, kernel, kernel))
        self.bias = nn.Parameter(torch.zeros(outputs)) if bent else None

    def forward(self, maps: Tensor, gain: float = 1.0) -> Tensor:
        weight = self.weight * self.gain
        if self.down and self.pad == 0:  # filter and downscale first: fewer pixels to convolve
            maps = F.conv2d(low_passed(maps, pad=1, stride=2), weight)
        elif self.down:
            maps = F.conv2d(low_passed(maps, pad=1 + self.pad), weight, stride=2)
        else:
            maps = F.conv2d(maps, weight, padding=self.pad)
        if self.bias is None:
            return maps * gain
        return activated(maps + self.bias[:, None, None], self.clamp, gain)


class CriticBlock(nn.Module):
    """Two 3×3 convolutions, the second halves the size, and a 1×1 shortcut; variance is kept."""

    def __init__(self, inputs: int, outputs: int, clamp: float | None):
        super().__init__()
        self.conv0 = Conv(inputs, inputs, 3, clamp=clamp)
        self.conv1 = Conv(inputs, outputs, 3, down=True, clamp=clamp)
        self.skip = Conv(inputs, outputs, 1, down=True, bent=False)

    def forward(self, maps: Tensor) -> Tensor:
        return self.skip(maps, 0.5**0.5) + self.conv1(self.conv0(maps), 0.5**0.5)


class StyleCritic(nn.Module):
    """Realism of raw images (N, 1), larger for more real.

    Residual blocks down to 4 pixels, then the variation of the batch, then two layers. Rows see the
    variation of groups of up to `group`: row i with rows i + n, i + 2n, ... of n groups.
    """

    def __init__(self, settings: StyleSettings, group: int = 4):
        super().__init__()
        self.group = group
        sizes, last = settings.sizes[::-1], settings.width(FLOOR)
        self.fromrgb = Conv(settings.colours, settings.width(sizes[0]), 1, clamp=settings.clamp)
        blocks = (
            CriticBlock(settings.width(size), settings.width(size // 2), settings.clamp)
            for size in sizes[:-1]
        )
        self.blocks = nn.Sequential(*blocks)
        self.conv = Conv(last + 1, last, 3, clamp=settings.clamp)
        self.fc = Dense(last * FLOOR**2, last, bent=True)
        self.out = Dense(last, 1)

    def forward(self, images: Tensor) -> Tensor:
        maps = self.blocks(self.fromrgb(images.contiguous(memory_format=torch.channels_last)))
        maps = torch.cat([maps, self._variation(maps)], dim=1)
        return self.out(self.fc(self.conv(maps).flatten(1)))

    def _variation(self, maps: Tensor) -> Tensor:
        """Return each group's standard deviation, averaged over channels and pixels, as a map."""
        members = min(self.group, len(maps))
        if len(maps) % members:
            raise ConfigError(
                f"the critic compares groups of {self.group} images: expected a multiple of it (or "
                f"fewer), got {len(maps)}"
            )
        groups = maps.unflatten(0, (members, -1))
        spread = (groups.var(0, correction=0) + TINY).sqrt().mean((1, 2, 3))
        return spread.repeat(members)[:, None, None, None].expand(-1, 1, *maps.shape[2:])
