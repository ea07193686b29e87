"""Images in Arrow and Parquet files of Hugging Face datasets; nothing in them is executed."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from frostglass.core.errors import ConfigError, DataError
from frostglass.core.pixels import PixelSource
from frostglass.core.special_files import refuse_special
from frostglass.data._gather import UnreadableImages
from frostglass.data._images import decoded
from frostglass.data.base import Crop

DICT, STATE, INFO = "dataset_dict.json", "state.json", "dataset_info.json"


def pyarrow() -> Any:
    """Import pyarrow on demand: the extra may be missing."""
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError(
            f"Hugging Face datasets need pyarrow ({error}): install it with "
            "`pip install 'frostglass[hf]'`"
        ) from error
    return pyarrow


def table_files(folder: Path, split: str) -> list[Path]:
    """List the Arrow or Parquet files of a split; none if the folder has no such files.

    `save_to_disk` writes state.json, which names its files, into the folder or one for each split.
    Parquet files have the name of their split, or are in a folder of that name.
    """
    if (folder / DICT).is_file():
        if not (folder / split / STATE).is_file():
            known = sorted(path.parent.name for path in folder.glob(f"*/{STATE}"))
            raise DataError(
                f"{folder} has no split named {split!r}, it has {', '.join(known) or 'none'}: "
                "correct the name of the split"
            )
        folder = folder / split
    if (folder / STATE).is_file():
        return _of_state(folder)
    files = sorted(folder.rglob("*.parquet"))
    chosen = [
        file
        for file in files
        if file.stem == split
        or file.stem.startswith(f"{split}-")
        or split in file.relative_to(folder).parts[:-1]
    ]
    if files and not chosen:
        raise DataError(
            f"no Parquet file of {folder} belongs to a split named {split!r}: expected names such "
            f"as {split}-00000-of-00001.parquet, got {files[0].relative_to(folder)}"
        )
    return chosen


def _of_state(folder: Path) -> list[Path]:
    try:
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
        names = [entry["filename"] for entry in state["_data_files"]]
        indices = state.get("_indices_data_files")
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DataError(f"{folder / STATE} cannot be read ({error}): save it again") from error
    if indices:
        raise DataError(
            f"{folder} is a selection of rows of other files: call flatten_indices() before "
            "save_to_disk()"
        )
    if odd := [name for name in names if Path(name).name != name]:
        raise DataError(f"{folder / STATE} names a file outside of its folder, {odd[0]!r}")
    return [folder / name for name in names]


@lru_cache(maxsize=16)
def _table(file: Path, changed: int, size: int) -> Any:
    """Map an Arrow file; nothing is copied."""
    arrow = pyarrow()
    return arrow.ipc.open_stream(arrow.memory_map(str(file))).read_all()


@lru_cache(maxsize=2)
def _group(file: Path, number: int, column: str, changed: int) -> Any:
    """Read one column of a row group of a Parquet file."""
    return pyarrow().parquet.ParquetFile(file).read_row_group(number, columns=[column])


@dataclass(frozen=True)
class ArrowFile:
    """An Arrow or Parquet file: its rows are read where they are asked for."""

    path: Path

    def _mapped(self) -> Any:
        state = self.path.stat()
        return _table(self.path, state.st_mtime_ns, state.st_size)

    @property
    def is_parquet(self) -> bool:
        return self.path.suffix == ".parquet"

    def schema(self) -> Any:
        if self.is_parquet:
            return pyarrow().parquet.read_schema(self.path)
        return self._mapped().schema

    def column(self, name: str) -> list[Any]:
        """Read a whole column, such as the labels."""
        if self.is_parquet:
            return pyarrow().parquet.read_table(self.path, columns=[name])[name].to_pylist()
        return self._mapped()[name].to_pylist()

    def rows(self) -> int:
        if self.is_parquet:
            return pyarrow().parquet.ParquetFile(self.path).metadata.num_rows
        return len(self._mapped())

    def values(self, column: str, rows: Sequence[int]) -> list[Any]:
        """Read some rows of a column."""
        if not self.is_parquet:
            values = self._mapped()[column]
            return [values[row].as_py() for row in rows]
        metadata, first = pyarrow().parquet.ParquetFile(self.path).metadata, 0
        found: dict[int, Any] = {}
        for number in range(metadata.num_row_groups):
            count = metadata.row_group(number).num_rows
            if own := [row for row in rows if first <= row < first + count]:
                group = _group(self.path, number, column, self.path.stat().st_mtime_ns)[column]
                found |= {row: group[row - first].as_py() for row in own}
            first += count
        return [found[row] for row in rows]


def opened(files: Sequence[Path]) -> list[ArrowFile]:
    """Return the files, after a look at each."""
    arrow = pyarrow()
    for file in files:
        if not file.is_file():
            raise DataError(f"no file at {file}: save the dataset again")
        refuse_special(file)
        try:
            ArrowFile(file).schema()
        except (arrow.ArrowInvalid, arrow.ArrowNotImplementedError, OSError, EOFError) as error:
            reason = str(error).partition("\n")[0]
            raise DataError(f"{file} cannot be read ({reason}): save it again") from error
    return [ArrowFile(file) for file in files]


def class_names(file: ArrowFile, column: str) -> list[str] | None:
    """Return the names of the classes of a column, if the dataset has them."""
    texts = [(file.schema().metadata or {}).get(b"huggingface", b"")]
    info = file.path.parent / INFO
    texts += [info.read_bytes()] if info.is_file() else []
    for text in filter(None, texts):
        try:
            content = json.loads(text)
            features = content.get("info", content).get("features") or {}
            names = features.get(column, {}).get("names")
        except (ValueError, AttributeError) as error:
            raise DataError(f"{file.path}: its description cannot be read ({error})") from error
        if names:
            return [str(name) for name in names]
    return None


@dataclass(frozen=True, eq=False)
class ArrowImages(PixelSource):
    """Images in a column of Arrow or Parquet files, decoded where their rows are read."""

    files: Sequence[ArrowFile]
    counts: Sequence[int]
    column: str
    size: int
    crop: Crop

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(self.counts), 3, self.size, self.size)

    def read(self, rows: Tensor) -> Tensor:
        pixels = torch.empty(len(rows), *self.shape[1:], dtype=torch.uint8)
        bad: list[str] = []
        first = 0
        for file, count in zip(self.files, self.counts, strict=True):
            places = ((rows >= first) & (rows < first + count)).nonzero().flatten().tolist()
            own = [int(rows[place]) - first for place in places]
            for place, row, value in zip(
                places, own, file.values(self.column, own) if own else [], strict=True
            ):
                try:
                    pixels[place] = self._decoded(value, f"{file.path} row {row}")
                except DataError as error:
                    bad.append(str(error))
            first += count
        if bad:
            raise UnreadableImages(bad, len(rows))
        return pixels

    def _decoded(self, value: Any, name: str) -> Tensor:
        content = value.get("bytes") if isinstance(value, dict) else value
        if not isinstance(content, bytes):
            raise DataError(f"{name} (no bytes of an image in the column {self.column})")
        return decoded(BytesIO(content), name, size=self.size, channels=3, crop=self.crop)
