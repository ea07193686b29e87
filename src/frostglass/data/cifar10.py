"""CIFAR-10, read from its binary version."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from frostglass.core.errors import ConfigError, DataError
from frostglass.core.parameters import parameters
from frostglass.core.pixels import PixelSource
from frostglass.core.special_files import refuse_special
from frostglass.core.types import Images
from frostglass.data._file_dataset import FileDataset, Side
from frostglass.data._images import resized
from frostglass.data._inspect import Finding, archives, count, present
from frostglass.data.base import datasets, listed

NAMES = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)
FOLDER, PICKLES = "cifar-10-batches-bin", "cifar-10-batches-py"
TRAIN = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST = "test_batch.bin"
ARCHIVES = {"cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530"}
SIDE = 32
RECORD = 1 + 3 * SIDE * SIDE  # the class, then red, green and blue
IMAGES = 10_000  # in each file
Classes = Annotated[tuple[Annotated[int, Field(ge=0, le=9)], ...], Field(min_length=1)]


@datasets.register
@parameters
class Cifar10(FileDataset):
    """CIFAR-10's classes as identities: five are private and five public, 6,000 images each.

    The binary version is read; the Python version is a pickle, which could run code, and is
    refused. All 60,000 images are used. `split.test = "published"` takes CIFAR-10's test images.

    Paper: Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009. Split: BiDO
    (Peng et al., KDD 2022).

    Args:
        root: folder with data_batch_1.bin to data_batch_5.bin and test_batch.bin, or the one with
            cifar-10-batches-bin in it.
        size: pixels a side.
        private_classes: private classes, 0 to 9.
        public_classes: public classes; none may also be private.
        images_per_class: keep only the first images of each class.
    """

    title: ClassVar[str] = "CIFAR-10"
    preparation: ClassVar[str] = (
        "1. get the binary version, cifar-10-binary.tar.gz, from "
        "www.cs.toronto.edu/~kriz/cifar.html; 2. unpack it, which gives "
        f"ROOT/{FOLDER}/data_batch_1.bin and others; 3. set data.root, and check it with "
        "`frostglass data verify cifar10 ROOT`"
    )

    root: Path
    size: Annotated[int, Field(ge=16, le=256)] = 32
    private_classes: Classes = (0, 1, 2, 3, 4)
    public_classes: Classes = (5, 6, 7, 8, 9)
    images_per_class: Annotated[int, Field(ge=3)] | None = None

    def __post_init__(self) -> None:
        if both := sorted(set(self.private_classes) & set(self.public_classes)):
            raise ConfigError(
                f"{listed(both)} in both private_classes and public_classes: an identity is either "
                "private or public"
            )

    @property
    def image_shape(self) -> tuple[int, int, int]:
        return (3, self.size, self.size)

    def sides(self) -> tuple[Side, Side]:
        whole = self.everyone()
        ours, theirs = (
            self._of(whole, classes) for classes in (self.private_classes, self.public_classes)
        )
        return ours, theirs

    def everyone(self) -> Side:
        files = self._files()
        records = [_records(file) for file in files]
        labels = torch.from_numpy(np.concatenate([each[:, 0] for each in records])).long()
        if len(labels) and labels.max() > 9:
            raise DataError(f"{files[0].parent} holds the class {labels.max()}: expected 0 to 9")
        sources = tuple(
            f"{file.name} {row}"
            for file, each in zip(files, records, strict=True)
            for row in range(len(each))
        )
        images = Images(Records(tuple(files), len(labels), self.size), labels, NAMES, sources)
        counts = [len(each) for each in records]
        test = torch.arange(len(labels)) >= sum(counts[:-1])
        return Side(images, files, test=test)

    def _of(self, whole: Side, classes: tuple[int, ...]) -> Side:
        labels = whole.images.labels
        rows = torch.cat(
            [(labels == each).nonzero().flatten()[: self.images_per_class] for each in classes]
        )
        assert whole.test is not None
        number = torch.full((10,), -1).scatter(0, torch.tensor(classes), torch.arange(len(classes)))
        images = whole.images.at(rows)
        names = tuple(NAMES[each] for each in classes)
        images = replace(images, labels=number[images.labels], names=names)
        return replace(whole, images=images, test=whole.test[rows])

    def _files(self) -> list[Path]:
        root = self.root.expanduser()
        folder = next((each for each in (root / FOLDER, root) if (each / TEST).is_file()), None)
        if folder is None:
            raise self.missing(_why_not(root))
        if lost := [name for name in (*TRAIN, TEST) if not (folder / name).is_file()]:
            raise self.missing(f"no {' and no '.join(lost)} in {folder}")
        return [folder / name for name in (*TRAIN, TEST)]

    @classmethod
    def inspect(cls, root: Path, *, hashes: bool) -> list[Finding]:
        findings = archives(root, ARCHIVES, check=hashes)
        folder = root / FOLDER if (root / FOLDER).is_dir() else root
        if not any((folder / name).is_file() for name in (*TRAIN, TEST)):
            return [*findings, Finding("batches", "missing", _why_not(root))]
        for name in (*TRAIN, TEST):
            if lost := present(folder, name, f"unpack {next(iter(ARCHIVES))} again"):
                findings.append(lost)
            else:
                findings.append(count(name, "images", len(_records(folder / name)), IMAGES))
        return findings


def _why_not(root: Path) -> str:
    """Say why there are no binary files at a place."""
    pickled = [each for each in (root / PICKLES, root) if (each / "data_batch_1").is_file()]
    if pickled:
        return (
            f"{pickled[0]} holds the Python version of CIFAR-10, whose files are pickles and could "
            "run code: the binary version is needed"
        )
    return f"no {TEST} in {root} or {root / FOLDER}"


def _records(file: Path) -> np.ndarray:
    """Map a file as uint8 (N, 3073): nothing is read yet."""
    refuse_special(file)
    size = file.stat().st_size
    if not size or size % RECORD:
        raise DataError(
            f"{file} has {size:,} bytes, expected a multiple of {RECORD:,} (a class and 32 x 32 x "
            "3 values for each image): get the binary version again"
        )
    return np.memmap(file, np.uint8, "r").reshape(-1, RECORD)


@dataclass(frozen=True, eq=False)
class Records(PixelSource):
    """The images of several files of records, one after the other, resized where they are read."""

    files: tuple[Path, ...]
    count: int
    size: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.count, 3, self.size, self.size)

    def read(self, rows: Tensor) -> Tensor:
        pixels = torch.empty(len(rows), 3, SIDE, SIDE, dtype=torch.uint8)
        first = 0
        for file in self.files:
            records = _records(file)
            own = (rows >= first) & (rows < first + len(records))
            chosen = records[(rows[own] - first).numpy(), 1:]
            pixels[own] = torch.from_numpy(chosen.reshape(-1, 3, SIDE, SIDE))
            first += len(records)
        return resized(pixels, self.size)
