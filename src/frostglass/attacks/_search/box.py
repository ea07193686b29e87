"""MIRROR's box: bounds for the styles of a StyleGAN, set before the mapping's last activation."""

from dataclasses import dataclass

import torch
from torch import Tensor

from frostglass.networks.stylegan2.network import SLOPE
from frostglass.priors._style_space import StyleSpace


@dataclass(frozen=True)
class Box:
    """Mean ± `width` standard deviations of each coordinate of p, the style before its activation.

    p = w where w ≥ 0, else w / 0.2. The factor √2 of a StyleGAN2's activation stays in p: mean,
    deviation and bounds all carry it, so the box is the same. Without an activation (`activated`
    is False) p is w. `mean` and `std` (size,) are those of p.
    """

    mean: Tensor
    std: Tensor
    width: float
    activated: bool

    @classmethod
    def around(cls, space: StyleSpace, styles: Tensor, width: float) -> "Box":
        """Return the box of styles (P, size), which must not be truncated."""
        points = _before(styles) if space.activated else styles
        return cls(points.mean(0), points.std(0, correction=0), width, space.activated)

    def before(self, styles: Tensor) -> Tensor:
        """Convert styles w to p."""
        return _before(styles) if self.activated else styles

    def after(self, points: Tensor) -> Tensor:
        """Convert p to styles w."""
        return torch.where(points >= 0, points, points * SLOPE) if self.activated else points

    @property
    def low(self) -> Tensor:
        """The lower bound of each coordinate of a style."""
        return self.after(self.mean - self.width * self.std)

    @property
    def high(self) -> Tensor:
        """The upper bound of each coordinate of a style."""
        return self.after(self.mean + self.width * self.std)

    def clamp(self, styles: Tensor) -> Tensor:
        """Clamp styles (..., size) to the box; p rises with w, so w and p clamp alike."""
        return styles.clamp(self.low, self.high)


def _before(styles: Tensor) -> Tensor:
    return torch.where(styles >= 0, styles, styles / SLOPE)
