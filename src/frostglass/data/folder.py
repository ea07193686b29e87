"""Your own images: a folder of private people and a folder of public ones."""

import logging
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal, NamedTuple, NoReturn

import torch
from pydantic import Field
from torch import Tensor

from frostglass.core.errors import DataError
from frostglass.core.parameters import parameters
from frostglass.core.pixels import Pixels
from frostglass.core.special_files import refuse_special
from frostglass.core.types import Images, Shape
from frostglass.data._attributes import Attributes
from frostglass.data._images import SUFFIXES, Crop, ImageFiles
from frostglass.data.base import Dataset, datasets, listed

log = logging.getLogger(__name__)


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
        public: folder of public people, or of images without identity.
        size: pixels a side.
        channels: 1 for grey, 3 for colour.
        crop: "centre" cuts the largest centred square, "face" the middle of it (51 % of its side,
            where an image of LFW shows the face), "none" squeezes the whole image.
        attributes: file with the attribute table.
        secret: folder of people whom only the model's owner has, one sub-folder each, for the
            defense `decoys`; neither private nor public.
    """

    title: ClassVar[str] = "Image folder"

    private: Path
    public: Path
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

    def counts(self) -> tuple[int, int, int]:
        private, public = self._catalogues()
        return len(private.names), len(private.files), len(public.files)

    def public_people(self) -> list[int]:
        public = catalogue(self.public)
        return [public.labels.count(label) for label in range(len(public.names))]

    def people(self) -> tuple[dict[str, int], dict[str, int]]:
        private, public = (
            {
                side.names[label]: count
                for label, count in Counter(side.labels).items()
                if label >= 0
            }
            for side in self._catalogues()
        )
        return private, public

    def most_of_one(self) -> int:
        return max(Counter(catalogue(self.private).labels).values())

    def files(self) -> list[Path]:
        private, public = self._catalogues()
        table = [self.attributes.expanduser()] if self.attributes else []
        secret = catalogue(self.secret).files if self.secret else []
        return [*private.files, *public.files, *table, *secret]

    def crop_mode(self) -> Crop:
        return self.crop

    def attribute_names(self) -> tuple[str, ...]:
        return self._attributes(*self._catalogues())[0]

    def describes_public(self) -> bool:
        return self._attributes(*self._catalogues())[2] is not None

    def constant_attributes(self) -> tuple[str, ...]:
        names, private, _ = self._attributes(*self._catalogues())
        columns = () if private is None else private.T
        return tuple(
            name
            for name, column in zip(names, columns, strict=True)
            if column.all() or not column.any()
        )

    def tables(self) -> tuple[Images, Images]:
        private, public = self._catalogues()
        for side in (private, public):
            side.warn_of_others()
        if not private.names:
            raise DataError(
                f"{self.private} holds loose images: private images need one sub-folder per "
                "identity, named after it"
            )
        names, ours, theirs = self._attributes(private, public)
        return (
            private.table(self._pixels(private), ours, names),
            public.table(self._pixels(public), theirs, names),
        )

    def _pixels(self, side: "Catalogue") -> ImageFiles:
        return ImageFiles(side.files, self.size, self.channels, self.crop)

    def secret_people(self) -> list[int]:
        return list(Counter(self._secret().labels).values()) if self.secret else []

    def secret_table(self) -> Images | None:
        if not self.secret:
            return None
        people = self._secret()
        people.warn_of_others()
        return people.table(self._pixels(people), None, ())

    def _secret(self) -> "Catalogue":
        """List the secret people, who must have names: an attacker must not find one of them."""
        people = catalogue(self.secret or Path())
        if not people.names:
            raise DataError(
                f"{self.secret} holds loose images: secret people need one sub-folder each, named "
                "after the person"
            )
        return people

    def _catalogues(self) -> tuple["Catalogue", "Catalogue"]:
        return catalogue(self.private), catalogue(self.public)

    def _attributes(
        self, private: "Catalogue", public: "Catalogue"
    ) -> tuple[tuple[str, ...], Tensor | None, Tensor | None]:
        """Names of the attributes, and values of private and public images, None if not given."""
        if self.attributes is None:
            return (), None, None
        table = Attributes(self.attributes)
        return table.names, *table.of(private.sources, public.sources)


class Catalogue(NamedTuple):
    """The image files of one side, and whose they are: `labels` index `names`, -1 for nobody."""

    root: Path
    files: list[Path]
    labels: list[int]
    names: list[str]
    others: list[Path]

    @property
    def sources(self) -> list[str]:
        return [file.relative_to(self.root).as_posix() for file in self.files]

    def warn_of_others(self) -> None:
        """Warn of skipped files; only when images are read: files are listed often in a run."""
        if self.others:
            count, some = len(self.others), listed(self.others)
            log.warning("%s: skipped %d files without an image suffix: %s", self.root, count, some)

    def of(self, people: Sequence[int], most: int | None = None) -> "Catalogue":
        """Return the files of some people, the first `most` of each, with labels in that order."""
        own: dict[int, list[Path]] = {label: [] for label in people}
        for file, label in zip(self.files, self.labels, strict=True):
            if label in own:
                own[label].append(file)
        groups = [group[:most] for group in own.values()]
        files = [file for group in groups for file in group]
        labels = [place for place, group in enumerate(groups) for _ in group]
        return Catalogue(self.root, files, labels, [self.names[label] for label in people], [])

    def table(self, pixels: Pixels, attributes: Tensor | None, names: tuple[str, ...]) -> Images:
        return Images(
            pixels=pixels,
            labels=torch.tensor(self.labels),
            names=tuple(self.names),
            sources=tuple(self.sources),
            attributes=attributes,
            attribute_names=() if attributes is None else names,
        )


def catalogue(root: Path) -> Catalogue:
    """List the image files of one side; there are no names if the folder is flat."""
    root = root.expanduser()
    if not root.is_dir():
        raise DataError(f"no folder at {root}: expected one with a sub-folder per identity")
    entries = _entries(root)
    folders = {Path(entry): _files(Path(entry)) for entry in entries if _is_folder(entry)}
    loose = [Path(entry) for entry in entries if not _is_folder(entry)]
    everything = loose + [file for files in folders.values() for file in files]
    others = [file for file in everything if not _is_image(file)]
    if len(others) == len(everything):
        raise DataError(
            f"no images in {root} ({len(others)} other files): expected files ending in "
            f"{', '.join(sorted(SUFFIXES))}"
        )
    loose = [file for file in loose if _is_image(file)]
    if loose and folders:
        raise DataError(
            f"{root} holds {len(loose)} loose images beside its sub-folders: {listed(loose)}. Move "
            "them into an identity's folder."
        )
    if loose:
        return Catalogue(root, loose, [-1] * len(loose), [], others)

    images = {
        folder.name: [file for file in files if _is_image(file)]
        for folder, files in folders.items()
    }
    if empty := [name for name, files in images.items() if not files]:
        raise DataError(
            f"{len(empty)} sub-folders of {root} hold no images: {listed(empty)}. Fill or remove "
            "them."
        )
    if bad := [repr(name) for name in images if name.encode(errors="replace").decode() != name]:
        raise DataError(
            f"{len(bad)} sub-folders of {root} have names that are not UTF-8: {listed(bad)}. "
            "Rename them."
        )
    files = [file for group in images.values() for file in group]
    labels = [label for label, group in enumerate(images.values()) for _ in group]
    return Catalogue(root, files, labels, list(images), others)


def image_files(root: Path) -> list[Path]:
    """List every image file in a folder, loose or in sub-folders, by name."""
    return catalogue(root).files


def _refuse(error: OSError) -> NoReturn:
    raise DataError(
        f"cannot list {error.filename} ({error.strerror}): the folder of every identity must be "
        "readable"
    ) from error


def _files(folder: Path) -> list[Path]:
    """List every visible file below `folder`, by name; links to folders are not followed."""
    files, left = [], [folder]
    while left:
        for entry in _entries(left.pop()):
            if entry.is_dir(follow_symlinks=False):
                left.append(Path(entry))
            elif not _is_folder(entry):
                files.append(Path(entry))
    return sorted(files)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """List what is visible in a folder; refuse an image that is no file, which could block."""
    try:
        with os.scandir(folder) as listing:
            entries = [entry for entry in listing if not entry.name.startswith(".")]
    except OSError as error:
        _refuse(error)
    for entry in entries:
        # A broken link is listed: reading it says which.
        if _is_image(Path(entry)) and not entry.is_file(follow_symlinks=False):
            refuse_special(Path(entry))
    return sorted(entries, key=lambda entry: entry.name)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # such as a link to itself
        return False


def _is_image(file: Path) -> bool:
    return file.suffix.lower() in SUFFIXES
