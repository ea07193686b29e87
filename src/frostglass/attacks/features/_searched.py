"""What the attacks share that follow gradients through the encoder: parameters, objective and search, row by row."""

from collections.abc import Callable
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from frostglass.attacks._search.row_rng import RowRng
from frostglass.attacks._search.search import OptimizerName, OptimizerSettings, descend
from frostglass.attacks.features.base import FeatureAttack, Ledger
from frostglass.core.parameters import parameters
from frostglass.core.views import Ability, FeatureView
from frostglass.runtime.batching import padded_rows


def unmoved(state: Tensor, start: Tensor) -> Tensor:
    """Rows may be anywhere."""
    return state


@parameters
class Searched(FeatureAttack):
    """Base of the attacks that minimise scale · gap(F, Enc(x̂)) over what stands for x̂; rows never influence each other.

    Args:
        gap: "mean_square", ‖F - Enc(x̂)‖² / d for features of d numbers, or "norm", ‖F - Enc(x̂)‖, whose slope does not fade near the
            optimum.
        scale: the weight of the gap.
        optimizer: "nesterov", "momentum" or "adam". momentum: of the first two. betas: of Adam.
        lr: step size. steps: iterations.
        batch: rows searched together, rounded up to a multiple of 16; does not change the result.
    """

    gap: Literal["mean_square", "norm"] = "mean_square"
    scale: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    optimizer: OptimizerName = "adam"
    momentum: Annotated[float, Field(gt=0, lt=1)] = 0.9
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (
        0.9,
        0.999,
    )
    lr: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.02
    steps: Annotated[int, Field(ge=0)] = 600
    batch: Annotated[int, Field(ge=1)] = 64

    @property
    def access(self) -> tuple[Ability, ...]:
        return ("encoder",)

    def gaps(self, made: Tensor, wanted: Tensor) -> Tensor:
        """How far features are from those that are wanted, (N,), not yet scaled."""
        apart = (made - wanted).flatten(1)
        return apart.square().mean(1) if self.gap == "mean_square" else apart.norm(dim=1)

    def searched(
        self,
        name: str,
        view: FeatureView,
        features: Tensor,
        start: Tensor,
        show: Callable[[Tensor], Tensor],
        ledger: Ledger,
        *,
        penalty: Callable[[Tensor, Tensor], Tensor] | None = None,
        project: Callable[[Tensor, Tensor], Tensor] = unmoved,
    ) -> tuple[Tensor, Tensor]:
        """Where rows that begin at `start` (R, ...) end, and which of them came to their end, (R,).

        `show` makes pictures of rows, `penalty` says what else pictures that should have given features are punished for, one value each.
        Each batch is kept in `ledger` when it is done.
        """
        pace = OptimizerSettings(
            self.steps, self.lr, self.optimizer, self.momentum, project=project, betas=self.betas
        )
        parts = []
        batches = torch.arange(len(start), device=start.device).split(len(padded_rows(self.batch)))
        for number, rows in enumerate(batches):
            wanted = features[rows]

            def objective(
                state: Tensor, places: Tensor, rng: RowRng, wanted: Tensor = wanted
            ) -> tuple[Tensor, Tensor]:
                pictures, aim = show(state), wanted[places]
                value = self.scale * self.gaps(view.features(pictures), aim)
                return (value + penalty(pictures, aim) if penalty else value), torch.zeros_like(
                    value
                )

            if not (saved := ledger.load(f"{name}-{number:05d}")):
                places = torch.arange(len(rows), device=start.device)
                with ledger.part(f"{name}-{number:05d}"):
                    found = descend(
                        view,
                        start[rows],
                        places,
                        RowRng.of(0, name, places, places),
                        objective,
                        pace,
                    )
                saved = ({"state": found.state, "whole": found.whole}, {})
                ledger.save(f"{name}-{number:05d}", *saved)
            parts.append((saved[0]["state"].to(start.device), saved[0]["whole"].to(start.device)))
            ledger.progress(number + 1, len(batches), name)
        states, whole = zip(*parts, strict=True)
        return torch.cat(states), torch.cat(whole)
