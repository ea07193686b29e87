"""Compares files on disk with what a dataset's publishers say of it: counts and hashes."""

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from gzip import GzipFile
from pathlib import Path
from typing import IO, ClassVar, Literal

from frostglass.data._images import SUFFIXES
from frostglass.data.base import listed

State = Literal["ok", "missing", "differs", "unchecked"]


@dataclass(frozen=True)
class Finding:
    """One sentence about a part of a dataset, and whether that part is as published."""

    part: str
    state: State
    text: str

    @property
    def bad(self) -> bool:
        return self.state in ("missing", "differs")


class Published(ABC):
    """Base of datasets that are published as files.

    `preparation` says in numbered steps how to get the files: errors about missing ones repeat it.
    """

    preparation: ClassVar[str]

    @classmethod
    @abstractmethod
    def inspect(cls, root: Path, *, hashes: bool) -> list[Finding]:
        """Compare a folder with the published counts and, if asked, with published hashes."""


def count(part: str, what: str, got: int, published: int) -> Finding:
    """Compare a number with the published one."""
    if got == published:
        return Finding(part, "ok", f"{got:,} {what}, as published")
    missing = got < published
    words = f"{published - got:,} missing" if missing else f"{got - published:,} too many"
    text = f"{got:,} {what}, expected {published:,}: {words}"
    return Finding(part, "missing" if missing else "differs", text)


def present(root: Path, file: str, why: str) -> Finding | None:
    """Say that a file is missing; None if it is there."""
    if (root / file).is_file():
        return None
    return Finding(file, "missing", f"no such file in {root}: {why}")


def md5_in(file: IO[bytes] | GzipFile) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    while part := file.read(2**20):
        digest.update(part)
    return digest.hexdigest()


def md5_of(path: Path) -> str:
    with path.open("rb") as file:
        return md5_in(file)


def compared(part: str, got: str, md5: str) -> Finding:
    """Compare an MD5 with the published one."""
    if got == md5:
        return Finding(part, "ok", f"MD5 {md5}, as published")
    return Finding(part, "differs", f"MD5 {got}, expected {md5}: get it again")


def hashed(root: Path, file: str, md5: str, *, check: bool) -> Finding:
    """Compare a file with its published MD5; it must be there."""
    if not check:
        return Finding(file, "unchecked", "present; its hash was not compared (--quick)")
    return compared(file, md5_of(root / file), md5)


def archives(root: Path, known: Mapping[str, str], *, check: bool) -> list[Finding]:
    """Compare those archives that still are in the folder or beside it; none need be."""
    places = {
        file: [each for each in (root, root.parent) if (each / file).is_file()] for file in known
    }
    return [
        hashed(found[0], file, known[file], check=check) for file, found in places.items() if found
    ]


def image_names(folder: Path) -> set[str]:
    """Return the names of the image files in a folder, not below it."""
    with os.scandir(folder) as listing:
        return {each.name for each in listing if Path(each.name).suffix.lower() in SUFFIXES}


def absent(part: str, expected: Sequence[str], got: set[str]) -> Finding:
    """Say which of the expected files are missing."""
    if lost := [name for name in expected if name not in got]:
        return Finding(
            part, "missing", f"{len(lost):,} of {len(expected):,} images missing: {listed(lost)}"
        )
    return Finding(part, "ok", f"all {len(expected):,} images are there")
