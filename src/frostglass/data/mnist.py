"""MNIST, read from its published idx files."""

import gzip
import math
import zlib
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from frostglass.core.errors import DataError
from frostglass.core.parameters import parameters
from frostglass.core.types import Images
from frostglass.data._digits import DigitDataset
from frostglass.data._inspect import Finding, Published, compared, count, md5_in
from frostglass.data.base import datasets

UNSIGNED_BYTES = 0x08
HASHES = {  # MD5 of the unpacked file, and its dimensions
    "train-images-idx3-ubyte": ("6bbc9ace898e44ae57da46a324031adb", 3),
    "train-labels-idx1-ubyte": ("a25bea736e30d166cdddb491f175f624", 1),
}
NAMES = tuple(HASHES)


@datasets.register
@parameters
class Mnist(DigitDataset, Published):
    """MNIST's 60,000 training digits as identities ("digit 3"), resized from 28 x 28 to `size`.

    The published test images are not used: `make_split` draws its own test part from the table.

    Args:
        root: a folder with the idx files, or torchvision's layout (MNIST/raw); gzipped or not.
        size: pixels a side.
        private_classes: private digits.
        public_classes: public digits; none may also be private.
        images_per_class: keep only the first images of each class.
    """

    title: ClassVar[str] = "MNIST"

    preparation: ClassVar[str] = (
        "1. get train-images-idx3-ubyte.gz and train-labels-idx1-ubyte.gz (torchvision's MNIST "
        "downloads them); 2. put them into ROOT or ROOT/MNIST/raw, gzipped or not; 3. set "
        "data.root, and check it with `frostglass data verify mnist ROOT`"
    )

    root: Path
    images_per_class: Annotated[int, Field(ge=3)] | None = None

    def images_each(self) -> int:
        return min(6000, self.images_per_class or 6000)

    def files(self) -> list[Path]:
        return [_find(self.root, name) for name in NAMES]

    def tables(self) -> tuple[Images, Images]:
        images, labels = self.files()
        pixels, digits = read_idx(images, dims=3), read_idx(labels, dims=1)
        if len(pixels) != len(digits):
            raise DataError(
                f"expected as many MNIST labels as images in {self.root}, got {len(digits)} labels "
                f"and {len(pixels)} images: the two files do not belong together"
            )
        if digits.max() > 9:
            raise DataError(f"{self.root} holds the MNIST label {digits.max()}: expected 0 to 9")
        return self._tables(pixels, digits, "mnist train", self.images_per_class)

    @classmethod
    def inspect(cls, root: Path, *, hashes: bool) -> list[Finding]:
        findings = []
        for name, (md5, dims) in HASHES.items():
            try:
                file = _find(root, name)
            except DataError:
                text = f"neither {name} nor {name}.gz is in {root} or {root / 'MNIST' / 'raw'}"
                findings.append(Finding(name, "missing", text))
                continue
            findings.append(count(file.name, "digits", len(read_idx(file, dims=dims)), 60_000))
            if hashes:  # of the content: the same digits may be compressed anew
                with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as content:
                    findings.append(compared(file.name, md5_in(content), md5))
        return findings


def _find(root: Path, name: str) -> Path:
    for folder in (root, root / "MNIST" / "raw"):
        for file in (folder / name, folder / f"{name}.gz"):
            if file.is_file():
                return file
    raise DataError(
        f"no {name} or {name}.gz in {root} or {root / 'MNIST' / 'raw'}: put MNIST's files there or "
        f"correct root. MNIST: {Mnist.preparation}"
    )


def read_idx(path: Path, dims: int) -> Tensor:
    """Read an idx file as a uint8 tensor; magic, dimensions and length must agree."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read ({error}): download it again") from error
    expected = bytes([0, 0, UNSIGNED_BYTES, dims])
    if data[:4] != expected:
        raise DataError(
            f"{path} starts with {data[:4].hex() or 'nothing'}, expected {expected.hex()} (idx, "
            f"bytes, {dims} dimensions)"
        )
    start = 4 + 4 * dims
    shape = [int.from_bytes(data[place : place + 4], "big") for place in range(4, start, 4)]
    if len(data) - start != math.prod(shape) or not all(shape):
        raise DataError(
            f"{path} has {len(data)} bytes, which do not match its dimensions {shape}: download it "
            "again"
        )
    return torch.from_numpy(np.frombuffer(data, np.uint8, offset=start).reshape(shape).copy())
