"""Labeled Faces in the Wild, read from a folder that the user unpacked."""

from collections import Counter
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field

from frostglass.core.errors import DataError
from frostglass.core.parameters import parameters
from frostglass.core.types import Images, Shape
from frostglass.data._images import ImageFiles
from frostglass.data.base import Crop, Dataset, datasets
from frostglass.data.folder import Catalogue, catalogue

LAYOUT = (
    "expected LFW as it is distributed, one folder per person "
    "(George_W_Bush/George_W_Bush_0001.jpg)"
)


@datasets.register
@parameters
class Lfw(Dataset):
    """Labeled Faces in the Wild: the people with the most images are private, the rest public.

    Unpack lfw.tgz, lfw-funneled.tgz or lfw-deepfunneled.tgz yourself; nothing is downloaded. The
    images have 250 pixels a side, 2.2 times the detected face. With `crop = "face"` the central 128
    pixels are kept, which leaves little of the background, and resized. Most people have a single
    image: of 5,749 people, 158 have at least 10 images and 62 at least 20. Text files beside the
    folders are skipped with a warning.

    Args:
        root: the folder with one sub-folder per person.
        size: pixels a side.
        identities: private people, those with the most images (by name where equal); by default
            everyone with `min_images`.
        min_images: images that a private person must have.
        max_images: keep only the first images of each private person; one has 530.
        crop: "face", "centre" for the whole image, or "none" to squeeze it.
    """

    title: ClassVar[str] = "LFW"

    root: Path
    size: Annotated[int, Field(ge=16, le=250)] = 64
    identities: Annotated[int, Field(ge=2)] | None = None
    min_images: Annotated[int, Field(ge=3)] = 10
    max_images: Annotated[int, Field(ge=3)] | None = None
    crop: Crop = "face"

    def __post_init__(self) -> None:
        if self.max_images is not None and self.max_images < self.min_images:
            raise ValueError(
                f"max_images ({self.max_images}) must be at least min_images ({self.min_images})"
            )

    @property
    def in_memory(self) -> bool:
        return False

    @property
    def image_shape(self) -> Shape:
        return (3, self.size, self.size)

    def counts(self) -> tuple[int, int, int]:
        private, public = self._sides()
        return len(private.names), len(private.files), len(public.files)

    def public_people(self) -> list[int]:
        return list(self.people()[1].values())

    def people(self) -> tuple[dict[str, int], dict[str, int]]:
        private, public = (
            {side.names[label]: count for label, count in Counter(side.labels).items()}
            for side in self._sides()
        )
        return private, public

    def most_of_one(self) -> int:
        return max(self.people()[0].values())

    def files(self) -> list[Path]:
        private, public = self._sides()
        return [*private.files, *public.files]

    def crop_mode(self) -> Crop:
        return self.crop

    def tables(self) -> tuple[Images, Images]:
        _listing(self.root).warn_of_others()
        private, public = self._sides()
        ours, theirs = (
            side.table(ImageFiles(side.files, self.size, 3, self.crop), None, ())
            for side in (private, public)
        )
        return ours, theirs

    def _sides(self) -> tuple[Catalogue, Catalogue]:
        """List the files of private and of public people."""
        listing = _listing(self.root)
        images = Counter(listing.labels)
        ranked = sorted(images, key=lambda label: (-images[label], listing.names[label]))
        enough = [label for label in ranked if images[label] >= self.min_images]
        wanted = len(enough) if self.identities is None else self.identities
        if not 2 <= wanted <= len(enough):
            raise DataError(
                f"expected {max(2, wanted)} people with at least {self.min_images} images in "
                f"{self.root}, got {len(enough)}: lower data.identities or data.min_images"
            )
        private = sorted(enough[:wanted])
        public = sorted(set(ranked) - set(private))
        if not public:
            raise DataError(
                f"all {len(private)} people in {self.root} are private, and public ones are "
                "needed: lower data.identities, or raise data.min_images"
            )
        return listing.of(private, self.max_images), listing.of(public)


def _listing(root: Path) -> Catalogue:
    root = root.expanduser()
    if not root.is_dir():
        raise DataError(
            f"no folder at {root}: {LAYOUT}. Unpack lfw.tgz, lfw-funneled.tgz or "
            "lfw-deepfunneled.tgz, and set data.root."
        )
    listing = catalogue(root)
    if not listing.names:
        raise DataError(f"{root} holds loose images: {LAYOUT}. Correct data.root.")
    if len(listing.names) == 1:
        raise DataError(
            f"{root} holds one folder, {listing.names[0]}: {LAYOUT}. "
            f"Set data.root to {root / listing.names[0]}."
        )
    return listing
