"""MNIST, read from its published idx files."""

import gzip
import math
import zlib
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from frostglass.core.errors import DataError
from frostglass.core.parameters import parameters
from frostglass.core.types import Images, Shape
from frostglass.data import base
from frostglass.data._images import resized

UNSIGNED_BYTES = 0x08


@base.datasets.register
@parameters
class Mnist:
    """MNIST's 60,000 training digits as identities ("digit 3"), one channel, resized from 28 x 28 to `size`.

    `root` holds the idx files themselves or torchvision's layout (MNIST/raw), gzipped or not. `images_per_class` keeps the first
    pictures of each class. The published test pictures are not used: `make_split` draws its own test part from the table.
    `private_classes` and `public_classes` are the digits on each side; none may be on both.
    """

    root: Path
    size: Annotated[int, Field(ge=16, le=128)] = 32
    private_classes: base.DigitClasses = (0, 1, 2, 3, 4)
    public_classes: base.DigitClasses = (5, 6, 7, 8, 9)
    images_per_class: Annotated[int, Field(ge=3)] | None = None

    def __post_init__(self) -> None:
        base.check_digits(self.private_classes, self.public_classes)

    @property
    def image_shape(self) -> Shape:
        return (1, self.size, self.size)

    def counts(self) -> tuple[int, int, int]:
        each = min(6000, self.images_per_class or 6000)
        return (
            len(self.private_classes),
            each * len(self.private_classes),
            each * len(self.public_classes),
        )

    def public_people(self) -> list[int]:
        return [min(6000, self.images_per_class or 6000)] * len(self.public_classes)

    def files(self) -> list[Path]:
        return [
            _find(self.root, name)
            for name in ("train-images-idx3-ubyte", "train-labels-idx1-ubyte")
        ]

    def tables(self) -> tuple[Images, Images]:
        pixels = read_idx(_find(self.root, "train-images-idx3-ubyte"), dims=3)
        labels = read_idx(_find(self.root, "train-labels-idx1-ubyte"), dims=1)
        if len(pixels) != len(labels):
            raise DataError(
                f"{self.root} holds {len(pixels)} MNIST pictures and {len(labels)} labels: the two files do not belong together"
            )
        if labels.max() > 9:
            raise DataError(f"{self.root} holds the MNIST label {labels.max()}: expected 0 to 9")
        private, public = (
            self._resized(
                base.digit_table(
                    pixels.unsqueeze(1), labels, digits, "mnist train", self.images_per_class
                )
            )
            for digits in (self.private_classes, self.public_classes)
        )
        return private, public

    def _resized(self, table: Images) -> Images:
        return Images(resized(table.pixels, self.size), table.labels, table.names, table.sources)


def _find(root: Path, name: str) -> Path:
    for folder in (root, root / "MNIST" / "raw"):
        for file in (folder / name, folder / f"{name}.gz"):
            if file.is_file():
                return file
    raise DataError(
        f"no {name} or {name}.gz in {root} or {root / 'MNIST' / 'raw'}: put MNIST's files there or correct root"
    )


def read_idx(path: Path, dims: int) -> Tensor:
    """The bytes of an idx file as a uint8 tensor of `dims` dimensions; refused unless magic, dimensions and length agree."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read ({error}): fetch it again") from error
    expected = bytes([0, 0, UNSIGNED_BYTES, dims])
    if data[:4] != expected:
        raise DataError(
            f"{path} starts with {data[:4].hex() or 'nothing'}, expected {expected.hex()} (idx, bytes, {dims} dimensions)"
        )
    start = 4 + 4 * dims
    shape = [int.from_bytes(data[place : place + 4], "big") for place in range(4, start, 4)]
    if len(data) - start != math.prod(shape) or not all(shape):
        raise DataError(
            f"{path} has {len(data)} bytes, which its dimensions {shape} do not account for: fetch it again"
        )
    return torch.from_numpy(np.frombuffer(data, np.uint8, offset=start).reshape(shape).copy())
