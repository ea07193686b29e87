"""Labeled Faces in the Wild, read from a folder that the user unpacked."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field

from frostglass.core.errors import DataError
from frostglass.core.parameters import parameters
from frostglass.data._catalogue import Catalogue, catalogue
from frostglass.data._file_dataset import PeopleDataset, Side, side_of
from frostglass.data._inspect import Finding, archives, count
from frostglass.data.base import Crop, datasets

ARCHIVES = {
    "lfw.tgz": "a17d05bd522c52d84eca14327a23d494",
    "lfw-funneled.tgz": "1b42dfed7d15c9b2dd63d5e5840c86ad",
    "lfw-deepfunneled.tgz": "68331da3eb755a505a502b5aacb3c201",
}
LAYOUT = (
    "expected LFW as it is distributed, one folder per person "
    "(George_W_Bush/George_W_Bush_0001.jpg)"
)


@datasets.register
@parameters
class Lfw(PeopleDataset):
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
        crop: "face", "centre" for the whole image, a share of its side, or "none" to squeeze it.
        public: table of another dataset, whose images are the public ones instead.
    """

    title: ClassVar[str] = "LFW"
    unkeyed: ClassVar[Mapping[str, Any]] = {"public": None}
    preparation: ClassVar[str] = (
        "1. get lfw.tgz, lfw-funneled.tgz or lfw-deepfunneled.tgz; 2. unpack it, which gives "
        "ROOT/George_W_Bush/George_W_Bush_0001.jpg; 3. set data.root to the folder of the people, "
        "and check it with `frostglass data verify lfw ROOT`"
    )

    size: Annotated[int, Field(ge=16, le=250)] = 64
    identities: Annotated[int, Field(ge=2)] | None = None
    min_images: Annotated[int, Field(ge=3)] = 10
    max_images: Annotated[int, Field(ge=3)] | None = None
    crop: Crop = "face"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_images is not None and self.max_images < self.min_images:
            raise ValueError(
                f"max_images ({self.max_images}) must be at least min_images ({self.min_images})"
            )

    def everyone(self) -> Side:
        return side_of(self._listing(), self.size, self.crop)

    def sides(self) -> tuple[Side, Side]:
        whole = self._listing()
        private, public = self._people(whole)
        ours = side_of(whole.of(private, self.max_images), self.size, self.crop)
        theirs = self.others() or side_of(whole.of(public), self.size, self.crop)
        return replace(ours, listings=(whole,)), theirs

    def _people(self, listing: Catalogue) -> tuple[list[int], list[int]]:
        """Return the numbers of private and of public people."""
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
        if not public and self.public is None:
            raise DataError(
                f"all {len(private)} people in {self.root} are private, and public ones are "
                "needed: lower data.identities, or raise data.min_images"
            )
        return private, public

    def _listing(self) -> Catalogue:
        listing = catalogue(root := self.folder)
        if not listing.names:
            raise DataError(f"{root} holds loose images: {LAYOUT}. Correct data.root.")
        if len(listing.names) == 1:
            raise DataError(
                f"{root} holds one folder, {listing.names[0]}: {LAYOUT}. "
                f"Set data.root to {root / listing.names[0]}."
            )
        return listing

    @classmethod
    def inspect(cls, root: Path, *, hashes: bool) -> list[Finding]:
        listing = catalogue(root)
        return [
            *archives(root, ARCHIVES, check=hashes),
            count("people", "people", len(listing.names), 5749),
            count("images", "images", len(listing.files), 13_233),
        ]
