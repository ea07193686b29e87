"""What an epoch measures: kept on the device, and read a few times an epoch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from frostglass.core.errors import RunError
from frostglass.defenses.base import Term, TrainingProgress

UNREAD = 64  # batches after which values are read, so that a training that diverged ends soon


@dataclass(frozen=True)
class BatchRecord:
    """What is measured of a batch of `images`: its loss, the loss's terms, and further values."""

    images: int
    loss: Tensor
    terms: Mapping[str, Term]
    more: Mapping[str, Tensor]

    def values(self) -> list[Tensor]:
        tensors = (self.loss, *(term.value for term in self.terms.values()), *self.more.values())
        return [tensor.detach().float() for tensor in tensors]


class EpochRecord:
    """The means of what is measured in an epoch.

    Reading a value waits until the device has computed it, so none is read in a step.
    """

    def __init__(self, model: str, progress: TrainingProgress, images: int):
        self._model, self._progress, self._images = model, progress, images
        self._means: dict[str, float] = {}
        self._unread: list[tuple[int, BatchRecord]] = []

    def add(self, number: int, batch: BatchRecord) -> None:
        """Add the record of batch `number`."""
        self._unread.append((number, batch))
        if len(self._unread) == UNREAD:
            self._read()

    def means(self) -> dict[str, float]:
        """Return the means over the images of the epoch."""
        self._read()
        return self._means

    def _read(self) -> None:
        unread, self._unread = self._unread, []
        if not unread:
            return
        tensors = [value for _, batch in unread for value in batch.values()]
        numbers = iter(torch.stack(tensors).cpu().tolist())
        for number, batch in unread:
            loss = next(numbers)
            terms = {name: next(numbers) for name in batch.terms}
            if not math.isfinite(loss):
                raise self._diverged(number, terms)
            row = {name: batch.terms[name].weight * value for name, value in terms.items()}
            row |= {name: next(numbers) for name in batch.more}
            for name, value in row.items():
                share = batch.images / self._images
                self._means[name] = self._means.get(name, 0.0) + share * value

    def _diverged(self, number: int, terms: Mapping[str, float]) -> RunError:
        values = ", ".join(f"{name} {value}" for name, value in terms.items())
        return RunError(
            f"{self._model}: the loss is not finite at epoch {self._progress.epoch}, batch "
            f"{number} ({values}): lower the learning rate or the defense's strength; the "
            "last finished epoch is kept and the same command resumes there"
        )
