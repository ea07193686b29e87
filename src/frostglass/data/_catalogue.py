"""Image files by identity: a folder with a sub-folder for each, or a flat one."""

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from frostglass.core.errors import DataError
from frostglass.core.pixels import Pixels
from frostglass.core.special_files import refuse_special
from frostglass.core.types import Images
from frostglass.data._images import SUFFIXES
from frostglass.data.base import listed

log = logging.getLogger(__name__)


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
