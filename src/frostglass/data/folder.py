"""Your own pictures: a folder of private people and a folder of public ones."""

import logging
import os
from collections import Counter
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, NoReturn

import torch
from pydantic import Field

from frostglass.core.errors import DataError
from frostglass.core.parameters import parameters
from frostglass.core.types import Images, Shape
from frostglass.data._attributes import Attributes
from frostglass.data._images import SUFFIXES, Crop, read_images
from frostglass.data.base import datasets, listed

log = logging.getLogger(__name__)


@datasets.register
@parameters
class Folder:
    """Pictures from `private` and `public`, one sub-folder per identity, named after it; `public` may also be a flat folder.

    Pictures in a flat public folder have no identity: the table has no names and every label is -1. A picture may lie deeper inside its
    identity's folder; links to folders in there are not followed. Order is by name. Hidden files and folders are passed over, files
    without an image suffix are passed over with a logged count, and every file with one must decode. Sizes may be mixed: each picture
    is cropped ("centre": the largest centred square; "none": squeezed whole) and resized to `size`, grey or colour by `channels`.

    `attributes` is a table that says of each picture what it shows, for models that tell attributes: CSV with a first line of names, `picture,glasses,smiling`, and
    a line for each picture with 1 or 0, or CelebA's `list_attr_celeba.txt`. Pictures are named by their path inside `private` or `public`, or by the file's name alone
    if no other picture on either side has it. Every private picture needs a line; public ones need theirs only if the target's training begins with them (`start`).
    """

    private: Path
    public: Path
    size: Annotated[int, Field(ge=16, le=1024)] = 64
    channels: Literal[1, 3] = 3
    crop: Crop = "centre"
    attributes: Path | None = None

    @property
    def image_shape(self) -> Shape:
        return (self.channels, self.size, self.size)

    def counts(self) -> tuple[int, int, int]:
        private, public = _catalogue(self.private), _catalogue(self.public)
        return len(private.names), len(private.files), len(public.files)

    def public_people(self) -> list[int]:
        public = _catalogue(self.public)
        return [public.labels.count(label) for label in range(len(public.names))]

    def most_of_one(self) -> int:
        """How many pictures the private person with most of them has."""
        return max(Counter(_catalogue(self.private).labels).values())

    def files(self) -> list[Path]:
        return [
            *_catalogue(self.private).files,
            *_catalogue(self.public).files,
            *([self.attributes.expanduser()] if self.attributes else []),
        ]

    def attribute_names(self) -> tuple[str, ...]:
        """The attributes that pictures come with; none without a table of them, and one that does not fit the pictures is refused."""
        told, *_ = self._told(_catalogue(self.private), _catalogue(self.public))
        return told

    def describes_public(self) -> bool:
        """Whether public pictures come with attributes."""
        return self._told(_catalogue(self.private), _catalogue(self.public))[2] is not None

    def constant_attributes(self) -> tuple[str, ...]:
        """Those that all private pictures have, or none: nothing can be learned of them."""
        names, marks, _ = self._told(_catalogue(self.private), _catalogue(self.public))
        return (
            ()
            if marks is None
            else tuple(
                name
                for name, mark in zip(names, marks.T, strict=True)
                if mark.all() or not mark.any()
            )
        )

    def tables(self) -> tuple[Images, Images]:
        private, public = _catalogue(self.private), _catalogue(self.public)
        for side in (private, public):
            if side.others:  # told here only: files are listed several times in a run
                log.warning(
                    "%s: passed over %d files without an image suffix: %s",
                    side.root,
                    len(side.others),
                    listed(side.others),
                )
        if not private.names:
            raise DataError(
                f"{self.private} holds loose pictures: private pictures need one sub-folder per identity, named after it"
            )
        names, ours, theirs = self._told(private, public)  # first: reading pictures takes longer
        # One call for both sides, so that one error names all bad files.
        pixels = read_images(
            private.files + public.files, size=self.size, channels=self.channels, crop=self.crop
        )
        parts = pixels[: len(private.files)], pixels[len(private.files) :]
        return private.table(parts[0], ours, names), public.table(parts[1], theirs, names)

    def _told(
        self, private: "_Catalogue", public: "_Catalogue"
    ) -> tuple[tuple[str, ...], torch.Tensor | None, torch.Tensor | None]:
        """The names of attributes, and which of them private and public pictures have; None without a table, or where it leaves public ones out."""
        if self.attributes is None:
            return (), None, None
        table = Attributes(self.attributes)
        return table.names, *table.of(private.sources, public.sources)


