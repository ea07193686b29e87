"""Small datasets of given tables, for tests of splits."""

from dataclasses import dataclass, replace

import torch

from frostglass.core.types import Images
from frostglass.data.base import Dataset


def some_images(names, counts, seed=0, attributes=False):
    """Blurred noise: all images are very different."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(len(names)).repeat_interleave(torch.tensor(counts))
    coarse = torch.rand(len(labels), 3, 8, 8, generator=generator)
    pixels = torch.nn.functional.interpolate(coarse, size=16, mode="bilinear").mul(255).byte()
    return Images(
        pixels=pixels,
        labels=labels,
        names=tuple(names),
        sources=tuple(f"{names[label]}/{row}.png" for row, label in enumerate(labels.tolist())),
        attributes=torch.rand(len(labels), 2, generator=generator) > 0.5 if attributes else None,
        attribute_names=("hat", "beard") if attributes else (),
    )


@dataclass(frozen=True)
class Fixed(Dataset):
    """A dataset of given tables."""

    private: Images
    public: Images

    @property
    def image_shape(self):
        return self.private.shape

    def counts(self):
        return len(self.private.names), len(self.private), len(self.public)

    def public_people(self):
        return torch.bincount(self.public.labels).tolist()

    def tables(self):
        return self.private, self.public


def fixed(names=("ann", "bob", "cy"), counts=(10, 20, 3), public=("dee", "eve"), attributes=False):
    return Fixed(
        some_images(names, counts, 1, attributes),
        some_images(public, (6,) * len(public), 2, attributes),
    )


def with_image(images, row, pixels):
    """`images` with the image at `row` replaced."""
    changed = images.pixels[:].clone()
    changed[row] = pixels
    return replace(images, pixels=changed)


def sources_of(split, name):
    label = split.classes.index(name)
    return [
        tuple(part.sources[row] for row in (part.labels == label).nonzero())
        for part in (split.train, split.validation, split.test)
    ]
