"""Shared by attacks that follow gradients through the encoder: parameters, objective and search."""

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor

from frostglass.attacks._search.layout import fast_search
from frostglass.attacks._search.row_rng import RowRng
from frostglass.attacks._search.search import OptimizerName, OptimizerSettings, descend
from frostglass.attacks.base import View
from frostglass.attacks.features._channels import channel_gaps, channel_problems
from frostglass.attacks.features.base import FeatureAttack, QueryLedger
from frostglass.core.assets import Assets
from frostglass.core.parameters import parameters
from frostglass.core.prior import Prior
from frostglass.core.views import Ability, FeatureView
from frostglass.runtime.arithmetic import denormals_flushed
from frostglass.runtime.batching import padded_rows


@parameters
class SearchAttack(FeatureAttack):
    """Base of attacks that minimise scale · gap(F, Enc(x̂)); rows never influence each other.

    Args:
        gap: "mean_square", ‖F - Enc(x̂)‖² / d for features of d numbers, or "norm", ‖F - Enc(x̂)‖,
            whose gradient does not vanish near the optimum. "channels": the mean over channels of
            ‖F_c / ‖F_c‖ - Enc(x̂)_c / ‖Enc(x̂)_c‖‖², for a device that weakens channels, as Disco
            does: what a channel shows counts, and not its size. Ours.
        scale: the weight of the gap.
        optimizer: "nesterov", "momentum" or "adam". momentum: of the first two. betas: of Adam.
        lr: step size. steps: iterations.
        batch: rows searched together, rounded up to a multiple of 16; does not change the result.
    """

    gap: Literal["mean_square", "norm", "channels"] = "mean_square"
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

    encoder_access: ClassVar[Ability] = "encoder"

    def brief(self) -> Self:
        return replace(self, steps=min(2, self.steps))

    def gaps(self, features: Tensor, wanted: Tensor) -> Tensor:
        """Return the distance of each feature from the wanted one, (N,), not yet scaled."""
        if self.gap == "channels":
            return channel_gaps(features, wanted)
        difference = (features - wanted).flatten(1)
        if self.gap == "mean_square":
            return difference.square().mean(1)
        return difference.norm(dim=1)

    def problems(self, view: View, assets: Assets) -> list[str]:
        return [*super().problems(view, assets), *self.gap_problems(view)]

    def gap_problems(self, view: View) -> list[str]:
        """Describe features that the gap cannot compare."""
        return channel_problems(view, f'{self.name}.gap "channels"') * (self.gap == "channels")

    def evaluations(self, rows: int) -> int:
        """Count the images encoded by one search of this many rows, padding included."""
        return self.steps * len(padded_rows(rows))

    def search(
        self,
        name: str,
        view: FeatureView,
        features: Tensor,
        start: Tensor,
        generate: Callable[[Tensor], Tensor],
        ledger: QueryLedger,
        *,
        prior: Prior | None = None,
        penalty: Callable[[Tensor, Tensor], Tensor] | None = None,
        project: Callable[[Tensor, Tensor], Tensor] = lambda state, start: state,
    ) -> tuple[Tensor, Tensor]:
        """Search from `start` (R, ...); return the end of each row and whether it finished, (R,).

        `generate` turns rows into images, by the networks of `prior` if given; `penalty(images,
        wanted)` adds a loss to each row. Each finished batch is kept in `ledger`.
        """
        settings = OptimizerSettings(
            self.steps, self.lr, self.optimizer, self.momentum, project=project, betas=self.betas
        )
        batches = torch.arange(len(start), device=start.device).split(len(padded_rows(self.batch)))

        def found(number: int) -> dict[str, Tensor]:
            rows = batches[number]
            wanted = features[rows]

            def objective(state: Tensor, places: Tensor, rng: RowRng) -> tuple[Tensor, Tensor]:
                images, aims = generate(state), wanted[places]
                loss = self.scale * self.gaps(view.features(images), aims)
                if penalty:
                    loss = loss + penalty(images, aims)
                return loss, torch.zeros_like(loss)

            places = torch.arange(len(rows), device=start.device)
            rng = RowRng.of(0, name, places, places)
            with fast_search(view, prior), denormals_flushed():
                result = descend(view, start[rows], places, rng, objective, settings)
            return {"state": result.state, "finished": result.finished}

        names = [f"{name}-{number:05d}" for number in range(len(batches))]
        parts = ledger.share(names, found, name)
        states, finished = (
            torch.cat([part[column].to(start.device) for part in parts])
            for column in ("state", "finished")
        )
        return states, finished
