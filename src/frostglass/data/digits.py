"""The handwritten digits that come with scikit-learn: 1797 grey pictures of 8 x 8, no download."""

from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field

from frostglass.core.parameters import parameters
from frostglass.core.types import Images, Shape
from frostglass.data import base
from frostglass.data._images import resized


@base.datasets.register
@parameters
class Digits:
    """Digits as identities ("digit 3"), one channel, upscaled from 8 x 8 to `size`; about 180 pictures each, none twice.

    Args:
        private_classes, public_classes: the digits on each side; none may be on both.
    """

    size: Annotated[int, Field(ge=16, le=128)] = 32
    private_classes: base.DigitClasses = (0, 1, 2, 3, 4)
    public_classes: base.DigitClasses = (5, 6, 7, 8, 9)

    def __post_init__(self) -> None:
        base.check_digits(self.private_classes, self.public_classes)

    @property
    def image_shape(self) -> Shape:
        return (1, self.size, self.size)

    def counts(self) -> tuple[int, int, int]:
        return (
            len(self.private_classes),
            180 * len(self.private_classes),
            180 * len(self.public_classes),
        )

    def public_people(self) -> list[int]:
        return [180] * len(self.public_classes)

    def files(self) -> list[Path]:
        return []

    def tables(self) -> tuple[Images, Images]:
        from sklearn.datasets import load_digits  # takes a second to import

        bundle = load_digits()
        levels = torch.from_numpy(bundle.images)  # whole numbers 0..16
        pixels = resized((levels * 255 / 16).round().byte().unsqueeze(1), self.size)
        labels = torch.from_numpy(bundle.target)
        private, public = (
            base.digit_table(pixels, labels, digits, "digits")
            for digits in (self.private_classes, self.public_classes)
        )
        return private, public
