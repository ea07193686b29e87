"""The images of an attack, collected shard by shard: in memory, or in a file of 8 bits."""

from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from frostglass.core.pixels import ByteImages, as_bytes, mapped
from frostglass.data._gather import Write, pixel_writer
from frostglass.store.files import Work


class CollectedImages:
    """Images (I, K, C, H, W) of `people` people, added in their order.

    Where a work maps its results, they are rounded to 8 bits and written to a file, because the
    images of many people do not fit into memory.
    """

    def __init__(self, work: Work, people: int):
        self._work, self._people, self._done = work, people, 0
        self._file: Path | None = None
        self._parts: list[Tensor] = []
        self._open = ExitStack()
        self._write: Write | None = None

    def smaller(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return a shard as it is saved."""
        if not self._work.maps_results:
            return tensors
        return {**tensors, "images": as_bytes(tensors["images"]).pixels}

    def add(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Keep the images of a shard; return the rest."""
        images = tensors["images"]
        if not self._work.maps_results:
            self._parts.append(images)
        else:
            if self._write is None:
                shape = (self._people, *images.shape[1:])
                self._file = self._work.file("images")
                self._write = self._open.enter_context(pixel_writer(self._file, shape))
            self._write(slice(self._done, self._done + len(images)), images)
        self._done += len(images)
        return {name: value for name, value in tensors.items() if name != "images"}

    def all(self) -> Tensor | ByteImages:
        """Return the images of everybody."""
        if self._file is None:
            return torch.cat(self._parts)
        self._open.close()
        return ByteImages(mapped(self._file), self._file)
