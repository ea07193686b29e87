"""CelebA's text files, and the lists of the GMI split that published code has."""

import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from frostglass.core.errors import DataError
from frostglass.core.special_files import refuse_special
from frostglass.data.base import listed

IDENTITIES, PARTITION = "identity_CelebA.txt", "list_eval_partition.txt"
TRAIN, TEST, PUBLIC = "trainset.txt", "testset.txt", "ganset.txt"
LISTS = (TRAIN, TEST, PUBLIC)


def numbered(path: Path, what: str) -> dict[str, int]:
    """Read lines of a file name and a number; `what` says what the number is."""
    state = path.stat()
    return dict(_numbered(path, what, state.st_mtime_ns, state.st_size))


@lru_cache(maxsize=4)  # the planner lists a dataset several times
def _numbered(path: Path, what: str, changed: int, size: int) -> Mapping[str, int]:
    refuse_special(path)
    entries: dict[str, int] = {}
    with path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            words = line.split()
            if not words:
                continue
            if len(words) != 2 or not words[1].isdecimal():
                raise DataError(
                    f"{path}, line {number}: expected a file name and {what}, got "
                    f"{line.strip()[:60]!r}. Get the file again."
                )
            if entries.setdefault(words[0], int(words[1])) != int(words[1]):
                raise DataError(
                    f"{path}, line {number}: contradicts an earlier line about {words[0]!r}. Get "
                    "the file again."
                )
    if not entries:
        raise DataError(f"{path} is empty: expected lines of a file name and {what}")
    return entries


class SplitLists(NamedTuple):
    """Image names of the published parts, as CelebA numbers them."""

    train: list[str]
    test: list[str]
    public: list[str]


def split_lists(folder: Path, people: Mapping[str, int]) -> SplitLists:
    """Read trainset.txt, testset.txt and ganset.txt, and refuse parts that overlap.

    Args:
        people: the identity of each image.
    """
    folder = folder.expanduser()
    if lost := [name for name in LISTS if not (folder / name).is_file()]:
        raise DataError(
            f"no {' and no '.join(lost)} in {folder}: data.lists is a folder with {TRAIN}, {TEST} "
            f"and {PUBLIC} of the published code (its attack_dataset/CelebA). Copy them there, or "
            "remove data.lists to have the parts drawn."
        )
    lists = SplitLists(*(_names(folder / name, people) for name in LISTS))
    for one, other in ((TRAIN, TEST), (TRAIN, PUBLIC), (TEST, PUBLIC)):
        names = lists[LISTS.index(one)], lists[LISTS.index(other)]
        if both := sorted(set(names[0]) & set(names[1])):
            raise DataError(
                f"{one} and {other} in {folder} overlap: {len(both)} images are in both, "
                f"{listed(both)}. Get the lists again."
            )
    private = {people[name] for name in (*lists.train, *lists.test)}
    if both_people := sorted(private & {people[name] for name in lists.public}):
        raise DataError(
            f"{PUBLIC} in {folder} has images of {len(both_people)} private people, "
            f"{listed(both_people)}: nobody may be private and public. Get the lists again."
        )
    return lists


def _names(path: Path, people: Mapping[str, int]) -> list[str]:
    """Read the names at the beginning of lines; copies of the images may be PNG files."""
    refuse_special(path)
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    names = [os.path.splitext(line.split()[0])[0] + ".jpg" for line in lines if line.strip()]
    if unknown := [name for name in names if name not in people]:
        raise DataError(
            f"{path} names {len(unknown)} images that {IDENTITIES} does not have, "
            f"{listed(unknown)}: expected names such as 000001.jpg"
        )
    if len(set(names)) < len(names):
        raise DataError(f"{path} names {len(names) - len(set(names))} images twice: get it again")
    return names
