"""MIRROR's box: how far the styles of a StyleGAN may stray, told before the last activation of its mapping network."""

from dataclasses import dataclass

import torch
from torch import Tensor

from frostglass.attacks._search.styled import StyleSpace
from frostglass.networks.stylegan2.network import SLOPE


@dataclass(frozen=True)
class Box:
    """Mean ± `width` standard deviations of each coordinate of p, the styles before the activation they come out of.

    p = w where w ≥ 0, else w / 0.2. The factor √2 of a StyleGAN2's activation is left in p: mean, deviation and bounds all carry it, so that the box is the
    same one. Where there is no activation to undo (`bent` is False) p is w. `mean` and `std` (size,) are those of p.
    """

    mean: Tensor
    std: Tensor
    width: float
    bent: bool

    @classmethod
    def around(cls, space: StyleSpace, styles: Tensor, width: float) -> "Box":
        """The box of styles (P, size) that were drawn and not truncated: those no longer come out of an activation."""
        points = _before(styles) if space.bent else styles
        return cls(points.mean(0), points.std(0, correction=0), width, space.bent)

    def before(self, styles: Tensor) -> Tensor:
        """p of styles w."""
        return _before(styles) if self.bent else styles

    def after(self, points: Tensor) -> Tensor:
        """The styles w of p."""
        return torch.where(points >= 0, points, points * SLOPE) if self.bent else points

    @property
    def low(self) -> Tensor:
        """The least that each coordinate of a style may be."""
        return self.after(self.mean - self.width * self.std)

    @property
    def high(self) -> Tensor:
        """The most that each coordinate of a style may be."""
        return self.after(self.mean + self.width * self.std)

    def held(self, styles: Tensor) -> Tensor:
        """Styles (..., size) brought into the box; p rises with w, so that this is the same for both."""
        return styles.clamp(self.low, self.high)


def _before(styles: Tensor) -> Tensor:
    return torch.where(styles >= 0, styles, styles / SLOPE)
