"""Copies of images as people make them, with Pillow: mirrored, cropped, re-encoded and so on."""

import io

import numpy as np
import torch
from PIL import Image, ImageOps

BILINEAR = Image.Resampling.BILINEAR


def crop(image, rng, share):
    """A square of this share of a side, at a random place, resized back."""
    side = image.size[0]
    left, top = rng.uniform(0, side * (1 - share), 2)
    box = (left, top, left + side * share, top + side * share)
    return image.resize(image.size, BILINEAR, box=box)


def jpeg(image, quality=75):
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=quality)
    return Image.open(stream)


def brightness(image, gain):
    return image.point(lambda value: min(255, round(value * gain)))


def rotated(image, rng, degrees):
    return image.rotate(degrees * rng.choice([-1, 1]), BILINEAR)


def shifted(image, rng, pixels):
    right, down = pixels * rng.choice([-1, 1]), pixels * rng.choice([0, 1])
    return image.transform(image.size, Image.Transform.AFFINE, (1, 0, right, 0, 1, down))


def through(image, size):
    """The image resized to another size and back."""
    return image.resize((size, size), Image.Resampling.BICUBIC).resize(image.size, BILINEAR)


KINDS = {
    "mirrored": lambda image, rng: ImageOps.mirror(image),
    "cropped by 5 %": lambda image, rng: crop(image, rng, 0.95),
    "cropped by 10 %": lambda image, rng: crop(image, rng, 0.9),
    "cropped by 20 %": lambda image, rng: crop(image, rng, 0.8),
    "grey": lambda image, rng: image.convert("L"),
    "brightness x 1.3": lambda image, rng: brightness(image, 1.3),
    "brightness x 0.75": lambda image, rng: brightness(image, 0.75),
    "JPEG of quality 75": lambda image, rng: jpeg(image),
    "resized to half and back": lambda image, rng: through(image, image.size[0] // 2),
    "resized to 4 x, JPEG, and back": lambda image, rng: jpeg(
        image.resize((image.size[0] * 4,) * 2, Image.Resampling.BICUBIC)
    ).resize(image.size, BILINEAR),
    "rotated by 3 degrees": lambda image, rng: rotated(image, rng, 3),
    "shifted by 2 pixels": lambda image, rng: shifted(image, rng, 2),
    "mirrored and cropped by 5 %": lambda image, rng: ImageOps.mirror(crop(image, rng, 0.95)),
    "mirrored, cropped by 5 %, brighter, grey, JPEG": lambda image, rng: jpeg(
        brightness(ImageOps.mirror(crop(image, rng, 0.95)), 1.3).convert("L")
    ),
}


def copies(pixels, kind, seed=0):
    """Copies of images uint8 (N, C, H, W), made in one way."""
    rng = np.random.default_rng(seed)
    mode = "L" if pixels.shape[1] == 1 else "RGB"
    made = []
    for image in pixels:
        original = Image.fromarray(image.permute(1, 2, 0).squeeze(2).numpy())
        made.append(np.array(KINDS[kind](original, rng).convert(mode)))
    return torch.from_numpy(np.stack(made)).view(len(pixels), *pixels.shape[2:], -1).movedim(3, 1)