class _Catalogue(NamedTuple):
    root: Path
    files: list[Path]
    labels: list[int]
    names: list[str]
    others: list[Path]

    @property
    def sources(self) -> list[str]:
        return [file.relative_to(self.root).as_posix() for file in self.files]

    def table(
        self, pixels: torch.Tensor, attributes: torch.Tensor | None, names: tuple[str, ...]
    ) -> Images:
        return Images(
            pixels=pixels, labels=torch.tensor(self.labels), names=tuple(self.names), sources=tuple(self.sources),
            attributes=attributes, attribute_names=() if attributes is None else names,
        )  # fmt: skip


def _catalogue(root: Path) -> _Catalogue:
    """The picture files of one side; no names where the pictures lie loose."""
    root = root.expanduser()
    if not root.is_dir():
        raise DataError(
            f"no folder at {root}: expected one with a sub-folder of pictures per identity"
        )
    try:
        entries = sorted(entry for entry in root.iterdir() if not entry.name.startswith("."))
    except OSError as error:
        _refuse(error)
    folders = [entry for entry in entries if entry.is_dir()]
    found = {folder: _files(folder) for folder in folders}
    loose = [entry for entry in entries if not entry.is_dir()]
    everything = loose + [file for files in found.values() for file in files]
    others = [file for file in everything if not _is_picture(file)]
    if len(others) == len(everything):
        raise DataError(
            f"no pictures in {root} ({len(others)} other files): expected files ending in {', '.join(sorted(SUFFIXES))}"
        )
    loose = [file for file in loose if _is_picture(file)]
    if loose and folders:
        raise DataError(
            f"{root} holds {len(loose)} loose pictures beside its sub-folders: {listed(loose)}; move them into an identity's folder"
        )
    if loose:
        return _Catalogue(root, loose, [-1] * len(loose), [], others)

    pictures = {
        folder.name: [file for file in files if _is_picture(file)]
        for folder, files in found.items()
    }
    empty = [name for name, files in pictures.items() if not files]
    if empty:
        raise DataError(
            f"{len(empty)} sub-folders of {root} hold no pictures: {listed(empty)}; fill or remove them"
        )
    unreadable = [repr(name) for name in pictures if name.encode(errors="replace").decode() != name]
    if unreadable:
        raise DataError(
            f"{len(unreadable)} sub-folders of {root} have names that are not UTF-8: {listed(unreadable)}; rename them"
        )
    files = [file for group in pictures.values() for file in group]
    labels = [label for label, group in enumerate(pictures.values()) for _ in group]
    return _Catalogue(root, files, labels, list(pictures), others)


def pictures_in(root: Path) -> list[Path]:
    """Every picture file in a folder, loose or in sub-folders, by name."""
    return _catalogue(root).files


def _refuse(error: OSError) -> NoReturn:
    raise DataError(
        f"cannot list {error.filename} ({error.strerror}): the folder of every identity must be readable"
    ) from error


def _files(folder: Path) -> list[Path]:
    """Every visible file below `folder`, by name."""
    files = []
    for place, inner, names in os.walk(folder, onerror=_refuse):
        inner[:] = [name for name in inner if not name.startswith(".")]
        files += [Path(place, name) for name in names if not name.startswith(".")]
    return sorted(files)


def _is_picture(file: Path) -> bool:
    return file.suffix.lower() in SUFFIXES
