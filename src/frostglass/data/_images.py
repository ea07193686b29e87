"""Picture files to tensors, and what tells two pictures apart."""

import hashlib
import os
import struct
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from frostglass.core.errors import DataError
from frostglass.data.base import listed

Crop = Literal["centre", "none"]

SUFFIXES = frozenset(
    {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}
)
# Named, because Pillow goes by content and would hand a disguised file to any of its decoders, Ghostscript's included.
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
MOST_PIXELS = 64_000_000
LEAST_SIDE = 8
# What Pillow's decoders raise on damaged files; each is turned into an error that names the file.
UNREADABLE = (
    OSError,
    EOFError,
    SyntaxError,
    ValueError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)


def read_image(path: Path, *, size: int, channels: int, crop: Crop) -> Tensor:
    """One picture file as uint8 (channels, size, size).

    Turned upright by its EXIF orientation; the first frame of an animation; transparent parts shown on white. 16-bit values are scaled
    from 0..65535 and floats from [0, 1]; other ranges are refused, because guessing one per picture would make pictures incomparable.
    `crop` "centre" cuts the largest centred square, "none" squeezes the whole picture into a square.
    """
    try:
        picture = _upright_and_opaque(path).convert("L" if channels == 1 else "RGB")
    except UnidentifiedImageError as error:
        raise DataError(
            f"{path} (not a {', '.join(FORMATS)} picture, whatever its name says)"
        ) from error
    except UNREADABLE as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise DataError(f"{path} ({reason})") from error
    side = min(picture.size)
    left, top = (picture.width - side) // 2, (picture.height - side) // 2
    box = (left, top, left + side, top + side) if crop == "centre" else None
    pixels = np.array(picture.resize((size, size), Image.Resampling.BILINEAR, box=box))
    return torch.from_numpy(pixels).view(size, size, channels).permute(2, 0, 1).contiguous()


def _upright_and_opaque(path: Path) -> Image.Image:
    if path.stat().st_size == 0:
        raise ValueError("empty, 0 bytes")
    with Image.open(path, formats=FORMATS) as file:
        width, height = file.size  # from the header: nothing is decoded yet
        if width * height > MOST_PIXELS:
            raise ValueError(f"{width} x {height}, more than {MOST_PIXELS // 1_000_000} megapixels")
        if min(width, height) < LEAST_SIDE:
            raise ValueError(f"{width} x {height}, less than {LEAST_SIDE} pixels a side")
        picture = _eight_bit(ImageOps.exif_transpose(file))
    if not picture.has_transparency_data:
        return picture
    picture = picture.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture).convert("RGB")


def _eight_bit(picture: Image.Image) -> Image.Image:
    """Wide grey modes scaled to bytes; Pillow's own conversion clips them, which turns a 16-bit picture white."""
    if not picture.mode.startswith(("I", "F")):
        return picture
    values = np.asarray(picture).astype(np.float32)
    top, kind = (1, "float") if picture.mode == "F" else (65535, "integer")
    if not (values.min() >= 0 and values.max() <= top):  # also refuses NaN
        raise ValueError(
            f"{kind} values from {values.min():g} to {values.max():g}, expected 0 to {top}"
        )
    return Image.fromarray(np.round(values * (255 / top)).astype(np.uint8))


def read_images(paths: Sequence[Path], *, size: int, channels: int, crop: Crop) -> Tensor:
    """Many picture files as uint8 (N, channels, size, size); one error names the files that cannot be used."""
    pixels = torch.empty(len(paths), channels, size, size, dtype=torch.uint8)

    def read(row: int) -> str | None:
        try:
            pixels[row] = read_image(paths[row], size=size, channels=channels, crop=crop)
        except DataError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(
        min(8, os.cpu_count() or 1)
    ) as pool:  # Pillow decodes outside Python's lock
        bad = [problem for problem in pool.map(read, range(len(paths))) if problem is not None]
    if bad:
        raise DataError(
            f"{len(bad)} of {len(paths)} pictures cannot be used: {listed(bad)}; mend or remove them"
        )
    return pixels


def resized(pixels: Tensor, size: int) -> Tensor:
    """Pictures uint8 (N, C, H, W) brought to `size` x `size`, uint8."""
    if pixels.shape[-2:] == (size, size):
        return pixels
    parts = [
        F.interpolate(
            part.float(), size=(size, size), mode="bilinear", antialias=True, align_corners=False
        )
        .round()
        .clamp(0, 255)
        .byte()
        for part in pixels.split(
            1024
        )  # floats of a large set would take four times its memory and more
    ]
    return torch.cat(parts)


def content_hashes(pixels: Tensor) -> list[str]:
    """One hash a picture; equal for equal pixels and only then."""
    return [
        hashlib.blake2b(picture, digest_size=16).hexdigest()
        for picture in np.ascontiguousarray(pixels.numpy())
    ]


THUMB = 16  # pixels a side
FLAT = 2.0  # levels of 255


def fingerprints(pixels: Tensor) -> Tensor:
    """A unit vector a picture, (N, 256): its 16 x 16 grey thumbnail, less the smooth shading over it.

    The inner product of two is a correlation, to which light alone adds nothing. It survives what re-encoding and resizing do to a
    picture, and changes of brightness and contrast, but not cropping or mirroring. A picture that is hardly more than shading gets zeros
    and matches nothing.
    """
    shading = _shading()
    vectors = []
    for part in pixels.split(4096):
        thumbs = F.adaptive_avg_pool2d(part.float().mean(1, keepdim=True), THUMB).flatten(1)
        thumbs = thumbs - thumbs @ shading @ shading.T
        lengths = thumbs.norm(dim=1, keepdim=True)
        vectors.append(thumbs / lengths.clamp(min=1) * (lengths > FLAT * THUMB))
    return torch.cat(vectors)


def _shading() -> Tensor:
    """An orthonormal basis of the quadratic surfaces over a thumbnail, (256, 6)."""
    y, x = torch.meshgrid(*[torch.linspace(-1, 1, THUMB)] * 2, indexing="ij")
    return torch.linalg.qr(
        torch.stack([torch.ones_like(x), x, y, x * y, x * x, y * y]).flatten(1).T
    ).Q
