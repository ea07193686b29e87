"""Your own images: a folder of private people and a folder of public ones."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from torch import Tensor

from frostglass.core.errors import DataError
from frostglass.core.parameters import parameters
from frostglass.core.types import Images, Shape
from frostglass.data._attributes import Attributes
from frostglass.data._catalogue import Catalogue, catalogue
from frostglass.data._file_dataset import Side, people_of, public_dataset
from frostglass.data._images import Crop, ImageFiles
from frostglass.data.base import Dataset, datasets


@datasets.register
@parameters
class Folder(Dataset):
    """Images from two folders, `private` and `public`, with one sub-folder per identity.

    The sub-folder's name is the identity's. `public` may also be a flat folder: its images have no
    identity, the table has no names and every label is -1. An image may lie deeper inside its
    identity's folder; links to folders in there are not followed. Images are sorted by name.
    Hidden files and folders are skipped. Files without an image suffix are skipped with a warning,
    and every file with one must decode. Images of any size are cropped and resized.

    An attribute table is needed for models that classify attributes. It is CSV with a first line
    of names, `image,glasses,smiling`, and a line with 1 or 0 for each image, or CelebA's
    `list_attr_celeba.txt`. It names images by their path inside `private` or `public`, or by the
    file's name alone if no other image on either side has it. Every private image needs a line;
    public ones need theirs only if the target's training starts with them (`start`).

    Args:
        private: folder of private people.
        public: folder of public people, or of images without identity; or a table of a dataset
            whose images are the public ones, such as { name = "ffhq", root = "ffhq" }.
        size: pixels a side.
        channels: 1 for grey, 3 for colour.
        crop: "centre" cuts the largest centred square, "face" the middle of it (51 % of its side,
            where an image of LFW shows the face), a number that share of its side, "none" squeezes
            the whole image.
        attributes: file with the attribute table.
        secret: folder of people whom only the model's owner has, one sub-folder each, for the
            defense `decoys`; neither private nor public.
    """

    title: ClassVar[str] = "Image folder"

    private: Path
    public: Path | dict[str, Any]
    size: Annotated[int, Field(ge=16, le=1024)] = 64
    channels: Literal[1, 3] = 3
    crop: Crop = "centre"
    attributes: Path | None = None
    secret: Path | None = None

    @property
    def in_memory(self) -> bool:
        return False

    @property
    def image_shape(self) -> Shape:
        return (self.channels, self.size, self.size)

    def __post_init__(self) -> None:
        if isinstance(self.public, dict):
            public_dataset(self.public, self.size)  # refuses what cannot be built
            if self.channels != 3 or self.attributes is not None:
                raise ValueError(
                    "public: a table of a dataset gives colour images without attributes: remove "
                    "channels and attributes, or name a folder"
                )

    def counts(self) -> tuple[int, int, int]:
        private, public = catalogue(self.private), self._public()
        return len(private.names), len(private.files), len(public.images)

    def public_people(self) -> list[int]:
        return list(people_of(self._public().images).values())

    def people(self) -> tuple[dict[str, int], dict[str, int]]:
        private = catalogue(self.private)
        ours = {
            private.names[who]: many for who, many in Counter(private.labels).items() if who >= 0
        }
        return ours, people_of(self._public().images)

    def most_of_one(self) -> int:
        return max(Counter(catalogue(self.private).labels).values())

    def files(self) -> list[Path]:
        table = [self.attributes.expanduser()] if self.attributes else []
        secret = catalogue(self.secret).files if self.secret else []
        return [*catalogue(self.private).files, *self._public().files, *table, *secret]

    def crop_mode(self) -> Crop:
        return self.crop

    def attribute_names(self) -> tuple[str, ...]:
        return self._attributes()[0]

    def describes_public(self) -> bool:
        return self._attributes()[2] is not None

    def constant_attributes(self) -> tuple[str, ...]:
        names, private, _ = self._attributes()
        columns = () if private is None else private.T
        return tuple(
            name
            for name, column in zip(names, columns, strict=True)
            if column.all() or not column.any()
        )

    def tables(self) -> tuple[Images, Images]:
        private, public = catalogue(self.private), self._public()
        for listing in (private, *public.listings):
            listing.warn_of_others()
        if not private.names:
            raise DataError(
                f"{self.private} holds loose images: private images need one sub-folder per "
                "identity, named after it"
            )
        names, ours, theirs = self._attributes()
        described = public.images
        if theirs is not None:
            described = replace(described, attributes=theirs, attribute_names=names)
        return private.table(self._pixels(private), ours, names), described

    def _public(self) -> Side:
        if isinstance(self.public, dict):
            return public_dataset(self.public, self.size).everyone()
        listing = catalogue(self.public)
        return Side(listing.table(self._pixels(listing), None, ()), listing.files, (listing,))

    def _pixels(self, side: Catalogue) -> ImageFiles:
        return ImageFiles(side.files, self.size, self.channels, self.crop)

    def secret_people(self) -> list[int]:
        return list(Counter(self._secret().labels).values()) if self.secret else []

    def secret_table(self) -> Images | None:
        if not self.secret:
            return None
        people = self._secret()
        people.warn_of_others()
        return people.table(self._pixels(people), None, ())

    def _secret(self) -> Catalogue:
        """List the secret people, who must have names: an attacker must not find one of them."""
        people = catalogue(self.secret or Path())
        if not people.names:
            raise DataError(
                f"{self.secret} holds loose images: secret people need one sub-folder each, named "
                "after the person"
            )
        return people

    def _attributes(self) -> tuple[tuple[str, ...], Tensor | None, Tensor | None]:
        """Return the names of the attributes, and those of private and public images."""
        if self.attributes is None:
            return (), None, None
        table = Attributes(self.attributes)
        private, public = catalogue(self.private), self._public()
        return table.names, *table.of(private.sources, list(public.images.sources))
