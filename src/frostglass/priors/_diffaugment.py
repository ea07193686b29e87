"""Differentiable changes that a critic sees of real and made pictures alike, so that it cannot learn few pictures by heart.

Paper: Zhao et al., Differentiable Augmentation for Data-Efficient GAN Training, NeurIPS 2020, arXiv 2006.10738.
"""

from typing import Literal

import torch
from torch import Tensor

Change = Literal["colour", "move", "cover"]
REACH = 1 / 8  # of the side that pictures are moved by, at most
COVER = 1 / 2  # of the side that the covered square has


def changed(pictures: Tensor, changes: tuple[Change, ...], rng: torch.Generator) -> Tensor:
    """Raw pictures (N, C, H, W) around 0, each changed by draws of its own; what is moved in or covered is 0, the middle of the range."""
    for change in changes:
        pictures = {"colour": _coloured, "move": _moved, "cover": _covered}[change](pictures, rng)
    return pictures


def _coloured(pictures: Tensor, rng: torch.Generator) -> Tensor:
    """Brightness moved by up to ½ either way, saturation times 0 to 2, contrast times ½ to 1½."""
    bright, saturation, contrast = torch.rand(3, len(pictures), 1, 1, 1, generator=rng).to(pictures)
    pictures = pictures + (bright - 0.5)
    pictures = torch.lerp(pictures.mean(1, keepdim=True), pictures, 2 * saturation)
    return torch.lerp(pictures.mean((1, 2, 3), keepdim=True), pictures, contrast + 0.5)


def _moved(pictures: Tensor, rng: torch.Generator) -> Tensor:
    """Moved by whole pixels, up to an eighth of the side either way."""
    count, _, height, width = pictures.shape
    reach = [int(side * REACH + 0.5) for side in (height, width)]
    down, right = (torch.randint(-far, far + 1, (count, 1), generator=rng) for far in reach)
    rows, columns = (
        torch.arange(height) - down,
        torch.arange(width) - right,
    )  # where each pixel comes from
    inside = ((rows >= 0) & (rows < height))[:, :, None] & ((columns >= 0) & (columns < width))[
        :, None, :
    ]
    source = rows.clamp(0, height - 1)[:, :, None] * width + columns.clamp(0, width - 1)[:, None, :]
    source = source.flatten(1)[:, None].to(pictures.device).expand(-1, pictures.shape[1], -1)
    return pictures.flatten(2).gather(2, source).view_as(pictures) * inside[:, None].to(pictures)


def _covered(pictures: Tensor, rng: torch.Generator) -> Tensor:
    """A square of half the side is 0; parts of it may lie outside."""
    count, _, height, width = pictures.shape
    inside = []
    for side in (height, width):
        length = int(side * COVER + 0.5)
        first = torch.randint(side + (1 - length % 2), (count, 1), generator=rng) - length // 2
        places = torch.arange(side)
        inside.append((places >= first) & (places < first + length))
    square = inside[0][:, :, None] & inside[1][:, None, :]
    return pictures * (~square)[:, None].to(pictures)
