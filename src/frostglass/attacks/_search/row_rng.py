"""Random numbers for the rows of a batch, the same for a row in any company."""

import torch
from torch import Tensor

from frostglass.runtime.batching import BATCH_MULTIPLE, padded_rows
from frostglass.runtime.seeding import generator_for


class RowRng:
    """A generator for each row, named by what the row is and not by its place; rows that only fill a batch up repeat the numbers of others."""

    def __init__(self, generators: list[torch.Generator], fill: Tensor, device: torch.device):
        self._generators = generators
        self._fill = fill
        self._device = device

    @classmethod
    def of(cls, seed: int, purpose: str, labels: Tensor, draws: Tensor) -> "RowRng":
        """The rng of rows that are the given draws of the given identities."""
        named = [
            generator_for(seed, purpose, label, draw)
            for label, draw in zip(labels.tolist(), draws.tolist(), strict=True)
        ]
        return cls(named, torch.arange(len(named)), labels.device)

    def at(self, rows: list[int], batch_multiple: int = BATCH_MULTIPLE) -> "RowRng":
        """The rng of some rows, filled up; both roll the same generators on."""
        return RowRng(
            [self._generators[row] for row in rows],
            padded_rows(len(rows), batch_multiple),
            self._device,
        )

    def normal(self, *shape: int) -> Tensor:
        """Standard normals, (rows, *shape)."""
        return self._rolled(torch.randn, shape)

    def uniform(self, *shape: int) -> Tensor:
        """Uniforms in [0, 1), (rows, *shape)."""
        return self._rolled(torch.rand, shape)

    def _rolled(self, kind, shape: tuple[int, ...]) -> Tensor:  # type: ignore[no-untyped-def]
        return torch.stack([kind(shape, generator=generator) for generator in self._generators])[
            self._fill
        ].to(self._device)
