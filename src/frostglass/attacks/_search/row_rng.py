"""Random numbers for the rows of a batch, the same for a row in any batch."""

from collections.abc import Callable

import torch
from torch import Tensor

from frostglass.runtime.batching import BATCH_MULTIPLE, padded_rows
from frostglass.runtime.seeding import generator_for


class RowRng:
    """One generator per row, seeded by what the row is; padding repeats the last row's numbers."""

    def __init__(self, generators: list[torch.Generator], rows: Tensor, device: torch.device):
        self._generators = generators
        self._rows = rows
        self._device = device

    @classmethod
    def of(cls, seed: int, purpose: str, labels: Tensor, draws: Tensor) -> "RowRng":
        """Return the generators of rows that are the given draws of the given people."""
        generators = [
            generator_for(seed, purpose, label, draw)
            for label, draw in zip(labels.tolist(), draws.tolist(), strict=True)
        ]
        return cls(generators, torch.arange(len(generators)), labels.device)

    def at(self, rows: list[int], batch_multiple: int = BATCH_MULTIPLE) -> "RowRng":
        """Return the generators of some rows, padded; both objects advance the same generators."""
        generators = [self._generators[row] for row in rows]
        return RowRng(generators, padded_rows(len(rows), batch_multiple), self._device)

    def copied(self) -> "RowRng":
        """Return generators that give the same numbers, and leave these as they are."""
        generators = [torch.Generator(rng.device) for rng in self._generators]
        for copy, rng in zip(generators, self._generators, strict=True):
            copy.set_state(rng.get_state())
        return RowRng(generators, self._rows, self._device)

    def normal(self, *shape: int) -> Tensor:
        """Draw standard normals, (rows, *shape)."""
        return self._draw(torch.randn, shape)

    def uniform(self, *shape: int) -> Tensor:
        """Draw uniforms in [0, 1), (rows, *shape)."""
        return self._draw(torch.rand, shape)

    def _draw(self, kind: Callable[..., Tensor], shape: tuple[int, ...]) -> Tensor:
        drawn = torch.stack([kind(shape, generator=rng) for rng in self._generators])
        return drawn[self._rows].to(self._device)
