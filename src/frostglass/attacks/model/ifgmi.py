"""IF-GMI: inversion through the maps between a generator's blocks."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from frostglass.attacks._search.augmented import LOMMA, NEWER, SUBTRACT
from frostglass.attacks._search.ball import project_l1
from frostglass.attacks._search.descent import ADAPTIVE, PUBLISHED
from frostglass.attacks._search.fields import AtLeastOne, Count
from frostglass.attacks._search.query_budget import scaled_down
from frostglass.attacks._search.row_rng import RowRng
from frostglass.attacks._search.runner import Recipe, run_padded
from frostglass.attacks._search.search import SearchResult, descend
from frostglass.attacks.base import attacks
from frostglass.attacks.model.ppa import Ppa
from frostglass.core.assets import Assets
from frostglass.core.method import Variants
from frostglass.core.parameters import parameters
from frostglass.core.prior import Prior
from frostglass.core.views import ModelView
from frostglass.priors.stylegan2 import StyleImages

Radius = Annotated[float, Field(gt=0)]


@dataclass(frozen=True)
class Entrance:
    """What one stage searches: a style and, from block 1 on, the maps that enter a block.

    A row holds the style, the maps, and the image that the blocks before have painted, which has no
    gradient and stays as it is. At block 0 it holds the style alone, without `carry_rgb` no image.
    """

    network: StyleImages
    block: int
    carry_rgb: bool = True

    @property
    def parts(self) -> list[int]:
        """Lengths of style, maps and image in a row."""
        settings = self.network.settings
        if not self.block:
            return [settings.w_dim, 0, 0]
        side = settings.sizes[self.block - 1]
        image = settings.colours * side**2 if self.carry_rgb else 0
        return [settings.w_dim, settings.width(side) * side**2, image]

    def images(self, rows: Tensor) -> Tensor:
        """Generate images of rows, differentiably; not clamped to [0, 1]."""
        network = self.network
        return network.in_parts(lambda part: network.framed(self._run(part, None)[1]), rows)

    def next_rows(self, rows: Tensor) -> Tensor:
        """Return the rows that enter the next block."""

        def make(part: Tensor) -> Tensor:
            maps, rgb = self._run(part, self.block + 1)
            painted = [rgb.flatten(1)] if self.carry_rgb else []
            return torch.cat([part[:, : self.parts[0]], maps.flatten(1), *painted], dim=1)

        return self.network.in_parts(make, rows)

    def within(self, radius: float) -> Callable[[Tensor, Tensor], Tensor]:
        """Return a projection of style and maps, each onto an L1 ball around its start."""

        def project(rows: Tensor, start: Tensor) -> Tensor:
            style, maps, rgb = (rows - start).split(self.parts, dim=1)
            bounded = (style, maps) if self.block else (style,)
            moved = torch.cat([*(project_l1(part, radius) for part in bounded), rgb], dim=1)
            # Rows inside keep their last bit.
            return torch.where(moved == rows - start, rows, start + moved)

        return project

    def _run(self, rows: Tensor, to_block: int | None) -> tuple[Tensor, Tensor]:
        settings, synthesis = self.network.settings, self.network.network.synthesis
        style, maps, rgb = rows.split(self.parts, dim=1)
        ws = style[:, None].expand(-1, settings.num_ws, -1)
        if not self.block:
            features, none = synthesis.begin(ws)
            return synthesis.run(ws, features=features, rgb=none, to_block=to_block)
        side = settings.sizes[self.block - 1]
        painted = None
        if self.carry_rgb:
            painted = rgb.detach().unflatten(1, (-1, side, side))
            painted = painted.contiguous(memory_format=torch.channels_last)
        return synthesis.run(
            ws,
            features=maps.unflatten(1, (-1, side, side)),
            rgb=painted,
            from_block=self.block,
            to_block=to_block,
            carry_rgb=self.carry_rgb,
        )


@attacks.register
@parameters
class Ifgmi(Ppa):
    """Intermediate features: PPA's search, continued in the maps between a StyleGAN's blocks.

    Stage 0 searches the style w as PPA does. Stage i then searches w and the maps h_i that enter
    block i, where h_{i+1} is block i's output for the w and h_i that were found. After each step w
    and h_i are projected onto the L1 balls ‖w - w⁰‖₁ ≤ r_i, ‖h_i - h_i⁰‖₁ ≤ r_i around the stage's
    start.

    Use: the weights are released and there is a StyleGAN2 of such faces; the strongest attack on
        the embedded faces.
    Paper: Qiu et al., A Closer Look at GAN Priors: Exploiting Intermediate Features for Enhanced
        Model Inversion Attacks, ECCV 2024, arXiv 2407.13863.
    Differs: the published code enters a later block with an empty image, so that all that earlier
        blocks have painted is missing and images jump between stages; `carry_rgb` false does the
        same. The published image of a stage is that before its last step, here it is that after it.
        The published script scores all stages with the evaluator and reports the best one; here the
        stage is fixed in advance, or chosen by the target. Published are all candidates; so they
        are here by default, and `trials` with a lower `keep` selects. Otherwise as PPA. The ball of
        w never binds at the published radii: Adam moves a coordinate by at most lr a step.

    Args:
        steps: of stage 0, published 50 for FaceScrub, 70 for CelebA, 100 for dogs.
        milestones: as in PPA, counted anew in each stage; none published.
        block_steps: steps of the stages at blocks 1, 2, ...; published 10 or 25 at each of up to 7
            blocks, 4 blocks are 32 pixels.
        radii: r_i for each stage, that of stage 0 first.
        carry_rgb: keep what earlier blocks have painted.
        stage: whose image is kept: "last", or "confident", for each candidate that with the highest
            mean p_y over the trials.
        trials: as in PPA; 0 keeps the best target margins.
        batch: images searched together. Each holds its maps about eight times, up to 34 MB each
            time at 1024 pixels.
    """

    title = "IF-GMI"
    variants: ClassVar[Variants] = {**PUBLISHED, **LOMMA, **SUBTRACT, **ADAPTIVE, **NEWER}

    candidates: AtLeastOne = 50
    trials: Count = 0
    batch: AtLeastOne = 16
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
        if self.w_plus:
            raise ValueError("ifgmi searches one style for all layers: set w_plus to false")
        if self.stage == "confident" and not self.trials:
            raise ValueError(
                'stage "confident" compares images by trials: set trials to 1 or more, 100 as in '
                "PPA"
            )

    @property
    def steerable(self) -> bool:
        return False  # its stages have searches of their own

    @property
    def all_steps(self) -> int:
        return self.steps + sum(self.block_steps)

    @property
    def search_effort(self) -> tuple[str, int]:
        steps = (self.steps, *self.block_steps)
        trials = self.trials * (len(steps) if self.stage == "confident" else 1)
        words = f"{' + '.join(map(str, steps))} steps"
        if self.samples > 1 and self.asks:
            words += f" of {self.samples} images"
        words += " on students" * (not self.asks)
        words += f" + {trials} trials" if trials else ""
        images = (self.all_steps * self.asks + trials) * self.samples
        return f"({words})" if "+" in words else words, images

    def brief_counts(self, candidates: int) -> dict[str, Any]:
        block_steps = tuple(min(1, steps) for steps in self.block_steps)
        return super().brief_counts(candidates) | {"block_steps": block_steps}

    def scaled_counts(self, share: float) -> dict[str, Any]:
        scaled = super().scaled_counts(share)
        if self.asks:
            scaled["block_steps"] = tuple(scaled_down(steps, share) for steps in self.block_steps)
        return scaled

    def prior_problems(self, prior: Prior) -> list[str]:
        problems = super().prior_problems(prior)
        if not prior.blocks:
            problems.append(
                "ifgmi searches the maps between the blocks of a StyleGAN2, but this prior's "
                "generator has none: use a stylegan2 prior, or ppa"
            )
        elif len(self.block_steps) >= prior.blocks:
            problems.append(
                f"ifgmi.block_steps must have at most {prior.blocks - 1} stages, because the "
                f"prior's generator has {prior.blocks} blocks, got {len(self.block_steps)}: "
                "shorten it"
            )
        return problems

    def recipe(self, view: ModelView, assets: Assets, *, seed: int) -> Recipe:
        prior = assets.require_prior()
        network = prior.generator
        assert isinstance(network, StyleImages)  # as `prior_problems` checks
        style = network.settings.w_dim

        stages = _Stages(self, view, prior, network, seed)

        def show(latents: Tensor, labels: Tensor) -> Tensor:
            return latents[:, style:].unflatten(1, prior.image_shape).contiguous()

        plain = super().recipe(view, assets, seed=seed)
        return Recipe(plain.start, stages.search, show=show, bonus=plain.bonus, latent_size=style)


@dataclass(frozen=True)
class _Stages:
    """The stages of one attack, bound to a view and a prior."""

    attack: Ifgmi
    view: ModelView
    prior: Prior
    network: StyleImages
    seed: int
    alike: dict[int, dict[int, bool]] = field(default_factory=lambda: defaultdict(dict))

    def search(self, state: Tensor, labels: Tensor, draws: Tensor) -> SearchResult:
        """Search all stages in turn; the state of a result is (style, image) of each row."""
        attack, view, rows = self.attack, self.view, state
        by_trials = attack.stage == "confident"
        steps, finished = torch.zeros_like(labels), torch.ones_like(labels, dtype=torch.bool)
        kept, score = state, torch.zeros(len(state), dtype=torch.double, device=state.device)
        traces = []
        for number in range(1 + len(attack.block_steps)):
            entrance = Entrance(self.network, number, attack.carry_rgb)
            result = self._stage(entrance, rows, labels, draws)
            steps = steps + torch.where(finished, result.steps, 0)
            traces += [] if result.trace is None else [result.trace]
            finished, rows = finished & result.finished, result.state
            with torch.no_grad():
                images = _padded(view, entrance.images, rows).clamp(0, 1)
                ended = torch.cat([rows[:, : entrance.parts[0]], images.flatten(1)], dim=1)
                if number < len(attack.block_steps):
                    rows = _padded(view, entrance.next_rows, rows)
            rating = self._robustness(images, labels, draws) if by_trials else score
            if number:  # an unfinished row keeps the image of the stage before
                better = finished & ((rating > score) | score.isnan()) if by_trials else finished
                ended = torch.where(better[:, None], ended, kept)
                rating = torch.where(better, rating, score)
            kept, score = ended, rating
        if attack.trials and not by_trials:
            images = kept[:, entrance.parts[0] :].unflatten(1, self.prior.image_shape).contiguous()
            score = self._robustness(images, labels, draws)
        trace = torch.cat(traces, dim=1) if traces else None
        return SearchResult(kept, steps, finished, score if attack.trials else None, trace)

    def _stage(
        self, entrance: Entrance, rows: Tensor, labels: Tensor, draws: Tensor
    ) -> SearchResult:
        """Search one stage, with its own optimiser and random numbers; PPA's in the first."""
        attack, number = self.attack, entrance.block
        shown = self.view.straightened() if attack.straight_through else self.view

        def objective(rows: Tensor, labels: Tensor, rng: RowRng) -> tuple[Tensor, Tensor]:
            images = entrance.images(rows)
            value, sure = attack.weighted_loss(shown, self.prior, images, labels, rng)
            return value / attack.coupling, sure

        rng = RowRng.of(self.seed, f"search {number}" if number else "search", labels, draws)
        steps = (attack.steps, *attack.block_steps)[number]
        settings = attack.settings(steps, entrance.within(attack.radii[number]))
        return descend(
            shown,
            rows,
            labels,
            rng,
            objective,
            settings,
            batch_multiple=attack.batch_multiple,
            alike=self.alike[number],
        )

    def _robustness(self, images: Tensor, labels: Tensor, draws: Tensor) -> Tensor:
        rng = RowRng.of(self.seed, "rank", labels, draws)
        return self.attack.robustness(self.view, self.prior, images, labels, rng)


def _padded(view: ModelView, make: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    (result,) = run_padded(view, lambda part: (make(part),), rows)
    return result
