"""Pixels of all images in one table: read once, by several threads, into memory or a file."""

import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from frostglass.core.errors import DataError
from frostglass.core.pixels import (
    NAME,
    ByteImages,
    Pixels,
    PixelTable,
    as_bytes,
    chunks,
    hashed,
    mapped_table,
)
from frostglass.data.base import listed
from frostglass.store.files import permissions

THREADS = 8
Write = Callable[[slice, Tensor], None]


class UnreadableImages(DataError):
    """Some of `count` images cannot be read; `problems` says which and why."""

    def __init__(self, problems: Sequence[str], count: int):
        super().__init__(
            f"{len(problems)} of {count} images cannot be used: {listed(problems)}. Repair or "
            "remove them."
        )
        self.unreadable = list(problems)


def gathered(parts: Sequence[Pixels], file: Path | None = None) -> PixelTable:
    """Read pixels once, by several threads, into one table, one after the other.

    With `file` they are written there and mapped, so that memory does not grow with them; without
    it they stay in memory. Raises one error for all images that cannot be read.
    """
    shape = (sum(map(len, parts)), *parts[0].shape[1:])
    hashes = torch.empty(shape[0], 16, dtype=torch.uint8)
    pixels = torch.empty(shape if file is None else (0,), dtype=torch.uint8)
    # Threads help: Pillow decodes, and hashes are computed, without holding Python's lock.
    threads = min(THREADS, os.cpu_count() or 1)
    target = pixel_writer(file, shape) if file else nullcontext(pixels.__setitem__)
    with target as write, ThreadPoolExecutor(threads) as pool:

        def transfer(source: Pixels, rows: slice, first: int) -> list[str]:
            place = slice(first + rows.start, first + rows.stop)
            try:
                some = source[rows].cpu().contiguous()
            except UnreadableImages as error:
                return error.unreadable
            hashes[place] = hashed(some)
            write(place, some)
            return []

        bad: list[str] = []
        first = 0
        for source in parts:
            # In chunks: a task for each of many images would itself take much memory.
            todo = chunks(len(source), source.shape[1:])
            bad += chain(*pool.map(partial(transfer, source, first=first), todo))
            first += len(source)
    if bad:
        raise UnreadableImages(bad, shape[0])
    return mapped_table(file, hashes) if file else PixelTable(pixels, hashes)


@contextmanager
def pixel_writer(file: Path, shape: Sequence[int]) -> Iterator[Write]:
    """Give a function that writes rows of uint8 (N, ...) to their place in a safetensors file."""
    size, each = math.prod(shape), math.prod(shape[1:])
    entry = {"dtype": "U8", "shape": list(shape), "data_offsets": [0, size]}
    text = json.dumps({NAME: entry}).encode()
    text += b" " * (-len(text) % 8)  # as safetensors aligns its data
    head = len(text).to_bytes(8, "little") + text
    file.unlink(missing_ok=True)  # a process that was killed may have left it
    mode = 0o666 & permissions(file.parent)
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)
    try:
        # Written, not mapped: a full disk gives an error for a write, and a signal for a page.
        _write_all(descriptor, memoryview(head), 0)
        os.truncate(descriptor, len(head) + size)

        def write(place: slice, pixels: Tensor) -> None:
            data = pixels.cpu().contiguous().flatten().numpy().data
            _write_all(descriptor, data, len(head) + place.start * each)

        yield write
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    while len(data):
        done = os.pwrite(descriptor, data, offset)
        data, offset = data[done:], offset + done


def write_table(table: PixelTable, file: Path) -> None:
    """Write a table as a new file; one that has a file already is linked where that is possible."""
    if not _linked(table.path, file):
        gathered([table], file)


def write_images(images: Tensor | ByteImages, file: Path) -> None:
    """Write images (N, ..., C, H, W) in 8 bits as a new file, or link theirs."""
    if isinstance(images, ByteImages) and _linked(images.path, file):
        return
    with pixel_writer(file, images.shape) as write:
        for part in chunks(len(images), images.shape[1:]):
            write(part, as_bytes(images[part]).pixels)


def _linked(path: Path | None, file: Path) -> bool:
    if path is None:
        return False
    try:
        os.link(path, file)
    except OSError:  # another file system, or one without links
        return False
    return True
