"""What datasets of handwritten digits share: each digit is an identity."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from frostglass.core.errors import ConfigError
from frostglass.core.parameters import parameters
from frostglass.core.types import Images, Shape
from frostglass.data._images import resized
from frostglass.data.base import Dataset, listed

Digit = Annotated[int, Field(ge=0, le=9)]
DigitClasses = Annotated[tuple[Digit, ...], Field(min_length=1)]


@parameters
class DigitDataset(Dataset):
    """Grey digits as identities ("digit 3"), resized to `size`; no digit is on both sides."""

    size: Annotated[int, Field(ge=16, le=128)] = 32
    private_classes: DigitClasses = (0, 1, 2, 3, 4)
    public_classes: DigitClasses = (5, 6, 7, 8, 9)

    def __post_init__(self) -> None:
        if both := sorted(set(self.private_classes) & set(self.public_classes)):
            raise ConfigError(
                f"{listed(both)} in both private_classes and public_classes: an identity is either "
                "private or public"
            )
        sides = {"private_classes": self.private_classes, "public_classes": self.public_classes}
        for side, classes in sides.items():
            if twice := sorted({digit for digit in classes if classes.count(digit) > 1}):
                raise ConfigError(f"{listed(twice)} given twice in {side}: name each class once")

    @abstractmethod
    def images_each(self) -> int:
        """Estimate the number of images of each digit."""

    @property
    def image_shape(self) -> Shape:
        return (1, self.size, self.size)

    def counts(self) -> tuple[int, int, int]:
        private, public = len(self.private_classes), len(self.public_classes)
        return private, self.images_each() * private, self.images_each() * public

    def public_people(self) -> list[int]:
        return [self.images_each()] * len(self.public_classes)

    def _tables(
        self, pixels: Tensor, labels: Tensor, source: str, most: int | None = None
    ) -> tuple[Images, Images]:
        """Divide images (N, H, W) by digit; of each digit at most the first `most` are kept."""

        def table(digits: Sequence[int]) -> Images:
            index = [(labels == digit).nonzero().flatten()[:most] for digit in digits]
            rows = torch.cat(index)
            counts = torch.tensor([len(one) for one in index])
            return Images(
                pixels=resized(pixels[rows].unsqueeze(1), self.size),
                labels=torch.arange(len(digits)).repeat_interleave(counts),
                names=tuple(f"digit {digit}" for digit in digits),
                sources=tuple(f"{source} {row}" for row in rows.tolist()),
            )

        return table(self.private_classes), table(self.public_classes)
