"""Stanford Dogs, read from its archives of images, boxes and lists."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import torch
from scipy.io import loadmat
from scipy.io.matlab import MatReadError

from frostglass.core.errors import DataError
from frostglass.core.parameters import parameters
from frostglass.core.special_files import refuse_special
from frostglass.data._catalogue import Catalogue, catalogue
from frostglass.data._file_dataset import PeopleDataset, Side, side_of
from frostglass.data._images import Box
from frostglass.data._inspect import Finding, count, present
from frostglass.data.base import datasets, listed

IMAGES, BOXES = "Images", "Annotation"
TRAIN, TEST = "train_list.mat", "test_list.mat"
BREEDS, PUBLISHED, LISTED = 120, 20_580, {TRAIN: 12_000, TEST: 8_580}
CORNERS = ("xmin", "ymin", "xmax", "ymax")
# What scipy raises for a file that is not a MATLAB file, or a damaged one.
UNREADABLE = (MatReadError, OSError, ValueError, TypeError, LookupError, NotImplementedError)


@datasets.register
@parameters
class StanfordDogs(PeopleDataset):
    """Stanford Dogs: 120 breeds as identities; public images are those of another dataset.

    Unpack images.tar, annotation.tar and lists.tar into one folder; nothing is downloaded. The
    public images are usually `public = { name = "afhq", root = "..." }`. PPA keeps whole images;
    with `boxes` the first box of the annotation is cut out.

    Paper: Khosla et al., Novel Dataset for Fine-Grained Image Categorization, CVPR 2011 workshop.
    Differs: PPA draws a test part of 10 % over all images; here it is drawn for each breed.
    `split.test = "published"` takes the 8,580 images of test_list.mat.

    Args:
        root: folder with Images/, and with Annotation/ and the lists if they are used.
        size: pixels a side.
        crop: "centre", or a share of the shorter side, of the image or of its box.
        boxes: cut the dog out by its annotation.
        public: table of another dataset, whose images are the public ones.
    """

    title: ClassVar[str] = "Stanford Dogs"
    preparation: ClassVar[str] = (
        "1. get images.tar, annotation.tar and lists.tar from "
        "vision.stanford.edu/aditya86/ImageNetDogs; 2. unpack them into ROOT, which gives "
        f"ROOT/{IMAGES}/n02085620-Chihuahua/, ROOT/{BOXES}/, ROOT/{TRAIN} and ROOT/{TEST}; 3. set "
        "data.root, and check it with `frostglass data verify stanford_dogs ROOT`"
    )

    boxes: bool = False

    def everyone(self) -> Side:
        listing = self._listing()
        boxes = [self._box(file) for file in listing.files] if self.boxes else None
        return side_of(listing, self.size, self.crop, boxes=boxes)

    def sides(self) -> tuple[Side, Side]:
        ours, public = self.everyone(), self.others()
        if public is None:
            raise DataError(
                f"all breeds in {self.root} are private, and public images are needed: name "
                'another dataset, such as public = { name = "afhq", root = "..." }'
            )
        if (self.folder / TRAIN).is_file() or (self.folder / TEST).is_file():
            held_out = set(self._published()[TEST])
            flags = [source in held_out for source in ours.images.sources]
            ours = replace(ours, test=torch.tensor(flags))
        return ours, public

    def _listing(self) -> Catalogue:
        listing = catalogue(self.existing(self.root, part=IMAGES))
        return listing._replace(names=[breed_of(name) for name in listing.names])

    def _published(self) -> dict[str, list[str]]:
        """Read the lists, and refuse parts that overlap."""
        parts = {}
        for name in (TRAIN, TEST):
            if not (path := self.folder / name).is_file():
                raise self.missing(f"no {name} in {self.folder}, beside the other list")
            parts[name] = names_in(path)
        if both := sorted(set(parts[TRAIN]) & set(parts[TEST])):
            raise DataError(
                f"{TRAIN} and {TEST} in {self.folder} overlap: {len(both)} images are in both, "
                f"{listed(both)}. Unpack lists.tar again."
            )
        return parts

    def _box(self, file: Path) -> Box:
        path = self.existing(self.root, part=BOXES) / file.parent.name / file.stem
        if not path.is_file():
            raise self.missing(f"no box of {file.name} at {path}")
        return first_box(path)

    @classmethod
    def inspect(cls, root: Path, *, hashes: bool) -> list[Finding]:
        if not (root / IMAGES).is_dir():
            return [Finding(IMAGES, "missing", f"no such folder in {root}")]
        listing = catalogue(root / IMAGES)
        findings = [
            count(IMAGES, "breeds", len(listing.names), BREEDS),
            count(IMAGES, "images", len(listing.files), PUBLISHED),
        ]
        there = set(listing.sources)
        for name, images in LISTED.items():
            if lost := present(root, name, 'split.test = "published" needs it'):
                findings.append(lost)
                continue
            files = names_in(root / name)
            findings.append(count(name, "images", len(files), images))
            if gone := [file for file in files if file not in there]:
                text = f"{len(gone):,} of its images are not in {IMAGES}: {listed(gone)}"
                findings.append(Finding(name, "missing", text))
        boxes = [file for file in listing.files if not _annotation(root, file).is_file()]
        if boxes:
            text = f"no box of {len(boxes):,} images, which only data.boxes needs"
            return [*findings, Finding(BOXES, "unchecked", text)]
        return [*findings, Finding(BOXES, "ok", "a box of every image")]


def _annotation(root: Path, file: Path) -> Path:
    return root / BOXES / file.parent.name / file.stem


def breed_of(folder: str) -> str:
    """Return the breed that a folder such as n02085620-Chihuahua is named after."""
    return folder.partition("-")[2] or folder


def names_in(path: Path) -> list[str]:
    """Read the image paths of a list in MATLAB's format."""
    refuse_special(path)
    try:
        entries: Sequence[object] = loadmat(path)["file_list"]
        names = [str(entry[0][0]) for entry in entries]  # type: ignore[index]
    except UNREADABLE as error:
        reason = str(error).partition("\n")[0]
        raise DataError(
            f"{path} is not a list of Stanford Dogs ({reason}): unpack lists.tar again"
        ) from error
    return names


def first_box(path: Path) -> Box:
    """Read the first box of an annotation; only its four numbers are read, not the XML."""
    text = path.read_text(encoding="utf-8", errors="replace")
    corners = [re.search(rf"<{corner}>\s*(\d+)\s*</{corner}>", text) for corner in CORNERS]
    values = [int(found.group(1)) for found in corners if found]
    if len(values) != len(CORNERS):
        raise DataError(
            f"{path} has no box: expected {', '.join(CORNERS)} in it. Unpack annotation.tar again."
        )
    left, top, right, bottom = values
    if right <= left or bottom <= top:
        raise DataError(f"{path} has an empty box {values}: unpack annotation.tar again")
    return left, top, right, bottom
