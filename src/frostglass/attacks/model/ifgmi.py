"""IF-GMI: inversion through the maps between a generator's blocks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from frostglass.attacks._search.ball import project_l1
from frostglass.attacks._search.row_rng import RowRng
from frostglass.attacks._search.search import SearchResult, descend
from frostglass.attacks.base import Recipe, attacks, run_padded
from frostglass.attacks.model.ppa import Ppa
from frostglass.core.parameters import parameters
from frostglass.core.prior import Prior
from frostglass.core.views import ModelView
from frostglass.priors.stylegan2 import StylePictures

Count = Annotated[int, Field(ge=0)]
Radius = Annotated[float, Field(gt=0)]


@dataclass(frozen=True)
class Entrance:
    """What one stage searches: a style for all layers and, from block 1 on, the maps that enter its block.

    A row holds the style, the maps, and the picture that the blocks before have painted, which has no gradient and so stays as it is; at block 0
    the style alone, without `carry_rgb` no picture.
    """

    network: StylePictures
    block: int
    carry_rgb: bool = True

    @property
    def parts(self) -> list[int]:
        """How many numbers of a row are the style, the maps, and the picture."""
        made = self.network.settings
        if not self.block:
            return [made.w_dim, 0, 0]
        side = made.sizes[self.block - 1]
        return [
            made.w_dim,
            made.width(side) * side**2,
            made.colours * side**2 if self.carry_rgb else 0,
        ]

    def paint(self, rows: Tensor) -> Tensor:
        """Pictures of rows, differentiable; not cut off at 0 and 1."""
        return self.network.in_parts(
            lambda part: self.network.framed(self._run(part, None)[1]), rows
        )

    def onward(self, rows: Tensor) -> Tensor:
        """The rows that enter the next block."""

        def make(part: Tensor) -> Tensor:
            maps, rgb = self._run(part, self.block + 1)
            painted = [rgb.flatten(1)] if self.carry_rgb else []
            return torch.cat([part[:, : self.parts[0]], maps.flatten(1), *painted], dim=1)

        return self.network.in_parts(make, rows)

    def within(self, radius: float) -> Callable[[Tensor, Tensor], Tensor]:
        """Rows whose style and maps are each brought back to an L1 ball around their start."""

        def project(rows: Tensor, start: Tensor) -> Tensor:
            style, maps, rgb = (rows - start).split(self.parts, dim=1)
            held = [
                project_l1(part, radius) for part in ((style, maps) if self.block else (style,))
            ]
            moved = torch.cat([*held, rgb], dim=1)
            return torch.where(
                moved == rows - start, rows, start + moved
            )  # what is inside keeps its last bit

        return project

    def _run(self, rows: Tensor, to_block: int | None) -> tuple[Tensor, Tensor]:
        made, synthesis = self.network.settings, self.network.network.synthesis
        style, maps, rgb = rows.split(self.parts, dim=1)
        ws = style[:, None].expand(-1, made.num_ws, -1)
        if not self.block:
            begun, none = synthesis.begin(ws)
            return synthesis.run(ws, features=begun, rgb=none, to_block=to_block)
        side = made.sizes[self.block - 1]
        entering = maps.unflatten(1, (-1, side, side))
        painted = None
        if self.carry_rgb:
            painted = (
                rgb.detach()
                .unflatten(1, (-1, side, side))
                .contiguous(memory_format=torch.channels_last)
            )
        return synthesis.run(
            ws,
            features=entering,
            rgb=painted,
            from_block=self.block,
            to_block=to_block,
            carry_rgb=self.carry_rgb,
        )


@attacks.register
@parameters
class Ifgmi(Ppa):
    """Intermediate features: PPA's search, continued in the maps between the blocks of a StyleGAN.

    Stage 0 searches the style w as PPA does. Stage i then searches w and the maps h_i that enter block i, where h_{i+1} is what block i makes of the w and h_i
    that were found. After each step w and h_i are brought back to the L1 balls ‖w - w⁰‖₁ ≤ r_i, ‖h_i - h_i⁰‖₁ ≤ r_i around the stage's start.

    Paper: Qiu et al., A Closer Look at GAN Priors: Exploiting Intermediate Features for Enhanced Model Inversion Attacks, ECCV 2024, arXiv 2407.13863.
    Differs: the published code enters a later block with an empty picture, so that all that earlier blocks have painted is missing and pictures jump between
        stages; `carry_rgb` false does the same. The published picture of a stage is that before its last step, here it is that after it. The published script scores all
        stages with the evaluator and reports the best one; here the stage is fixed in advance, or chosen by the target. Published are all candidates;
        so they are here by default, and `trials` with a lower `keep` selects. Otherwise as PPA. The ball of w never binds at the published radii: Adam moves a coordinate by at
        most lr a step.

    Args:
        steps: of stage 0, published 50 for FaceScrub, 70 for CelebA, 100 for dogs.
        block_steps: steps of the stages at blocks 1, 2, ...; published 10 or 25 at each of up to 7 blocks, 4 blocks are 32 pixels.
        radii: r_i for each stage, that of stage 0 first.
        carry_rgb: keep what earlier blocks have painted.
        stage: whose picture is kept: "last", or "confident", for each candidate that with the highest mean p_y over the trials.
        trials: as in PPA; 0 keeps the best target margins.
        batch: pictures searched together. Each holds its maps about eight times, up to 34 MB each time at 1024 pixels.
    """

    candidates: Annotated[int, Field(ge=1)] = 50
    trials: Annotated[int, Field(ge=0)] = 0
    batch: Annotated[int, Field(ge=1)] = 16
    block_steps: tuple[Count, ...] = (10, 10, 10)
    radii: tuple[Radius, ...] = (1000.0, 2000.0, 3000.0, 4000.0, 5000.0, 6000.0, 8000.0, 8000.0)
    carry_rgb: bool = True
    stage: Literal["last", "confident"] = "last"

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.radii) < (stages := 1 + len(self.block_steps)):
            raise ValueError(
                f"radii ({len(self.radii)}) must name one for each of the {stages} stages"
            )
        if self.stage == "confident" and not self.trials:
            raise ValueError(
                'stage "confident" compares pictures by trials: set trials to 1 or more, 100 as in PPA'
            )

    def effort(self) -> tuple[str, int]:
        steps = (self.steps, *self.block_steps)
        judged = self.trials * (len(steps) if self.stage == "confident" else 1)
        what = f"{' + '.join(map(str, steps))} steps" + (
            f" of {self.samples} pictures" if self.samples > 1 else ""
        )
        return (f"{what} and {judged} trials" if judged else what), (
            sum(steps) + judged
        ) * self.samples

    def problems(self, view: ModelView, prior: Prior) -> list[str]:
        found = super().problems(view, prior)
        if not prior.blocks:
            found.append(
                "ifgmi changes the maps between the blocks of a StyleGAN2, and this prior's generator has none: use a stylegan2 prior, or ppa"
            )
        elif len(self.block_steps) >= prior.blocks:
            found.append(
                f"ifgmi.block_steps has {len(self.block_steps)} stages after the first, and the prior's generator has {prior.blocks} blocks: "
                f"give at most {prior.blocks - 1}"
            )
        return found

    def recipe(self, view: ModelView, prior: Prior, *, seed: int) -> Recipe:
        assert isinstance(prior.generator, StylePictures)  # as `problems` made sure
        network = prior.generator
        shown = view.straightened() if self.straight_through else view
        stages = [
            (Entrance(network, block, self.carry_rgb), steps)
            for block, steps in enumerate((self.steps, *self.block_steps))
        ]
        style = network.settings.w_dim

        def searched(number: int, rows: Tensor, labels: Tensor, draws: Tensor) -> SearchResult:
            """One stage, with an optimiser and random numbers of its own; those of the first are PPA's."""
            entrance, steps = stages[number]

            def objective(rows: Tensor, labels: Tensor, rng: RowRng) -> tuple[Tensor, Tensor]:
                value, sure = self.judged(shown, prior, entrance.paint(rows), labels, rng)
                return value / self.coupling, sure

            rng = RowRng.of(seed, f"search {number}" if number else "search", labels, draws)
            pace = self.pace(steps, entrance.within(self.radii[number]))
            return descend(
                shown, rows, labels, rng, objective, pace, batch_multiple=self.batch_multiple
            )

        def rated(pictures: Tensor, labels: Tensor, draws: Tensor) -> Tensor:
            return self.robust(view, pictures, labels, RowRng.of(seed, "rank", labels, draws))

        def search(state: Tensor, labels: Tensor, draws: Tensor) -> SearchResult:
            rows, steps, whole = (
                state,
                torch.zeros_like(labels),
                torch.ones_like(labels, dtype=torch.bool),
            )
            kept, score = state, torch.zeros(len(state), dtype=torch.double, device=state.device)
            for number, (entrance, _) in enumerate(stages):
                found = searched(number, rows, labels, draws)
                steps, whole = steps + torch.where(whole, found.steps, 0), whole & found.whole
                rows = found.state
                with torch.no_grad():
                    (pictures,) = run_padded(
                        view, lambda part, made=entrance: (made.paint(part).clamp(0, 1),), rows
                    )
                    ended = torch.cat([rows[:, :style], pictures.flatten(1)], dim=1)
                    if number + 1 < len(stages):
                        (rows,) = run_padded(
                            view, lambda part, made=entrance: (made.onward(part),), rows
                        )
                rating = rated(pictures, labels, draws) if self.stage == "confident" else score
                if number:  # a row that broke off has what it had before
                    better = (
                        whole & ((rating > score) | score.isnan())
                        if self.stage == "confident"
                        else whole
                    )
                    ended, rating = (
                        torch.where(better[:, None], ended, kept),
                        torch.where(better, rating, score),
                    )
                kept, score = ended, rating
            if self.trials and self.stage == "last":
                score = rated(show(kept, labels), labels, draws)
            return SearchResult(kept, steps, whole, score if self.trials else None)

        def show(latents: Tensor, labels: Tensor) -> Tensor:
            return latents[:, style:].unflatten(1, prior.image_shape).contiguous()

        return Recipe(super().recipe(view, prior, seed=seed).start, search, show=show, kept=style)
