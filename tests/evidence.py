"""Evidence of a small attack on features, for tests of metrics."""

import torch
from torch import nn

from frostglass.core.types import Reconstructions
from frostglass.metrics.base import Evidence
from worlds import rng, split, target

PEOPLE, IMAGES, TRIES = 3, 2, 2


def bytes_of(*shape, seed=0):
    """Random 8-bit images in [0, 1]."""
    return torch.randint(0, 256, shape, generator=rng(seed), dtype=torch.uint8).float() / 255


def evidence(images=None, victims=None, *, evaluators=None, model=None, **more):
    """Three people, two images of each, two tries for each image."""
    images = bytes_of(PEOPLE, IMAGES * TRIES, 3, 16, 16, seed=1) if images is None else images
    evaluators = [target(seed=1)] if evaluators is None else evaluators
    return Evidence(
        reconstructions(images), model or target(), evaluators, split(), victims, **more
    )


def reconstructions(images, **more):
    rows = images.shape[:2]
    values = {"latents": torch.zeros(*rows, 1), "confidence": torch.zeros(rows)} | more
    return Reconstructions(images, torch.arange(rows[0]), queries=0, seconds=0, **values)


def victims(channels=3):
    return bytes_of(PEOPLE, IMAGES, channels, 16, 16, seed=2)


def smooth(count=4, channels=3, side=32, seed=3):
    """Images with structure, as 8-bit values."""
    rough = torch.rand(count, channels, 5, 5, generator=rng(seed))
    return (
        nn.functional.interpolate(rough, (side, side), mode="bicubic")
        .clamp(0, 1)
        .mul(255)
        .round()
        .div(255)
    )
