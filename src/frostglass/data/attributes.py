"""Attributes of pictures from a table in a file: a line a picture, a column an attribute."""

import csv
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor

from frostglass.data.base import listed
from frostglass.errors import DataError

YES, NO = {"1", "true", "yes"}, {"0", "-1", "false", "no"}


class Attributes:
    """What a table says of pictures, which it names by their path inside a folder, or by the file's name alone where that is the only one.

    Takes CSV whose first line names the attributes behind a first column for the picture, and the layout of CelebA's `list_attr_celeba.txt`: a count, the
    names, then lines of a file's name and values, all separated by spaces. Values are 1 or 0, 1 or -1, true or false.
    """

    def __init__(self, path: Path):
        lines = _lines(path)
        header, rows = (lines[0][1:], lines[1:]) if len(lines[0]) > 1 and not _is_count(lines[0]) else (lines[1], lines[2:])
        self.path = path
        self.names = tuple(name.strip() for name in header)
        if not self.names or not all(self.names) or len(set(self.names)) != len(self.names):
            raise DataError(f"{path}: expected a first line that names each attribute once, got {', '.join(header) or 'nothing'}")
        self._rows: dict[str, list[str]] = {}
        for number, row in enumerate(rows, len(lines) - len(rows) + 1):
            values = [value.strip().lower() for value in row[1:]]
            if len(values) != len(self.names) or not set(values) <= YES | NO:
                odd = next((value for value in values if value not in YES | NO), f"{len(values)} values")
                raise DataError(
                    f"{path}, line {number}: expected a picture and {len(self.names)} values of 1 or 0 (or -1), got {odd!r}: mend that line"
                )
            if self._rows.setdefault(row[0].strip(), values) != values:
                raise DataError(f"{path}, line {number}: says otherwise of {row[0]!r} than an earlier line: keep one of the two")

    def of(self, files: list[str]) -> Tensor:
        """Attributes bool (N, A) of pictures, named by their paths inside their folder."""
        alone = Counter(Path(file).name for file in files)
        found, missing = [], []
        for file in files:
            name = Path(file).name
            row = self._rows.get(file) or (self._rows.get(name) if alone[name] == 1 else None)
            found.append([value in YES for value in row or ["0"] * len(self.names)])
            if row is None:
                missing.append(file)
        if missing:
            raise DataError(f"{self.path} says nothing of {len(missing)} of {len(files)} pictures: {listed(missing)}; add a line for each")
        return torch.tensor(found, dtype=torch.bool).reshape(len(files), len(self.names))


def _lines(path: Path) -> list[list[str]]:
    try:
        text = path.expanduser().read_text(encoding="utf-8-sig")
    except OSError as error:
        raise DataError(f"cannot read the attributes in {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise DataError(f"{path} is not text: expected a table of attributes, such as CSV") from None
    plain = [line for line in text.splitlines() if line.strip()]
    spaced = bool(plain) and "," not in plain[0]
    lines = [line.split() for line in plain] if spaced else list(csv.reader(plain))
    if len(lines) < 2 or (_is_count(lines[0]) and len(lines) < 3):
        raise DataError(f"{path} holds no table: expected a line that names the attributes and one for each picture")
    return lines


def _is_count(line: list[str]) -> bool:
    return len(line) == 1 and line[0].isdigit()
