"""Public people kept from embedders that are trained on the others: thresholds need strangers."""

from dataclasses import replace

import torch

from frostglass.core.types import Images

HELD_OUT = 5  # every so many public people


def held_out_people(public: Images) -> Images:
    """Return the images of the public people who are held out."""
    return public.at((public.labels % HELD_OUT == 0).nonzero().flatten())


def other_people(public: Images) -> Images:
    """Return the public people who are not held out, numbered anew."""
    kept = [number for number in range(len(public.names)) if number % HELD_OUT]
    images = public.at((public.labels % HELD_OUT > 0).nonzero().flatten())
    names = tuple(public.names[number] for number in kept)
    number = torch.full((len(public.names),), -1)
    number[kept] = torch.arange(len(kept))
    return replace(images, labels=number[images.labels], names=names)
