"""Random augmentation of images: mirrored, moved, cropped, recoloured, covered in part."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from frostglass.core.types import Shape

Jitter = tuple[float, float, float, float]

LUMA = (0.2989, 0.587, 0.114)  # torchvision's weights of red, green and blue in grey
DRAWS = 9  # uniform numbers that `viewed` takes for each image
SMALLEST = 1e-9  # least range of a pixel with a hue; the least of 8 bits is 1 / 255
CROP_DRAWS = 5  # uniform numbers that `cropped` takes for each image
IMAGENET_MEAN = (0.485, 0.456, 0.406)


@dataclass(frozen=True)
class Changes:
    """Random changes of N images: one row of draws for each image, None where disabled.

    They are drawn apart from the images, so that images can be changed in parts, in another thread
    or by several processes, with the same draws. `reach` is the greatest shift in pixels, and
    `fill` the colour of the boxes: a number for each channel, or one for all.
    """

    mirrored: Tensor | None = None  # (N,)
    place: Tensor | None = None  # (N, 2): top and left of the shifted image
    crop: Tensor | None = None  # (N, 3): relative side, and x and y of the centre
    brightness: Tensor | None = None  # (N,), as are the next three
    contrast: Tensor | None = None
    saturation: Tensor | None = None
    hue: Tensor | None = None
    covered: Tensor | None = None  # (N, 4): top, left, height and width of a box
    reach: int = 0
    fill: tuple[float, ...] = (0.0,)

    def rows(self, part: slice) -> "Changes":
        """Return the changes of some of the images."""
        drawn: dict[str, Any] = {
            name: value[part] for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        return replace(self, **drawn)

    def apply(self, images: Tensor) -> Tensor:
        """Return changed copies of images in [0, 1], (N, C, H, W), on the CPU.

        The order is fixed: flip, shift, crop, brightness, contrast, saturation, hue, cutout.
        torchvision's ColorJitter shuffles its four.
        """
        if self.mirrored is not None:
            images = images.clone()
            images[self.mirrored] = images[self.mirrored].flip(3)
        if self.place is not None:
            images = shifted(images, self.place, self.reach)
        if self.crop is not None:
            side, *centre = self.crop.unbind(1)
            images = resized_crop(images, side, torch.stack(centre))
        if self.brightness is not None:
            images = brightened(images, self.brightness.view(-1, 1, 1, 1))
        if self.contrast is not None:
            images = contrasted(images, self.contrast.view(-1, 1, 1, 1))
        if self.saturation is not None:
            images = saturated(images, self.saturation.view(-1, 1, 1, 1))
        if self.hue is not None:
            images = hue_turned(images, self.hue.view(-1, 1, 1))
        if self.covered is not None:
            images = covered(images, self.covered, self.fill)
        return images


def draw_changes(
    count: int,
    image_shape: Shape,
    rng: torch.Generator,
    *,
    flip: bool = False,
    shift: int = 0,
    crop: float = 1.0,
    jitter: Jitter = (0.0, 0.0, 0.0, 0.0),
    cutout: float = 0.0,
) -> Changes:
    """Draw the changes of `count` images of one shape.

    Every image has its own draws; nothing is drawn for a disabled augmentation.

    Args:
        count: number of images.
        image_shape: channels, height and width.
        rng: the random generator.
        flip: mirror half of the images.
        shift: move each by up to this many pixels either way, the border repeated.
        crop: least share of the area that a random resized crop keeps, at the image's aspect
            ratio; 1 disables it.
        jitter: strengths of brightness, contrast, saturation and hue, as in ColorJitter; grey
            images have only the first two.
        cutout: side of a black square, as a share of the shorter side; it may lie partly outside
            the image; 0 disables it.
    """
    channels, height, width = image_shape
    drawn: dict[str, Any] = {}
    if flip:
        drawn["mirrored"] = torch.rand(count, generator=rng) < 0.5
    if shift:
        drawn["place"] = torch.randint(2 * shift + 1, (2, count), generator=rng).T
        drawn["reach"] = shift
    if crop < 1:
        side = _uniform(crop, 1.0, (count,), rng).sqrt()
        centre = _uniform(-1.0, 1.0, (2, count), rng) * (1 - side)
        drawn["crop"] = torch.stack([side, *centre], 1)
    strengths = zip(("brightness", "contrast", "saturation"), jitter[:3], strict=True)
    for name, strength in strengths:
        if strength and (channels == 3 or name != "saturation"):
            drawn[name] = _uniform(max(0.0, 1 - strength), 1 + strength, (count,), rng)
    if jitter[3] and channels == 3:
        drawn["hue"] = _uniform(-jitter[3], jitter[3], (count,), rng)
    if cutout:
        places = [torch.randint(size, (count,), generator=rng) for size in (height, width)]
        lengths = torch.full((count, 2), round(cutout * min(height, width)))
        drawn["covered"] = torch.cat([torch.stack(places, 1) - lengths // 2, lengths], 1)
    return Changes(**drawn)


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
    """Augment images (N, C, H, W) in [0, 1] differentiably, by `draws` (N, DRAWS) in [0, 1).

    A crop is mirrored and rotated about its centre, all in one resampling; outside the image the
    border is repeated. Brightness and contrast follow. Each image depends on its own row of
    `draws`, whose columns keep their meaning if something is disabled: area, horizontal and
    vertical position, mirror, whether to rotate, angle, whether to recolour, brightness, contrast.

    Args:
        images: the images.
        draws: uniform random numbers.
        crop: least and greatest share of the area that is kept, at any position inside and at the
            image's aspect ratio; (1, 1) disables it.
        jitter: strengths of brightness and contrast, as in ColorJitter.
        jitter_share: share of the images that are recoloured.
        flip: mirror half of the images.
        rotation: greatest angle in degrees, either way.
        rotation_share: share of the images that are rotated.
    """
    columns = draws.to(images).unbind(1)
    area, across, down, mirror, turned, angle, coloured, bright, contrast = columns
    if crop != (1, 1) or flip or rotation:
        side = _between(crop[0], crop[1], area).sqrt()
        centre = _between(-1.0, 1.0, torch.stack([across, down])) * (1 - side)
        angle = _between(-rotation, rotation, angle)
        angle = torch.where(turned < rotation_share, angle, 0.0).deg2rad()
        images = turned_crop(images, side, centre, angle, (mirror < 0.5) & flip)
    changes = ((brightened, jitter[0], bright), (contrasted, jitter[1], contrast))
    for change, strength, draw in changes:
        if strength:
            factor = _between(max(0.0, 1 - strength), 1 + strength, draw)
            factor = torch.where(coloured < jitter_share, factor, 1.0)
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
    """Crop images (N, C, H, W) at random and resize them back, differentiably.

    `draws` (N, CROP_DRAWS) in [0, 1) decide; columns: area, ratio, horizontal and vertical
    position, mirror. Values are not clamped.

    Args:
        images: the images.
        draws: uniform random numbers.
        area: least and greatest share of the area that is kept.
        ratio: least and greatest aspect ratio of a crop relative to the image's; its logarithm is
            uniform.
        mirror: share of the images that are mirrored.
    """
    share, stretch, across, down, mirrored = draws.to(images).unbind(1)
    size = _between(area[0], area[1], share).sqrt()
    # Half the logarithm, because width and height share the ratio.
    stretch = (_between(math.log(ratio[0]), math.log(ratio[1]), stretch) / 2).exp()
    wide, high = (size * stretch).clamp(max=1), (size / stretch).clamp(max=1)
    middle = _between(-1.0, 1.0, torch.stack([across, down])) * (1 - torch.stack([wide, high]))
    zero = torch.zeros_like(wide)
    left = torch.stack([torch.where(mirrored < mirror, -wide, wide), zero, middle[0]])
    return _sampled(images, torch.stack([left, torch.stack([zero, high, middle[1]])]))


def _sampled(images: Tensor, transform: Tensor) -> Tensor:
    """Resample images by affine transforms (2, 3, N), the border repeated outside."""
    grid = F.affine_grid(transform.permute(2, 0, 1), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=False)


def shifted(images: Tensor, place: Tensor, reach: int) -> Tensor:
    """Cut each image at its place (N, 2), top and left, out of a copy with `reach` more pixels.

    Those repeat the border.
    """
    height, width = images.shape[2:]
    padded = F.pad(images, (reach,) * 4, mode="replicate")
    parts = zip(padded, place.tolist(), strict=True)
    # Slices, because an index of pixels is several times slower.
    return torch.stack(
        [image[:, top : top + height, left : left + width] for image, (top, left) in parts]
    )


def resized_crop(images: Tensor, side: Tensor, centre: Tensor) -> Tensor:
    """Crop each image to a relative `side` (N,) around `centre` (2, N) and resize it back.

    The centre is x and y, with the image from -1 to 1.
    """
    zero = torch.zeros_like(side)
    return turned_crop(images, side, centre, zero, zero.bool())


def turned_crop(
    images: Tensor, side: Tensor, centre: Tensor, angle: Tensor, mirrored: Tensor
) -> Tensor:
    """Like `resized_crop`, mirrored where `mirrored` (N,), then rotated by `angle` (N,).

    The angle is anticlockwise in radians.
    """
    ratio = images.shape[3] / images.shape[2]
    across = torch.where(mirrored, -side, side)
    left = torch.stack([across * angle.cos(), -across * angle.sin() / ratio, centre[0]])
    down = torch.stack([side * angle.sin() * ratio, side * angle.cos(), centre[1]])
    return _sampled(images, torch.stack([left, down])).clamp(0, 1)  # rounding can leave [0, 1]


def grey(images: Tensor) -> Tensor:
    """Return luma, (N, 1, H, W); grey images are unchanged."""
    if images.shape[1] == 1:
        return images
    return torch.einsum("nchw,c->nhw", images, images.new_tensor(LUMA))[:, None]


def brightened(images: Tensor, factor: Tensor) -> Tensor:
    return (images * factor).clamp(0, 1)


def contrasted(images: Tensor, factor: Tensor) -> Tensor:
    """Move each image away from (above 1) or towards (below 1) its own mean grey."""
    return torch.lerp(grey(images).mean((1, 2, 3), keepdim=True), images, factor).clamp(0, 1)


def saturated(images: Tensor, factor: Tensor) -> Tensor:
    """Move each pixel away from (above 1) or towards (below 1) its own grey."""
    return torch.lerp(grey(images), images, factor).clamp(0, 1)


def hue_turned(images: Tensor, turn: Tensor) -> Tensor:
    """Rotate hues by `turn` of the colour circle; maximum and range of each pixel stay the same."""
    red, green, blue = images.unbind(1)
    top = torch.maximum(torch.maximum(red, green), blue)
    spread = top - torch.minimum(torch.minimum(red, green), blue)
    # In sixths of the circle, times the spread; a grey pixel has no hue and stays as it is.
    hue = torch.where(
        red == top,
        green - blue,
        torch.where(green == top, 2 * spread + blue - red, 4 * spread + red - green),
    )
    hue = hue / spread.clamp_min(SMALLEST) + 6 * turn
    # A channel is at its minimum while its distance from its own hue is above 2 sixths, at its
    # maximum below 1, and on a slope in between.
    place = hue[:, None] + hue.new_tensor([5.0, 3.0, 1.0])[:, None, None]
    place = place - 6 * (place / 6).floor()  # the remainder, several times faster than by `%`
    fall = torch.minimum(place, 4 - place).clamp(0, 1)
    return (top[:, None] - spread[:, None] * fall).clamp(0, 1)


def covering(share: Tensor, places: Sequence[Tensor], size: Sequence[int]) -> Tensor:
    """Return boxes (N, 4) of a share of the area each, of an image's proportions, inside it.

    `share` (N,) and the two `places` (N,), top and left, are numbers in [0, 1); `size` is the
    images' height and width. A box leaves at least one row and column.
    """
    corners, lengths = [], []
    for side, place in zip(size, places, strict=True):
        length = (share.sqrt() * side).round().long().clamp(1, max(1, side - 1))
        corners.append((place * (side - length + 1)).long())
        lengths.append(length)
    return torch.stack([*corners, *lengths], 1)


def mean_colour(channels: int) -> tuple[float, ...]:
    """Return ImageNet's mean colour, or its luma for images without colours."""
    if channels == len(IMAGENET_MEAN):
        return IMAGENET_MEAN
    return (sum(part * value for part, value in zip(LUMA, IMAGENET_MEAN, strict=True)),)


def covered(images: Tensor, boxes: Tensor, fill: tuple[float, ...]) -> Tensor:
    """Fill a box of each image with one colour; `boxes` (N, 4) are top, left, height and width.

    Boxes may lie partly outside.
    """
    top, left, high, wide = boxes[..., None].unbind(1)
    rows, columns = (torch.arange(length, device=boxes.device) for length in images.shape[2:])
    down = (rows >= top) & (rows < top + high)
    across = (columns >= left) & (columns < left + wide)
    colour = images.new_tensor(fill).view(1, -1, 1, 1)
    return torch.where((down[:, :, None] & across[:, None, :])[:, None], colour, images)


def _uniform(low: float, high: float, shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    return _between(low, high, torch.rand(shape, generator=rng))


def _between(low: float, high: float, draw: Tensor) -> Tensor:
    """Map numbers in [0, 1) to [low, high)."""
    return low + (high - low) * draw
