"""Random changes of training images: mirrored, moved, cropped, recoloured, covered in part."""

import torch
import torch.nn.functional as F
from torch import Tensor

Jitter = tuple[float, float, float, float]

LUMA = (0.2989, 0.587, 0.114)  # torchvision's weights of red, green and blue in grey


def augment(
    images: Tensor,
    dice: torch.Generator,
    *,
    flip: bool = False,
    shift: int = 0,
    crop: float = 1.0,
    jitter: Jitter = (0.0, 0.0, 0.0, 0.0),
    cutout: float = 0.0,
) -> Tensor:
    """Change each of some images in [0, 1], (N, C, H, W), on the CPU; every image has draws of its own, nothing is drawn for what is off.

    The order is fixed: flip, shift, crop, brightness, contrast, saturation, hue, cutout. torchvision's ColorJitter shuffles its four.

    Args:
        flip: mirror half of the images.
        shift: move each by up to this many pixels either way, the border repeated.
        crop: least share of the area that a random resized crop keeps; the crop has the ratio of the image; 1 is off.
        jitter: strengths of brightness, contrast, saturation and hue, as in ColorJitter; grey images have only the first two.
        cutout: side of a square that is blackened, as a share of the shorter side; parts of it may lie outside the image; 0 is off.
    """
    count = len(images)
    if flip:
        mirrored = torch.rand(count, 1, 1, 1, generator=dice) < 0.5
        images = torch.where(mirrored, images.flip(3), images)
    if shift:
        top, left = torch.randint(2 * shift + 1, (2, count), generator=dice)
        images = shifted(images, top, left, shift)
    if crop < 1:
        side = _uniform(crop, 1.0, (count,), dice).sqrt()
        images = resized_crop(images, side, _uniform(-1.0, 1.0, (2, count), dice) * (1 - side))
    colour = images.shape[1] == 3
    for change, strength in zip((brightened, contrasted, saturated), jitter[:3], strict=True):  # hue, the fourth, is no factor
        if strength and (colour or change is not saturated):
            images = change(images, _uniform(max(0.0, 1 - strength), 1 + strength, (count, 1, 1, 1), dice))
    if jitter[3] and colour:
        images = hue_turned(images, _uniform(-jitter[3], jitter[3], (count, 1, 1), dice))
    if cutout:
        height, width = images.shape[2:]
        rows, columns = (torch.randint(length, (count,), generator=dice) for length in (height, width))
        images = covered(images, rows, columns, round(cutout * min(height, width)))
    return images


def shifted(images: Tensor, top: Tensor, left: Tensor, reach: int) -> Tensor:
    """The window of each image that begins at (top, left) of the image with its border repeated `reach` times."""
    height, width = images.shape[2:]
    padded = F.pad(images, (reach,) * 4, mode="replicate")
    rows = (top[:, None] + torch.arange(height))[:, None, :, None]
    columns = (left[:, None] + torch.arange(width))[:, None, None, :]
    return padded[torch.arange(len(images))[:, None, None, None], torch.arange(images.shape[1])[None, :, None, None], rows, columns]


def resized_crop(images: Tensor, side: Tensor, centre: Tensor) -> Tensor:
    """The part of each image of relative `side` (N,) around `centre` (2, N), x and y with the image from -1 to 1, at the full size."""
    zero = torch.zeros_like(side)
    windows = torch.stack([torch.stack([side, zero, centre[0]]), torch.stack([zero, side, centre[1]])]).permute(2, 0, 1)
    grid = F.affine_grid(windows, list(images.shape), align_corners=False)
    # Rounding can leave [0, 1] by a hair.
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=False).clamp(0, 1)


def grey(images: Tensor) -> Tensor:
    """Luma, (N, 1, H, W); grey images as they are."""
    return images if images.shape[1] == 1 else torch.einsum("nchw,c->nhw", images, images.new_tensor(LUMA))[:, None]


def brightened(images: Tensor, factor: Tensor) -> Tensor:
    return (images * factor).clamp(0, 1)


def contrasted(images: Tensor, factor: Tensor) -> Tensor:
    """Each image moved away from (above 1) or towards (below 1) its own mean grey."""
    return torch.lerp(grey(images).mean((1, 2, 3), keepdim=True), images, factor).clamp(0, 1)


def saturated(images: Tensor, factor: Tensor) -> Tensor:
    """Each pixel moved away from (above 1) or towards (below 1) its own grey."""
    return torch.lerp(grey(images), images, factor).clamp(0, 1)


def hue_turned(images: Tensor, turn: Tensor) -> Tensor:
    """Hues turned by `turn` of the colour circle; brightest channel and spread of each pixel stay as they are."""
    red, green, blue = images.unbind(1)
    top, most = images.max(1)
    spread = top - images.amin(1)
    safe = torch.where(spread > 0, spread, 1.0)  # a grey pixel has no hue, and turns into itself whatever it is given
    sixths = torch.stack([(green - blue) / safe, 2 + (blue - red) / safe, 4 + (red - green) / safe], 1)
    hue = sixths.gather(1, most[:, None]) + 6 * turn[:, None]
    # A channel is at its least while its distance from its own hue is above 2 sixths, at its most below 1, and on a slope in between.
    place = (hue + hue.new_tensor([5.0, 3.0, 1.0])[:, None, None]) % 6
    return (top[:, None] - spread[:, None] * torch.minimum(place, 4 - place).clamp(0, 1)).clamp(0, 1)


def covered(images: Tensor, row: Tensor, column: Tensor, side: int) -> Tensor:
    """Black squares of `side` pixels around the pixels (row, column), (N,) each."""
    height, width = images.shape[2:]
    rows, columns = (torch.arange(length) - centre[:, None] + side // 2 for length, centre in ((height, row), (width, column)))
    inside = ((rows >= 0) & (rows < side))[:, :, None] & ((columns >= 0) & (columns < side))[:, None, :]
    return images.masked_fill(inside[:, None], 0.0)


def _uniform(low: float, high: float, shape: tuple[int, ...], dice: torch.Generator) -> Tensor:
    return low + (high - low) * torch.rand(shape, generator=dice)
