"""What datasets of image files share: they list files, and decode one where its row is read."""

from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from frostglass.core.errors import ConfigError, DataError
from frostglass.core.parameters import parameters
from frostglass.core.types import Images, Shape
from frostglass.data._catalogue import Catalogue
from frostglass.data._images import Box, ImageFiles
from frostglass.data._inspect import Published
from frostglass.data.base import Crop, Dataset, datasets

ImageSize = Annotated[int, Field(ge=16, le=1024)]


@dataclass(frozen=True)
class Side:
    """The private or the public images of a dataset, and every file that is read for them."""

    images: Images
    files: list[Path]
    listings: tuple[Catalogue, ...] = ()  # whose skipped files a warning names
    test: Tensor | None = field(default=None)  # images that are published for testing


def side_of(
    listing: Catalogue, size: int, crop: Crop, *, boxes: Sequence[Box] | None = None
) -> Side:
    """Return the colour images of a listing as a side; `boxes` has a part of each to read."""
    pixels = ImageFiles(listing.files, size, 3, crop, boxes)
    return Side(listing.table(pixels, None, ()), list(listing.files), (listing,))


class FileDataset(Dataset, Published):
    """Base of datasets in a published layout on disk, of which nothing is downloaded.

    A reader defines `sides`, `everyone` and `inspect`.
    """

    @abstractmethod
    def sides(self) -> tuple[Side, Side]:
        """List the private and the public images; raise DataError if files are missing."""

    @abstractmethod
    def everyone(self) -> Side:
        """List all images, to be the public ones of another dataset."""

    @property
    def in_memory(self) -> bool:
        return False

    def counts(self) -> tuple[int, int, int]:
        private, public = self.sides()
        return len(private.images.names), len(private.images), len(public.images)

    def public_people(self) -> list[int]:
        return list(self.people()[1].values())

    def people(self) -> tuple[dict[str, int], dict[str, int]]:
        private, public = (people_of(side.images) for side in self.sides())
        return private, public

    def most_of_one(self) -> int:
        return max(self.people()[0].values())

    def files(self) -> list[Path]:
        private, public = self.sides()
        return [*private.files, *public.files]

    def attribute_names(self) -> tuple[str, ...]:
        return self.sides()[0].images.attribute_names

    def constant_attributes(self) -> tuple[str, ...]:
        images = self.sides()[0].images
        if images.attributes is None:
            return ()
        columns = zip(images.attribute_names, images.attributes.T, strict=True)
        return tuple(name for name, column in columns if column.all() or not column.any())

    def describes_public(self) -> bool:
        return self.sides()[1].images.attributes is not None

    def published_test(self) -> Tensor | None:
        return self.sides()[0].test

    def tables(self) -> tuple[Images, Images]:
        private, public = self.sides()
        for listing in (*private.listings, *public.listings):
            listing.warn_of_others()
        return private.images, public.images

    @classmethod
    def missing(cls, what: str) -> DataError:
        """Return the error about missing files, with the steps of the preparation."""
        return DataError(f"{what}. {cls.title}: {cls.preparation}")


def people_of(images: Images) -> dict[str, int]:
    """Count the images of each named person."""
    counts = Counter(images.labels.tolist())
    return {name: counts[label] for label, name in enumerate(images.names)}


@parameters
class PeopleDataset(FileDataset):
    """Images in a folder `root`, with public ones of its own or those of another dataset."""

    root: Path
    size: ImageSize = 64
    crop: Crop = "centre"
    public: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.public is not None:
            public_dataset(self.public, self.size)  # refuses what cannot be built

    @property
    def image_shape(self) -> Shape:
        return (3, self.size, self.size)

    def crop_mode(self) -> Crop:
        return self.crop

    @property
    def folder(self) -> Path:
        """The root, which must be there."""
        return self.existing(self.root)

    @classmethod
    def existing(cls, root: Path, *, part: str = "") -> Path:
        """Return a folder, or one in it; raise with the preparation if there is none."""
        path = root.expanduser() / part
        if not path.is_dir():
            raise cls.missing(f"no folder at {path}")
        return path

    def others(self) -> Side | None:
        """List the images of the dataset that `public` names, if it names one."""
        return public_dataset(self.public, self.size).everyone() if self.public else None


def public_dataset(table: Mapping[str, Any], size: int) -> FileDataset:
    """Build the dataset whose images are the public ones of another, at that one's size."""
    known = [name for name in datasets.names() if issubclass(datasets.get(name), FileDataset)]
    if table.get("name") not in known:
        raise ConfigError(
            f"public: expected a table with a name, one of {', '.join(known)}; got {dict(table)!r}"
        )
    if table.get("size", size) != size:
        raise ConfigError(
            f"public.size must be that of the private images, {size}, got {table['size']}: leave "
            "it out"
        )
    try:
        dataset: FileDataset = datasets.build({"size": size, **table})
    except ConfigError as error:
        raise ConfigError([f"public: {line}" for line in error.problems]) from None
    return dataset


def without_names(side: Side) -> Side:
    """Return a side whose images belong to nobody, as those of animals do."""
    images = replace(side.images, labels=torch.full((len(side.images),), -1), names=())
    return replace(side, images=images)


class PublicOnly(FileDataset):
    """Base of datasets without identities: they are the public images of another dataset."""

    def sides(self) -> tuple[Side, Side]:
        raise DataError(
            f"{self.name} has no identities, so that none can be private: name it as data.public "
            f'of another dataset, such as public = {{ name = "{self.name}", root = "..." }}'
        )
