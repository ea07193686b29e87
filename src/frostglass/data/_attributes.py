"""Binary attributes of images, read from a table in a file: one line per image."""

import csv
from collections import defaultdict
from pathlib import Path

import torch
from torch import Tensor

from frostglass.core.errors import DataError
from frostglass.core.special_files import refuse_special
from frostglass.data.base import listed

YES, NO = {"1", "true", "yes"}, {"0", "-1", "false", "no"}


class Attributes:
    """A table of attributes.

    It names an image by its path inside the private or public folder, or by the file's name alone
    if no other image has that name. The table is CSV whose first line names the attributes after a
    first column for the image, or has the layout of CelebA's `list_attr_celeba.txt`: a count, the
    names, then lines of a file name and values, all separated by spaces. Values are 1 or 0, 1 or
    -1, true or false.
    """

    def __init__(self, path: Path):
        lines = _lines(path)
        celeba = len(lines[0]) == 1
        header, rows = (lines[1], lines[2:]) if celeba else (lines[0][1:], lines[1:])
        self.path = path
        self.names = tuple(name.strip() for name in header)
        if not self.names or not all(self.names) or len(set(self.names)) != len(self.names):
            raise DataError(
                f"{path}: expected a first line that names each attribute once, got "
                f"{', '.join(header) or 'nothing'}"
            )
        self._rows: dict[str, list[str]] = {}
        for number, row in enumerate(rows, len(lines) - len(rows) + 1):
            values = [value.strip().lower() for value in row[1:]]
            if len(values) != len(self.names) or not set(values) <= YES | NO:
                odd = next(
                    (repr(value) for value in values if value not in YES | NO),
                    f"{len(values)} value{'s' * (len(values) != 1)}",
                )
                raise DataError(
                    f"{path}, line {number}: expected an image and {len(self.names)} values of 1 "
                    f"or 0 (or -1), got {odd}. Correct that line."
                )
            if self._rows.setdefault(row[0].strip(), values) != values:
                raise DataError(
                    f"{path}, line {number}: contradicts an earlier line about {row[0]!r}. Keep "
                    "one of the two."
                )

    def of(self, private: list[str], public: list[str]) -> tuple[Tensor, Tensor | None]:
        """Return attributes bool (N, A) of private and public images, given by relative paths.

        The second is None if no line is about a public image.
        """
        if both := set(private) & set(public):
            raise DataError(
                f"{listed(sorted(both))} {'is' if len(both) == 1 else 'are'} both private and "
                "public: a person must be on one side only"
            )
        self._check_names([*private, *public])
        rows = [
            [self._rows.get(file) or self._rows.get(_name(file)) for file in files]
            for files in (private, public)
        ]
        if absent := [file for file, row in zip(private, rows[0], strict=True) if row is None]:
            raise DataError(
                f"{self.path} has no line for {len(absent)} of {len(private)} private images: "
                f"{listed(absent)}. Add a line for each."
            )
        absent = [file for file, row in zip(public, rows[1], strict=True) if row is None]
        if len(absent) not in (0, len(public)):
            raise DataError(
                f"{self.path} has no line for {len(absent)} of {len(public)} public images: "
                f"{listed(absent)}. Add a line for each, or remove the lines of all public ones, "
                'which only target.start = "public" needs.'
            )
        return self._table(rows[0]), None if absent else self._table(rows[1])

    def _check_names(self, files: list[str]) -> None:
        """Refuse a line that names a file by its name alone if several images have that name."""
        by_name: dict[str, list[str]] = defaultdict(list)
        for file in files:
            by_name[_name(file)].append(file)
        for name, same in by_name.items():
            if len(same) == 1 or name not in self._rows:
                continue
            # A loose image's path is its name, so the line is its own; others need their paths.
            if unnamed := [file for file in same if file not in self._rows]:
                raise DataError(
                    f"{self.path}: the line of {name!r} could be about {len(same)} images, "
                    f"{listed(same)}. Name each by its path, such as {unnamed[0]}."
                )

    def _table(self, rows: list[list[str] | None]) -> Tensor:
        values = [[value in YES for value in row] for row in rows if row is not None]
        return torch.tensor(values, dtype=torch.bool).reshape(len(values), len(self.names))


def _lines(path: Path) -> list[list[str]]:
    refuse_special(path.expanduser())
    try:
        text = path.expanduser().read_text(encoding="utf-8-sig")
    except OSError as error:
        reason = error.strerror or error
        raise DataError(f"cannot read the attributes in {path}: {reason}") from None
    except UnicodeDecodeError:
        raise DataError(
            f"{path} is not text: expected a table of attributes, such as CSV"
        ) from None
    plain = [line for line in text.splitlines() if line.strip()]
    spaced = bool(plain) and "," not in plain[0]
    try:
        lines = [line.split() for line in plain] if spaced else list(csv.reader(plain))
    except csv.Error as error:
        raise DataError(
            f"{path} is not a table of attributes ({error}): expected short names and values of 1 "
            "or 0"
        ) from None
    if len(lines) < 2 or (_is_count(lines[0]) and len(lines) < 3):
        raise DataError(
            f"{path} holds no table: expected a line that names the attributes and one line per "
            "image"
        )
    return lines


def _name(file: str) -> str:
    return file.rpartition("/")[2]


def _is_count(line: list[str]) -> bool:
    return len(line) == 1 and line[0].isdigit()
