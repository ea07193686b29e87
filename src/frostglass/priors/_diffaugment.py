"""Differentiable augmentation of what a critic sees, so that it cannot memorise few images.

Paper: Zhao et al., Differentiable Augmentation for Data-Efficient GAN Training, NeurIPS 2020, arXiv
2006.10738.
"""

from typing import Literal

import torch
from torch import Tensor

Change = Literal["colour", "move", "cover"]
REACH = 1 / 8  # largest shift as a share of the side
COVER = 1 / 2  # side of the covered square as a share of the image's


def changed(images: Tensor, changes: tuple[Change, ...], rng: torch.Generator) -> Tensor:
    """Augment raw images (N, C, H, W) in [-1, 1], each with its own draws; gaps become 0."""
    for change in changes:
        images = {"colour": _coloured, "move": _moved, "cover": _covered}[change](images, rng)
    return images


def _coloured(images: Tensor, rng: torch.Generator) -> Tensor:
    """Shift brightness by up to ½ either way, scale saturation by 0 to 2, contrast by ½ to 1½."""
    bright, saturation, contrast = torch.rand(3, len(images), 1, 1, 1, generator=rng).to(images)
    images = images + (bright - 0.5)
    images = torch.lerp(images.mean(1, keepdim=True), images, 2 * saturation)
    return torch.lerp(images.mean((1, 2, 3), keepdim=True), images, contrast + 0.5)


def _moved(images: Tensor, rng: torch.Generator) -> Tensor:
    """Shift by whole pixels, up to an eighth of the side either way."""
    count, _, height, width = images.shape
    reach = [int(side * REACH + 0.5) for side in (height, width)]
    down, right = (torch.randint(-far, far + 1, (count, 1), generator=rng) for far in reach)
    rows = torch.arange(height) - down  # where each pixel comes from
    columns = torch.arange(width) - right
    row_inside, column_inside = (rows >= 0) & (rows < height), (columns >= 0) & (columns < width)
    inside = row_inside[:, :, None] & column_inside[:, None, :]
    source = rows.clamp(0, height - 1)[:, :, None] * width + columns.clamp(0, width - 1)[:, None, :]
    source = source.flatten(1)[:, None].to(images.device).expand(-1, images.shape[1], -1)
    return images.flatten(2).gather(2, source).view_as(images) * inside[:, None].to(images)


def _covered(images: Tensor, rng: torch.Generator) -> Tensor:
    """Set a square of half the side to 0; parts of it may lie outside."""
    count, _, height, width = images.shape
    inside = []
    for side in (height, width):
        length = int(side * COVER + 0.5)
        first = torch.randint(side + (1 - length % 2), (count, 1), generator=rng) - length // 2
        positions = torch.arange(side)
        inside.append((positions >= first) & (positions < first + length))
    square = inside[0][:, :, None] & inside[1][:, None, :]
    return images * (~square)[:, None].to(images)
