"""The images of an attack, collected shard by shard: in memory, or in a file of 8 bits."""

from contextlib import ExitStack

import torch
from torch import Tensor

from frostglass.core.pixels import ByteImages, as_bytes
from frostglass.data._gather import Write, mapped, pixel_writer
from frostglass.store.files import Work


class CollectedImages:
    """Images (I, K, C, H, W) of `people` people, added in their order.

    Where a work maps its results, they are rounded to 8 bits and written to a file, because the
    images of many people do not fit into memory.
    """

    def __init__(self, work: Work, people: int):
        self.file = work.folder / "images" if work.maps_results else None
        self._people, self._done = people, 0
        self._parts: list[Tensor] = []
        self._open = ExitStack()
        self._write: Write | None = None

    def smaller(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return a shard as it is saved."""
        if self.file is None:
            return tensors
        return {**tensors, "images": as_bytes(tensors["images"]).pixels}

    def add(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Keep the images of a shard; return the rest."""
        images = tensors["images"]
        if self.file is None:
            self._parts.append(images)
        else:
            if self._write is None:
                shape = (self._people, *images.shape[1:])
                self._write = self._open.enter_context(pixel_writer(self.file, shape))
            self._write(slice(self._done, self._done + len(images)), images)
        self._done += len(images)
        return {name: value for name, value in tensors.items() if name != "images"}

    def all(self) -> Tensor | ByteImages:
        """Return the images of everybody."""
        if self.file is None:
            return torch.cat(self._parts)
        self._open.close()
        return ByteImages(mapped(self.file), self.file)
