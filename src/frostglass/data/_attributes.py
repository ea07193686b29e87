"""Attributes of pictures from a table in a file: a line a picture, a column an attribute."""

import csv
from collections import defaultdict
from pathlib import Path

import torch
from torch import Tensor

from frostglass.core.errors import DataError
from frostglass.data.base import listed

YES, NO = {"1", "true", "yes"}, {"0", "-1", "false", "no"}


class Attributes:
    """What a table says of pictures, which it names by their path inside the private or public folder, or by the file's name alone if no other picture has it.

    Takes CSV whose first line names the attributes behind a first column for the picture, and the layout of CelebA's `list_attr_celeba.txt`: a count, the
    names, then lines of a file's name and values, all separated by spaces. Values are 1 or 0, 1 or -1, true or false.
    """

    def __init__(self, path: Path):
        lines = _lines(path)
        header, rows = (
            (lines[0][1:], lines[1:])
            if len(lines[0]) > 1 and not _is_count(lines[0])
            else (lines[1], lines[2:])
        )
        self.path = path
        self.names = tuple(name.strip() for name in header)
        if not self.names or not all(self.names) or len(set(self.names)) != len(self.names):
            raise DataError(
                f"{path}: expected a first line that names each attribute once, got {', '.join(header) or 'nothing'}"
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
                    f"{path}, line {number}: expected a picture and {len(self.names)} values of 1 or 0 (or -1), got {odd}: mend that line"
                )
            if self._rows.setdefault(row[0].strip(), values) != values:
                raise DataError(
                    f"{path}, line {number}: says otherwise of {row[0]!r} than an earlier line: keep one of the two"
                )

    def of(self, private: list[str], public: list[str]) -> tuple[Tensor, Tensor | None]:
        """Attributes bool (N, A) of private and of public pictures, named by their paths inside their folders; None if no line is about a public one."""
        if both := set(private) & set(public):
            raise DataError(
                f"{listed(sorted(both))} {'is' if len(both) == 1 else 'are'} both private and public: a person must be on one side only"
            )
        called: dict[str, list[str]] = defaultdict(list)
        for file in [*private, *public]:
            called[_name(file)].append(file)
        for name, files in called.items():
            # A loose picture's name is its path, and the line its own; of the others with that name it says nothing.
            if (
                len(files) > 1
                and name in self._rows
                and (meant := [file for file in files if file not in self._rows])
            ):
                raise DataError(
                    f"{self.path}: the line of {name!r} could be about {len(files)} pictures, {listed(files)}: name each by its path, such as {meant[0]}"
                )
        rows = [
            [self._rows.get(file) or self._rows.get(_name(file)) for file in files]
            for files in (private, public)
        ]
        if absent := [file for file, row in zip(private, rows[0], strict=True) if row is None]:
            raise DataError(
                f"{self.path} says nothing of {len(absent)} of {len(private)} private pictures: {listed(absent)}; add a line for each"
            )
        absent = [file for file, row in zip(public, rows[1], strict=True) if row is None]
        if len(absent) not in (0, len(public)):
            raise DataError(
                f"{self.path} says nothing of {len(absent)} of {len(public)} public pictures: {listed(absent)}; add a line for each, or remove the lines "
                'of all public ones, which only target.start = "public" needs'
            )
        return self._table(rows[0]), None if absent else self._table(rows[1])

    def _table(self, rows: list[list[str] | None]) -> Tensor:
        told = [[value in YES for value in row] for row in rows if row is not None]
        return torch.tensor(told, dtype=torch.bool).reshape(len(told), len(self.names))


def _lines(path: Path) -> list[list[str]]:
    try:
        text = path.expanduser().read_text(encoding="utf-8-sig")
    except OSError as error:
        raise DataError(
            f"cannot read the attributes in {path}: {error.strerror or error}"
        ) from None
    except UnicodeDecodeError:
        raise DataError(
            f"{path} is not text: expected a table of attributes, such as CSV"
        ) from None
    plain = [line for line in text.splitlines() if line.strip()]
    spaced = bool(plain) and "," not in plain[0]
    lines = [line.split() for line in plain] if spaced else list(csv.reader(plain))
    if len(lines) < 2 or (_is_count(lines[0]) and len(lines) < 3):
        raise DataError(
            f"{path} holds no table: expected a line that names the attributes and one for each picture"
        )
    return lines


def _name(file: str) -> str:
    return file.rpartition("/")[2]


def _is_count(line: list[str]) -> bool:
    return len(line) == 1 and line[0].isdigit()
