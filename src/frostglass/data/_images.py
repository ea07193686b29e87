"""Reading image files into tensors."""

import stat
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from frostglass.core.errors import DataError
from frostglass.core.pixels import PixelSource
from frostglass.data._gather import UnreadableImages, gathered
from frostglass.data.base import Crop

SUFFIXES = frozenset(
    {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}
)
# Pillow goes by content: without this list it would pass a disguised file to any decoder, even
# to Ghostscript.
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
MAX_PIXELS = 64_000_000
MIN_SIDE = 8
# LFW's images are 2.2 times as wide as the detected face; this leaves some hair and chin around it.
FACE_SHARE = 128 / 250
# Raised by Pillow's decoders for damaged files; each becomes an error that names the file.
BOMB = Image.DecompressionBombError
UNREADABLE = (OSError, EOFError, SyntaxError, ValueError, struct.error, zlib.error, BOMB)


Box = tuple[int, int, int, int]  # left, top, right, bottom


def read_image(
    path: Path, *, size: int, channels: int, crop: Crop, box: Box | None = None
) -> Tensor:
    """Read one image file as uint8 (channels, size, size).

    EXIF orientation is applied, animations give their first frame, transparent parts become white.
    16-bit values are scaled from 0..65535 and floats from [0, 1]. Other ranges are refused, because
    guessing one per image would make images incomparable. `crop` "centre" cuts the largest centred
    square, "face" the middle of that, a number a centred square of that share of the shorter side,
    "none" squeezes the whole image into a square. With `box` only that part of it is read.
    """
    return decoded(path, path, size=size, channels=channels, crop=crop, box=box)


def decoded(
    source: Path | BytesIO,
    path: Path | str,
    *,
    size: int,
    channels: int,
    crop: Crop,
    box: Box | None = None,
) -> Tensor:
    """Read one image as `read_image` does, from a file or from bytes that `path` names."""
    try:
        image = _upright_and_opaque(source).convert("L" if channels == 1 else "RGB")
    except UnidentifiedImageError as error:
        raise DataError(
            f"{path} (not a {', '.join(FORMATS)} image, whatever its name says)"
        ) from error
    except UNREADABLE as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise DataError(f"{path} ({reason})") from error
    image = image.crop(_within(box, image.size)) if box else image
    share = FACE_SHARE if crop == "face" else crop if isinstance(crop, int | float) else 1
    side = max(1, round(min(image.size) * share))
    left, top = (image.width - side) // 2, (image.height - side) // 2
    square = None if crop == "none" else (left, top, left + side, top + side)
    if isinstance(
        crop, int | float
    ):  # as published code does: a box blurs with pixels just outside of it
        image, square = image.crop(square), None
    pixels = np.array(image.resize((size, size), Image.Resampling.BILINEAR, box=square))
    return torch.from_numpy(pixels).view(size, size, channels).permute(2, 0, 1).contiguous()


def _within(box: Box, size: tuple[int, int]) -> Box:
    """Cut a box to the image; annotations may reach over its border."""
    (left, top, right, bottom), (width, height) = box, size
    left, top = min(max(0, left), width - 1), min(max(0, top), height - 1)
    return left, top, max(left + 1, min(right, width)), max(top + 1, min(bottom, height))


def _upright_and_opaque(source: Path | BytesIO) -> Image.Image:
    if isinstance(source, Path):
        if not stat.S_ISREG(source.stat().st_mode):
            raise ValueError("a pipe, device or folder, not a file")
        if source.stat().st_size == 0:
            raise ValueError("empty, 0 bytes")
    with Image.open(source, formats=FORMATS) as file:
        width, height = file.size  # from the header: nothing is decoded yet
        if width * height > MAX_PIXELS:
            raise ValueError(f"{width} x {height}, more than {MAX_PIXELS // 1_000_000} megapixels")
        if min(width, height) < MIN_SIDE:
            raise ValueError(f"{width} x {height}, less than {MIN_SIDE} pixels a side")
        image = _eight_bit(ImageOps.exif_transpose(file))
    if not image.has_transparency_data:
        return image
    image = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")


def _eight_bit(image: Image.Image) -> Image.Image:
    """Scale wide grey modes to bytes; Pillow would clip them and turn a 16-bit image white."""
    if not image.mode.startswith(("I", "F")):
        return image
    values = np.asarray(image).astype(np.float32)
    top, kind = (1, "float") if image.mode == "F" else (65535, "integer")
    if not (values.min() >= 0 and values.max() <= top):  # also refuses NaN
        raise ValueError(
            f"{kind} values from {values.min():g} to {values.max():g}, expected 0 to {top}"
        )
    return Image.fromarray(np.round(values * (255 / top)).astype(np.uint8))


@dataclass(frozen=True, eq=False)
class ImageFiles(PixelSource):
    """Image files as pixels; a file is decoded when its row is read."""

    paths: Sequence[Path]
    size: int
    channels: int
    crop: Crop
    boxes: Sequence[Box] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.paths), self.channels, self.size, self.size)

    def read(self, rows: Tensor) -> Tensor:
        pixels = torch.empty(len(rows), *self.shape[1:], dtype=torch.uint8)
        bad = []
        for place, row in enumerate(rows.tolist()):
            try:
                box = self.boxes[row] if self.boxes else None
                how: Any = {"size": self.size, "channels": self.channels, "crop": self.crop}
                pixels[place] = read_image(self.paths[row], box=box, **how)
            except DataError as error:
                bad.append(str(error))
        if bad:
            raise UnreadableImages(bad, len(rows))
        return pixels


def read_images(paths: Sequence[Path], *, size: int, channels: int, crop: Crop) -> Tensor:
    """Read image files as uint8 (N, channels, size, size); one error lists all unusable files."""
    return gathered([ImageFiles(paths, size, channels, crop)]).tensor


def resized(pixels: Tensor, size: int) -> Tensor:
    """Resize images uint8 (N, C, H, W) to `size` x `size`, uint8."""
    if pixels.shape[-2:] == (size, size):
        return pixels
    parts = []
    for part in pixels.split(1024):  # floats of the whole set would take four times its memory
        part = F.interpolate(
            part.float(), size=(size, size), mode="bilinear", antialias=True, align_corners=False
        )
        parts.append(part.round().clamp(0, 255).byte())
    return torch.cat(parts)
