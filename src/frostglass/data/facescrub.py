"""FaceScrub, read from folders of faces by person."""

from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field

from frostglass.core.errors import DataError
from frostglass.core.parameters import parameters
from frostglass.data._catalogue import Catalogue, catalogue
from frostglass.data._file_dataset import PeopleDataset, Side, side_of
from frostglass.data._inspect import Finding, count
from frostglass.data.base import datasets

GROUPS = ("actors", "actresses")
FACES, WHOLE = ("face", "faces"), ("image", "images")
PEOPLE, GROUP_PEOPLE = 530, 265


@datasets.register
@parameters
class Facescrub(PeopleDataset):
    """FaceScrub's cropped faces of 530 people; public images are those of another dataset.

    FaceScrub is published as addresses of images with boxes of the faces, and some addresses no
    longer answer, so that copies differ: nothing is downloaded here. Two layouts are read:
    `actors/faces/NAME/...` with `actresses/faces/NAME/...`, and `NAME/...` (of `NAME/face` and
    `NAME/image`, only the faces). People are in the order of the layout: actors, then actresses.

    The low-resolution protocols cut the central 54 of 64 pixels (`crop = 0.84375`), those at 224
    pixels nothing but the largest square.

    Paper: Ng and Winkler, A Data-driven Approach to Cleaning Large Face Datasets, ICIP 2014.
    Differs: PPA draws a test part of 10 % over all images with one seed; here it is drawn for each
    person, so that everyone has one.

    Args:
        root: folder with actors/ and actresses/, or with one folder per person.
        size: pixels a side.
        crop: "centre", or a share of the shorter side.
        identities: how many private people, the first ones; by default all. Without `public` the
            others are public.
        public: table of another dataset, whose images are the public ones.
    """

    title: ClassVar[str] = "FaceScrub"
    preparation: ClassVar[str] = (
        "1. ask for the lists at vintage.winklerbros.net/facescrub.html and download the images "
        "they name; 2. cut each face by its box to ROOT/actors/faces/NAME/ and "
        "ROOT/actresses/faces/NAME/ (or to ROOT/NAME/); 3. set data.root, and check it with "
        "`frostglass data verify facescrub ROOT`"
    )

    identities: Annotated[int, Field(ge=2)] | None = None

    def everyone(self) -> Side:
        return side_of(people_in(self.folder, self), self.size, self.crop)

    def sides(self) -> tuple[Side, Side]:
        listing, public = people_in(self.folder, self), self.others()
        total = len(listing.names)
        private = min(total, self.identities or total)
        if self.identities and self.identities > total:
            raise DataError(
                f"identities must be at most {total}, the people in {self.root}, got "
                f"{self.identities}. Lower data.identities."
            )
        if public is None and private == total:
            raise DataError(
                f"all {total} people in {self.root} are private, and public images are needed: "
                'name another dataset, such as public = { name = "ffhq", root = "..." }, or lower '
                "data.identities to have the other people public"
            )
        ours = side_of(listing.of(range(private)), self.size, self.crop)
        if public is None:
            public = side_of(listing.of(range(private, total)), self.size, self.crop)
        return ours, public

    @classmethod
    def inspect(cls, root: Path, *, hashes: bool) -> list[Finding]:
        groups = [group for group in GROUPS if (root / group).is_dir()]
        if not groups:
            listing = _faces(catalogue(root))
            findings = [count("people", "people", len(listing.names), PEOPLE)]
        else:
            found = {group: _group(root, group) for group in groups}
            findings = [
                count(group, "people", len(found[group].names), GROUP_PEOPLE)
                if group in found
                else Finding(group, "missing", f"no such folder in {root}")
                for group in GROUPS
            ]
            listing = joined(root, list(found.values()))
        text = f"{len(listing.files):,} faces; copies differ, so that there is no number to compare"
        return [*findings, Finding("images", "unchecked", text)]


def people_in(root: Path, reader: PeopleDataset) -> Catalogue:
    """List the faces of all people, in either layout."""
    groups = [group for group in GROUPS if (root / group).is_dir()]
    if not groups:
        return _faces(catalogue(root))
    if lost := [group for group in GROUPS if group not in groups]:
        raise reader.missing(f"{root} holds {groups[0]} and no {lost[0]}")
    return joined(root, [_group(root, group) for group in groups])


def _group(root: Path, group: str) -> Catalogue:
    faces = root / group / "faces"
    return _faces(catalogue(faces if faces.is_dir() else root / group))


def joined(root: Path, listings: list[Catalogue]) -> Catalogue:
    """Put the people of several folders one after the other."""
    files: list[Path] = []
    labels: list[int] = []
    names: list[str] = []
    others: list[Path] = []
    for listing in listings:
        files += listing.files
        labels += [label + len(names) for label in listing.labels]
        names += listing.names
        others += listing.others
    return Catalogue(root, files, labels, names, others)


def _faces(listing: Catalogue) -> Catalogue:
    """Leave out whole images of people whose faces are in a folder beside them."""
    inner = [_inner(file, listing.root) for file in listing.files]
    cropped = {label for label, name in zip(listing.labels, inner, strict=True) if name in FACES}
    kept = [
        place
        for place, (label, name) in enumerate(zip(listing.labels, inner, strict=True))
        if not (label in cropped and name in WHOLE)
    ]
    files = [listing.files[place] for place in kept]
    return listing._replace(files=files, labels=[listing.labels[place] for place in kept])


def _inner(file: Path, root: Path) -> str:
    """Return the folder of a file inside its person's folder."""
    parts = file.relative_to(root).parts
    return parts[1] if len(parts) > 2 else ""
