"""Pixels of many images, read where they are indexed: in memory, in one mapped file, or views.

A set of images may be larger than the memory. A reader of pixels takes some rows at a time, and
subsets and concatenations are views of the same bytes.
"""

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from frostglass.core.errors import RunError, StoreError
from frostglass.runtime.batching import BATCH_MULTIPLE
from frostglass.runtime.memory import trimming

NAME = "pixels"  # of the tensor in a file
AT_ONCE = 2**22  # bytes that are read together
# Images shown to a network together without gradients, and their values: more are slower on a CPU,
# whose caches they leave (256 take 1.6 times as long as four times 64), and need more memory.
SHOWN_AT_ONCE, VALUES_AT_ONCE = 64, 2**23
Index = Tensor | slice | int


class PixelSource(ABC):
    """Images uint8 (N, C, H, W) that are read where they are indexed, as tensors of their own.

    A tensor uint8 (N, C, H, W) can stand wherever a source can.
    """

    dtype: ClassVar[torch.dtype] = torch.uint8
    ndim: ClassVar[int] = 4

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Number of images, channels, height and width."""

    @abstractmethod
    def read(self, rows: Tensor) -> Tensor:
        """Return the images at `rows` (n,), uint8 (n, C, H, W)."""

    @property
    def is_meta(self) -> bool:
        """Whether there are only shapes, as in a dry run."""
        return False

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Index) -> Tensor:
        if isinstance(index, Tensor) and index.dtype == torch.int64 and index.ndim == 1:
            return self.read(index)  # without numbering all rows, of which there may be many
        rows = torch.arange(len(self))[index]
        return self.read(rows.flatten()).reshape(*rows.shape, *self.shape[1:])


Pixels = Tensor | PixelSource


@dataclass(frozen=True, eq=False)
class PixelTable(PixelSource):
    """Images in one tensor, in memory or mapped from the file at `path`, and a hash of each."""

    tensor: Tensor
    hashes: Tensor  # uint8 (N, 16)
    path: Path | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process maps the file itself: pixels would be copied whole to shared memory.
        if self.path is not None and self.path.exists():
            return mapped_table, (self.path.absolute(), self.hashes)
        return PixelTable, (self.tensor, self.hashes, self.path)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def read(self, rows: Tensor) -> Tensor:
        return self.tensor[rows]


def mapped_table(file: Path, hashes: Tensor) -> PixelTable:
    """Return the table of a file of pixels and of their hashes."""
    return PixelTable(mapped(file), hashes, file)


def mapped(file: Path) -> Tensor:
    """Map the pixels of a file: what is touched is read, and counts as the system's cache.

    The file may be removed while it is mapped, and must not be changed.
    """
    try:
        with safe_open(file, framework="pt") as stored:
            return stored.get_tensor(NAME)
    except SafetensorError as error:
        raise StoreError(
            f"{file} is not a whole safetensors file ({error}): delete that file or its folder"
        ) from error


@dataclass(frozen=True, eq=False)
class PixelView(PixelSource):
    """Some rows of one source or of several, which are numbered one after the other."""

    sources: tuple[Pixels, ...]
    rows: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.rows), *self.sources[0].shape[1:])

    @property
    def is_meta(self) -> bool:
        return any(source.is_meta for source in self.sources)

    def read(self, rows: Tensor) -> Tensor:
        if self.is_meta:
            return torch.empty(len(rows), *self.shape[1:], dtype=torch.uint8, device="meta")
        rows = self.rows[rows]
        if len(self.sources) == 1:
            return self.sources[0][rows]
        pixels = torch.empty(len(rows), *self.shape[1:], dtype=torch.uint8)
        for source, own, places in self.by_source(rows):
            pixels[places] = source[own].cpu()
        return pixels

    def by_source(self, rows: Tensor) -> Iterator[tuple[Pixels, Tensor, Tensor]]:
        """Divide numbered rows into those of each source, with their places among `rows`."""
        first = 0
        for source in self.sources:
            places = ((rows >= first) & (rows < first + len(source))).nonzero().flatten()
            if len(places):
                yield source, rows[places] - first, places
            first += len(source)


@dataclass(frozen=True, eq=False)
class ByteImages:
    """Images (..., C, H, W) kept as bytes, in memory or in the mapped file at `path`.

    They are float32 in [0, 1] where they are indexed; `images[:]` reads all.
    """

    pixels: Tensor
    path: Path | None = None

    @property
    def shape(self) -> torch.Size:
        return self.pixels.shape

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: Any) -> Tensor:
        return self.pixels[index].float().div_(255)

    def flatten(self, first: int, last: int) -> "ByteImages":
        return ByteImages(self.pixels.flatten(first, last))

    def split(self, size: int) -> Iterator[Tensor]:
        """Read the images in parts."""
        return (part.float().div_(255) for part in self.pixels.split(size))


def as_bytes(images: Tensor | ByteImages) -> ByteImages:
    """Round images to 8 bits, as every saved or scored image is.

    Images outside [0, 1] are refused: NaN would become a black image, and 1.1 a dark one.
    """
    if isinstance(images, ByteImages):
        return images
    levels = images.detach().mul(255).round()
    inside = (levels >= 0) & (levels <= 255)  # NaN is not
    if not levels.is_meta and not bool(inside.all()):
        broken = int((~inside).flatten(-3).any(-1).sum())
        raise RunError(
            f"expected images in [0, 1], got {broken} with other values or NaN: check the attack "
            "that made them, such as its lr"
        )
    return ByteImages(levels.byte())


def view(pixels: Pixels, rows: Tensor) -> PixelView:
    """Return some rows of pixels without reading them."""
    if isinstance(pixels, PixelView):
        return PixelView(pixels.sources, pixels.rows[rows])
    return PixelView((pixels,), torch.arange(len(pixels))[rows])


def joined(parts: Sequence[Pixels]) -> PixelView:
    """Return pixels one after the other without reading them; a source that repeats stays one."""
    sources: list[Pixels] = []
    firsts: list[int] = []
    rows = []
    for part in parts:
        whole = part if isinstance(part, PixelView) else view(part, torch.arange(len(part)))
        moved = torch.empty_like(whole.rows)
        first = 0
        for source in whole.sources:
            known = [first for each, first in zip(sources, firsts, strict=True) if each is source]
            if not known:
                known = [sum(map(len, sources))]
                sources.append(source)
                firsts.append(known[0])
            own = (whole.rows >= first) & (whole.rows < first + len(source))
            moved[own] = whole.rows[own] - first + known[0]
            first += len(source)
        rows.append(moved)
    return PixelView(tuple(sources), torch.cat(rows))


def chunks(count: int, shape: Sequence[int], most: int = AT_ONCE) -> Iterator[slice]:
    """Divide images of a shape (C, H, W) into slices of at most `most` bytes, at least one."""
    step = max(1, most // max(1, math.prod(shape)))
    parts = (slice(start, min(start + step, count)) for start in range(0, max(1, count), step))
    return trimming(parts, step * math.prod(shape))


def images_at_once(shape: Sequence[int]) -> int:
    """Return how many images of a shape (C, H, W) a network is shown together: fewer large ones."""
    fitting = VALUES_AT_ONCE // max(1, math.prod(shape)) // BATCH_MULTIPLE * BATCH_MULTIPLE
    return min(SHOWN_AT_ONCE, max(BATCH_MULTIPLE, fitting))


def shown_together(index: Tensor, shape: Sequence[int]) -> Iterator[Tensor]:
    """Divide rows of images of a shape (C, H, W) into those that a network is shown together."""
    size = images_at_once(shape)
    return trimming(index.split(size), size * math.prod(shape))


def per_image(function: Callable[[Tensor], Tensor], index: Tensor, shape: Sequence[int]) -> Tensor:
    """Return what a function gives for rows of images of a shape (C, H, W), shown a few at a time.

    The function takes rows, and returns a value of each on any device.
    """
    values = RowsInOne(len(index))
    for part in shown_together(index, shape):
        values.add(function(part))
    return values.tensor


class RowsInOne:
    """Rows that come in parts, in one tensor from the first part on.

    Parts that are kept apart lie between the large blocks that a network frees after each batch,
    where the blocks of the next batch no longer fit: memory would grow with the number of images.
    """

    def __init__(self, count: int):
        self.count = count
        self._filled = 0

    def add(self, rows: Tensor) -> None:
        """Append rows; all must have the same shape, type and device."""
        if not self._filled:
            self._tensor = rows.new_empty(self.count, *rows.shape[1:])
        self._tensor.narrow(0, self._filled, len(rows)).copy_(rows)
        self._filled += len(rows)

    @property
    def tensor(self) -> Tensor:
        """All rows."""
        assert self._filled == self.count, f"{self._filled} of {self.count} rows"
        return self._tensor


def content_hashes(pixels: Pixels) -> Tensor:
    """Return a hash of each image, equal only for equal pixels, uint8 (N, 16)."""
    if isinstance(pixels, PixelTable):
        return pixels.hashes
    if isinstance(pixels, PixelView):
        hashes = torch.empty(len(pixels), 16, dtype=torch.uint8)
        for source, own, places in pixels.by_source(pixels.rows):
            known = source.hashes[own] if isinstance(source, PixelTable) else None
            hashes[places] = _hashes_of(source, own) if known is None else known
        return hashes
    return _hashes_of(pixels, torch.arange(len(pixels)))


def _hashes_of(source: Pixels, rows: Tensor) -> Tensor:
    hashes = RowsInOne(len(rows))
    for part in chunks(len(rows), source.shape[1:]):
        hashes.add(hashed(source[rows[part]]))
    return hashes.tensor


def hashed(pixels: Tensor) -> Tensor:
    """Return a hash of each of some images, uint8 (n, 16)."""
    images = pixels.cpu().contiguous().numpy()
    text = b"".join(hashlib.blake2b(image, digest_size=16).digest() for image in images)
    return torch.from_numpy(np.frombuffer(text, np.uint8).reshape(-1, 16).copy())
