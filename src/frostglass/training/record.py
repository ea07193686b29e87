"""What an epoch measures: kept on the device, and read a few times an epoch."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from frostglass.core.errors import RunError
from frostglass.defenses.base import Term, TrainingProgress

UNREAD = 64  # batches after which values are read, so that a training that diverged ends soon


class BatchRecord:
    """What is measured of a batch of `images`: its loss, the loss's terms, and further values.

    Without the graph of their gradients, which would live as long as the record.
    """

    def __init__(
        self, images: int, loss: Tensor, terms: Mapping[str, Term], more: Mapping[str, Tensor]
    ):
        self.images = images
        self.weights = {name: term.weight for name, term in terms.items()}
        self.names = (*terms, *more)
        values = (loss, *(term.value for term in terms.values()), *more.values())
        self.values = torch.stack([value.detach().float() for value in values])


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
        numbers = iter(torch.cat([batch.values for _, batch in unread]).cpu().tolist())
        for number, batch in unread:
            loss = next(numbers)
            row = {name: next(numbers) for name in batch.names}
            if not math.isfinite(loss):
                raise self._diverged(number, {name: row[name] for name in batch.weights})
            for name, value in row.items():
                share, weight = batch.images / self._images, batch.weights.get(name, 1.0)
                self._means[name] = self._means.get(name, 0.0) + share * (weight * value)

    def _diverged(self, number: int, terms: Mapping[str, float]) -> RunError:
        values = ", ".join(f"{name} {value}" for name, value in terms.items())
        return RunError(
            f"{self._model}: the loss is not finite at epoch {self._progress.epoch}, batch "
            f"{number} ({values}): lower the learning rate or the defense's strength; the "
            "last finished epoch is kept and the same command resumes there"
        )
