"""The contract of datasets: plain parameters, and a private and a public table of images."""

from abc import abstractmethod
from collections.abc import Iterable
from typing import Annotated

from pydantic import AfterValidator
from torch import Tensor

from frostglass.core.method import Method
from frostglass.core.registry import Registry
from frostglass.core.types import Images, Shape

CROPS = ("centre", "face", "none")


def _crop(value: float | str) -> float | str:
    if value in CROPS or (isinstance(value, int | float) and 0 < value <= 1):
        return value
    raise ValueError(
        f'expected "centre", "face", "none" or a share of the shorter side such as 0.6, got '
        f"{value!r}"
    )


# A named crop, or the side of a centred square as a share of the image's shorter side.
Crop = Annotated[float | str, AfterValidator(_crop)]


class Dataset(Method):
    """Base of registered datasets.

    `tables` returns (private, public), both of `image_shape` images, in the same order at every
    call. Labels count from 0 in each table and `names` are the identities'. A public table without
    identities has no names, and all its labels are -1. Both tables hold all their images:
    `make_split` divides the private one and checks that the two share no person and no image. It
    reads pixels once and in chunks, so those of a table may be a `PixelSource` that decodes files.
    """

    @property
    def in_memory(self) -> bool:
        """Whether the pixels of the tables are in memory, and not read from files in chunks."""
        return True

    @property
    @abstractmethod
    def image_shape(self) -> Shape:
        """Channels, height and width of every image."""

    @abstractmethod
    def tables(self) -> tuple[Images, Images]:
        """Read the private and the public images."""

    def secret_table(self) -> Images | None:
        """Read the images of people whom only the model's owner has, if there are any."""
        return None

    def secret_people(self) -> list[int]:
        """Estimate the number of images of each of these people, without reading any."""
        return []

    @abstractmethod
    def counts(self) -> tuple[int, int, int]:
        """Estimate private identities, private images and public images, without reading any."""

    @abstractmethod
    def public_people(self) -> list[int]:
        """Estimate the number of images of each named public person, without reading any."""

    def people(self) -> tuple[dict[str, int], dict[str, int]]:
        """Count the images of each private and public person, if known without reading any."""
        return {}, {}

    def most_of_one(self) -> int:
        """Return how many images the private person with the most images has."""
        identities, images, _ = self.counts()
        return images // identities

    def crop_mode(self) -> Crop:
        """Return how images of other shapes are made square; a shipped client does the same."""
        return "centre"

    def embedder(self) -> str:
        """Return the source of an embedder that suits the images, for verification."""
        return "public"

    def published_test(self) -> Tensor | None:
        """Return which private images (N,) bool are for testing as published, if that is known."""
        return None

    def attribute_names(self) -> tuple[str, ...]:
        """Return the binary attributes that come with the images."""
        return ()

    def constant_attributes(self) -> tuple[str, ...]:
        """Return the attributes known to be the same for all private images."""
        return ()

    def describes_public(self) -> bool:
        """Return whether attributes, if there are any, come with public images too."""
        return True


datasets = Registry("dataset", "frostglass.data", contract=Dataset)


def listed(items: Iterable[object], most: int = 5) -> str:
    """Join the first few items of a list that may be long, and say how many more there are."""
    items = list(items)
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(map(str, items[:most])) + more
