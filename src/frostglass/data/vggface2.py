"""VGGFace2, read from the folders of its archives."""

from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field

from frostglass.core.errors import DataError
from frostglass.core.parameters import parameters
from frostglass.data._catalogue import Catalogue, catalogue
from frostglass.data._file_dataset import PeopleDataset, Side, side_of
from frostglass.data._inspect import Finding, archives, count
from frostglass.data.base import datasets, listed
from frostglass.data.facescrub import joined

TRAIN, TEST = "train", "test"
PUBLISHED = {TRAIN: (8_631, 3_141_890), TEST: (500, 169_396)}  # people and images
ARCHIVES = {
    "vggface2_train.tar.gz": "88813c6b15de58afc8fa75ea83361d7f",
    "vggface2_test.tar.gz": "bb7a323824d1004e14e00c23974facd3",
}


@datasets.register
@parameters
class Vggface2(PeopleDataset):
    """VGGFace2: the people of its training part are private, those of its test part public.

    The two parts share nobody (8,631 and 500 people). Images are loosely cropped faces of any size;
    the largest centred square is kept. Unpack the archives yourself; nothing is downloaded. Pixels
    are decoded once to a file: all images at 224 pixels take 473 GB on disk, so that you may want
    `identities` and `max_images`.

    Paper: Cao et al., VGGFace2: A Dataset for Recognising Faces across Pose and Age, FG 2018.

    Args:
        root: folder with train/ and test/, each with a folder per person (n000002).
        size: pixels a side.
        crop: "centre", or a share of the shorter side.
        identities: how many private people, the first by name; by default all 8,631.
        max_images: keep only the first images of each private person.
        public: table of another dataset, whose images are the public ones instead of test/.
    """

    title: ClassVar[str] = "VGGFace2"
    preparation: ClassVar[str] = (
        "1. get vggface2_train.tar.gz and vggface2_test.tar.gz (its page at robots.ox.ac.uk is "
        "closed; copies are public); 2. unpack them, which gives ROOT/train/n000002/0001_01.jpg "
        "and ROOT/test/; 3. set data.root, and check it with `frostglass data verify vggface2 ROOT`"
    )

    identities: Annotated[int, Field(ge=2)] | None = None
    max_images: Annotated[int, Field(ge=3)] | None = None

    def everyone(self) -> Side:
        listings = [self._part(part) for part in (TRAIN, TEST)]
        return side_of(joined(self.folder, listings), self.size, self.crop)

    def sides(self) -> tuple[Side, Side]:
        listing, public = self._part(TRAIN), self.others()
        people = len(listing.names)
        if self.identities and self.identities > people:
            raise DataError(
                f"identities must be at most {people}, the people in {listing.root}, got "
                f"{self.identities}. Lower data.identities."
            )
        private = listing.of(range(self.identities or people), self.max_images)
        if public is None:
            others = self._part(TEST)
            if both := sorted(set(others.names) & set(listing.names)):
                raise DataError(
                    f"{TRAIN} and {TEST} in {self.root} overlap: {len(both)} people are in both, "
                    f"{listed(both)}. Unpack the archives again."
                )
            public = side_of(others, self.size, self.crop)
        return side_of(private, self.size, self.crop), public

    def _part(self, part: str) -> Catalogue:
        return catalogue(self.existing(self.root, part=part))

    @classmethod
    def inspect(cls, root: Path, *, hashes: bool) -> list[Finding]:
        findings = archives(root, ARCHIVES, check=hashes)
        for part, (people, images) in PUBLISHED.items():
            if not (root / part).is_dir():
                findings.append(Finding(part, "missing", f"no such folder in {root}"))
                continue
            listing = catalogue(root / part)
            findings.append(count(part, "people", len(listing.names), people))
            findings.append(count(part, "images", len(listing.files), images))
        return findings
