"""Random changes of training images: mirrored, moved, cropped, recoloured, covered in part."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

Jitter = tuple[float, float, float, float]

LUMA = (0.2989, 0.587, 0.114)  # torchvision's weights of red, green and blue in grey
DRAWS = 9  # uniform numbers that `viewed` takes for each picture
CROP_DRAWS = 5  # uniform numbers that `cropped` takes for each picture


def augment(
    images: Tensor,
    rng: torch.Generator,
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
        mirrored = torch.rand(count, 1, 1, 1, generator=rng) < 0.5
        images = torch.where(mirrored, images.flip(3), images)
    if shift:
        top, left = torch.randint(2 * shift + 1, (2, count), generator=rng)
        images = shifted(images, top, left, shift)
    if crop < 1:
        side = _uniform(crop, 1.0, (count,), rng).sqrt()
        images = resized_crop(images, side, _uniform(-1.0, 1.0, (2, count), rng) * (1 - side))
    colour = images.shape[1] == 3
    for change, strength in zip(
        (brightened, contrasted, saturated), jitter[:3], strict=True
    ):  # hue, the fourth, is no factor
        if strength and (colour or change is not saturated):
            images = change(
                images, _uniform(max(0.0, 1 - strength), 1 + strength, (count, 1, 1, 1), rng)
            )
    if jitter[3] and colour:
        images = hue_turned(images, _uniform(-jitter[3], jitter[3], (count, 1, 1), rng))
    if cutout:
        height, width = images.shape[2:]
        rows, columns = (
            torch.randint(length, (count,), generator=rng) for length in (height, width)
        )
        images = covered(images, rows, columns, round(cutout * min(height, width)))
    return images


def viewed(
    images: Tensor,
    draws: Tensor,
    *,
    crop: tuple[float, float] = (0.8, 1.0),
    jitter: tuple[float, float] = (0.2, 0.2),
    jitter_share: float = 1.0,
    flip: bool = True,
    rotation: float = 5.0,
    rotation_share: float = 0.5,
) -> Tensor:
    """The same pictures seen a little differently, (N, C, H, W) in [0, 1]: differentiable, and as random as `draws` (N, DRAWS) in [0, 1) are.

    A crop is mirrored and turned about its own middle and read off the picture at once; where it reaches outside, the border is repeated.
    Brightness and contrast follow. Each picture depends on its own row of `draws`, whose columns keep their meaning whatever is off:
    area, place across and down, mirror, whether to turn, angle, whether to recolour, brightness, contrast.

    Args:
        crop: least and greatest share of the area that is kept, at any place inside; the crop has the ratio of the picture; (1, 1) is off.
        jitter: strengths of brightness and contrast, as in ColorJitter.
        jitter_share: share of the pictures that are recoloured.
        flip: mirror half of the pictures.
        rotation: greatest angle in degrees, either way.
        rotation_share: share of the pictures that are turned.
    """
    area, across, down, mirror, turned, angle, coloured, bright, contrast = draws.to(images).unbind(
        1
    )
    if crop != (1, 1) or flip or rotation:
        side = _between(crop[0], crop[1], area).sqrt()
        centre = _between(-1.0, 1.0, torch.stack([across, down])) * (1 - side)
        angle = torch.where(
            turned < rotation_share, _between(-rotation, rotation, angle), 0.0
        ).deg2rad()
        images = turned_crop(images, side, centre, angle, (mirror < 0.5) & flip)
    for change, strength, draw in (
        (brightened, jitter[0], bright),
        (contrasted, jitter[1], contrast),
    ):
        if strength:
            factor = torch.where(
                coloured < jitter_share, _between(max(0.0, 1 - strength), 1 + strength, draw), 1.0
            )
            images = change(images, factor.view(-1, 1, 1, 1))
    return images


def cropped(
    images: Tensor,
    draws: Tensor,
    *,
    area: tuple[float, float],
    ratio: tuple[float, float] = (1.0, 1.0),
    mirror: float = 0.0,
) -> Tensor:
    """A random part of each picture (N, C, H, W) at the full size, differentiable and as random as `draws` (N, CROP_DRAWS) in [0, 1) are.

    Columns of `draws`: area, ratio, place across and down, mirror. Values are not cut off.

    Args:
        area: least and greatest share of the area that is kept.
        ratio: least and greatest of how much wider than the picture's own shape a part is; its logarithm is uniform.
        mirror: share of the pictures that are mirrored.
    """
    share, stretch, across, down, mirrored = draws.to(images).unbind(1)
    size = _between(area[0], area[1], share).sqrt()
    stretch = (
        _between(math.log(ratio[0]), math.log(ratio[1]), stretch) / 2
    ).exp()  # the root: width and height share it
    wide, high = (size * stretch).clamp(max=1), (size / stretch).clamp(max=1)
    middle = _between(-1.0, 1.0, torch.stack([across, down])) * (1 - torch.stack([wide, high]))
    zero = torch.zeros_like(wide)
    left = torch.stack([torch.where(mirrored < mirror, -wide, wide), zero, middle[0]])
    grid = F.affine_grid(
        torch.stack([left, torch.stack([zero, high, middle[1]])]).permute(2, 0, 1),
        list(images.shape),
        align_corners=False,
    )
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=False)


def shifted(images: Tensor, top: Tensor, left: Tensor, reach: int) -> Tensor:
    """The window of each image that begins at (top, left) of the image with its border repeated `reach` times."""
    height, width = images.shape[2:]
    padded = F.pad(images, (reach,) * 4, mode="replicate")
    rows = (top[:, None] + torch.arange(height))[:, None, :, None]
    columns = (left[:, None] + torch.arange(width))[:, None, None, :]
    return padded[
        torch.arange(len(images))[:, None, None, None],
        torch.arange(images.shape[1])[None, :, None, None],
        rows,
        columns,
    ]


def resized_crop(images: Tensor, side: Tensor, centre: Tensor) -> Tensor:
    """The part of each image of relative `side` (N,) around `centre` (2, N), x and y with the image from -1 to 1, at the full size."""
    zero = torch.zeros_like(side)
    return turned_crop(images, side, centre, zero, zero.bool())


def turned_crop(
    images: Tensor, side: Tensor, centre: Tensor, angle: Tensor, mirrored: Tensor
) -> Tensor:
    """`resized_crop`, where `mirrored` (N,) with left and right exchanged, and then turned by `angle` (N,), anticlockwise in radians."""
    ratio = images.shape[3] / images.shape[2]
    across = torch.where(mirrored, -side, side)
    left = torch.stack([across * angle.cos(), -across * angle.sin() / ratio, centre[0]])
    down = torch.stack([side * angle.sin() * ratio, side * angle.cos(), centre[1]])
    grid = F.affine_grid(
        torch.stack([left, down]).permute(2, 0, 1), list(images.shape), align_corners=False
    )
    # Rounding can leave [0, 1] by a hair.
    return F.grid_sample(
        images, grid, mode="bilinear", padding_mode="border", align_corners=False
    ).clamp(0, 1)


def grey(images: Tensor) -> Tensor:
    """Luma, (N, 1, H, W); grey images as they are."""
    return (
        images
        if images.shape[1] == 1
        else torch.einsum("nchw,c->nhw", images, images.new_tensor(LUMA))[:, None]
    )


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
    safe = torch.where(
        spread > 0, spread, 1.0
    )  # a grey pixel has no hue, and turns into itself whatever it is given
    sixths = torch.stack(
        [(green - blue) / safe, 2 + (blue - red) / safe, 4 + (red - green) / safe], 1
    )
    hue = sixths.gather(1, most[:, None]) + 6 * turn[:, None]
    # A channel is at its least while its distance from its own hue is above 2 sixths, at its most below 1, and on a slope in between.
    place = (hue + hue.new_tensor([5.0, 3.0, 1.0])[:, None, None]) % 6
    return (top[:, None] - spread[:, None] * torch.minimum(place, 4 - place).clamp(0, 1)).clamp(
        0, 1
    )


def covered(images: Tensor, row: Tensor, column: Tensor, side: int) -> Tensor:
    """Black squares of `side` pixels around the pixels (row, column), (N,) each."""
    height, width = images.shape[2:]
    rows, columns = (
        torch.arange(length) - centre[:, None] + side // 2
        for length, centre in ((height, row), (width, column))
    )
    inside = ((rows >= 0) & (rows < side))[:, :, None] & ((columns >= 0) & (columns < side))[
        :, None, :
    ]
    return images.masked_fill(inside[:, None], 0.0)


def _uniform(low: float, high: float, shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    return _between(low, high, torch.rand(shape, generator=rng))


def _between(low: float, high: float, draw: Tensor) -> Tensor:
    """Numbers in [0, 1) carried to [low, high)."""
    return low + (high - low) * draw
