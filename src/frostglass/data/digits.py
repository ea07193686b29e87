"""The handwritten digits of scikit-learn: 1797 grey images of 8 x 8, no download."""

from typing import ClassVar

import torch

from frostglass.core.parameters import parameters
from frostglass.core.types import Images
from frostglass.data._digits import DigitDataset
from frostglass.data.base import datasets


@datasets.register
@parameters
class Digits(DigitDataset):
    """scikit-learn's digits as identities ("digit 3"), one channel, upscaled from 8 x 8 to `size`.

    There are about 180 images of each digit, and none twice.

    Args:
        size: pixels a side.
        private_classes: private digits.
        public_classes: public digits; none may also be private.
    """

    title: ClassVar[str] = "scikit-learn digits"

    def images_each(self) -> int:
        return 180

    def tables(self) -> tuple[Images, Images]:
        from sklearn.datasets import load_digits  # slow to import

        bundle = load_digits()
        levels = torch.from_numpy(bundle.images)  # integers 0..16
        pixels = (levels * 255 / 16).round().byte()
        return self._tables(pixels, torch.from_numpy(bundle.target), "digits")
