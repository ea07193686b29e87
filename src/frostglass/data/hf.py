"""Hugging Face datasets on disk: saved by `save_to_disk`, as Parquet files, or as image folders."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field

from frostglass.core.errors import ConfigError, DataError
from frostglass.core.parameters import parameters
from frostglass.core.types import Images, Shape
from frostglass.data._arrow import ArrowImages, class_names, opened, table_files
from frostglass.data._catalogue import catalogue
from frostglass.data._file_dataset import (
    FileDataset,
    ImageSize,
    Side,
    public_dataset,
    side_of,
    without_names,
)
from frostglass.data._inspect import Finding
from frostglass.data.base import Crop, datasets, listed


@datasets.register
@parameters
class HuggingFace(FileDataset):
    """A Hugging Face dataset on disk: the classes of one split are private, another is public.

    Read are folders of `Dataset.save_to_disk` and `DatasetDict.save_to_disk`, Parquet files as on
    the Hub (data/train-00000-of-00001.parquet), and image folders (train/NAME/1.jpg), without the
    package `datasets`: no code of a dataset is run and nothing is downloaded. Needs the extra `hf`
    (pyarrow) but for image folders. metadata.csv of image folders is not read. Images are decoded
    once. A public side without labels has no identities.

    Args:
        root: folder of the dataset.
        size: pixels a side.
        crop: "centre", or a share of the shorter side.
        split: the split with the private images.
        public: the public images: a split of the same dataset, or a table of another dataset.
        image: column of the images.
        label: column of the classes, numbers or text.
        identities: private classes are the first ones. Others are public if `public` is not given.
    """

    title: ClassVar[str] = "Hugging Face dataset"
    preparation: ClassVar[str] = (
        "1. where there is a network, `hf download OWNER/NAME --repo-type dataset --local-dir "
        "ROOT`, or save_to_disk(ROOT) of the package datasets; 2. copy ROOT here: nothing is "
        "downloaded; 3. set data.root, and check it with `frostglass data verify hf ROOT`"
    )

    root: Path
    size: ImageSize = 64
    crop: Crop = "centre"
    split: str = "train"
    public: str | dict[str, Any] | None = None
    image: str = "image"
    label: str = "label"
    identities: Annotated[int, Field(ge=2)] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.public, dict):
            public_dataset(self.public, self.size)
        if self.public is None and self.identities is None:
            raise ConfigError(
                "public: expected a split such as 'test', or a table of another dataset; or give "
                "identities, to have the other classes public"
            )

    @property
    def image_shape(self) -> Shape:
        return (3, self.size, self.size)

    def crop_mode(self) -> Crop:
        return self.crop

    def everyone(self) -> Side:
        return self._side(self.split)

    def sides(self) -> tuple[Side, Side]:
        whole = self._side(self.split)
        names = whole.images.names
        if not names:
            raise DataError(
                f"{self.root} has no column {self.label!r}, so that nobody is named: set data.label"
            )
        wanted = self.identities or len(names)
        if wanted > len(names):
            raise DataError(
                f"identities must be at most {len(names)}, the classes of {self.split}, got "
                f"{wanted}. Lower data.identities."
            )
        private = replace(whole, images=whole.images.of_people(torch.arange(wanted)))
        if isinstance(self.public, dict):
            return private, public_dataset(self.public, self.size).everyone()
        if self.public is not None:
            return private, self._side(self.public)
        others = torch.arange(wanted, len(names))
        if not len(others):
            raise DataError(f"all {len(names)} classes are private: lower data.identities")
        return private, replace(whole, images=whole.images.of_people(others), files=[])

    def _side(self, split: str) -> Side:
        root = self.root.expanduser()
        if not root.is_dir():
            raise self.missing(f"no folder at {root}")
        files = table_files(root, split)
        if not files:
            return self._of_folders(root, split)
        tables = opened(files)
        columns = tables[0].schema().names
        if self.image not in columns:
            raise DataError(
                f"{files[0]} has no column {self.image!r}, it has {listed(columns)}: set data.image"
            )
        counts = [table.rows() for table in tables]
        pixels = ArrowImages(tables, counts, self.image, self.size, self.crop)
        sources = tuple(
            f"{file.name} {row}"
            for file, count in zip(files, counts, strict=True)
            for row in range(count)
        )
        if self.label not in columns:
            images = Images(pixels, torch.full((sum(counts),), -1), (), sources)
            return Side(images, files)
        values = [value for table in tables for value in table.column(self.label)]
        names, labels = _numbered(values, class_names(tables[0], self.label), files[0])
        return Side(Images(pixels, torch.tensor(labels), names, sources), files)

    def _of_folders(self, root: Path, split: str) -> Side:
        folder = root / split if (root / split).is_dir() else root
        listing = catalogue(folder)
        side = side_of(listing, self.size, self.crop)
        return side if listing.names else without_names(side)

    @classmethod
    def inspect(cls, root: Path, *, hashes: bool) -> list[Finding]:
        splits = sorted(path.name for path in root.iterdir() if path.is_dir())
        files = sorted([*root.rglob("*.arrow"), *root.rglob("*.parquet")])
        if not files:
            count = len(catalogue(root).files)
            text = f"{count:,} image files in {listed(splits)}: an image folder"
            return [Finding("images", "unchecked", text)]
        return [
            Finding(each.path.name, "ok", f"{each.rows():,} rows of {listed(each.schema().names)}")
            for each in opened(files)
        ]


def _numbered(
    values: Sequence[Any], known: Sequence[str] | None, file: Path
) -> tuple[tuple[str, ...], list[int]]:
    """Return the classes that occur, in their order, and the number of each value's."""
    if odd := [value for value in values if not isinstance(value, int | str)]:
        raise DataError(f"{file} has the label {odd[0]!r}: expected a number or a name of a class")
    present = sorted(set(values), key=lambda value: (isinstance(value, str), value))
    place = {value: number for number, value in enumerate(present)}
    numbers = [value for value in present if isinstance(value, int)]
    if known and numbers and not 0 <= numbers[0] <= numbers[-1] < len(known):
        raise DataError(
            f"{file} has labels from {numbers[0]} to {numbers[-1]}, and {len(known)} names of "
            "classes: save the dataset again"
        )
    names = tuple(
        known[value] if known and isinstance(value, int) else str(value) for value in present
    )
    return names, [place[value] for value in values]
