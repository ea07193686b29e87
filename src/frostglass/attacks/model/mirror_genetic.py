"""MIRROR from scores alone: a genetic search."""

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from frostglass.attacks._search.box import Box
from frostglass.attacks._search.search import SearchResult
from frostglass.attacks._search.styled import StyleSpace, drawn_styles, style_scores
from frostglass.attacks.base import Attack, Recipe, attacks, run_padded
from frostglass.core.parameters import parameters
from frostglass.core.prior import Prior
from frostglass.core.views import Capability, ModelView
from frostglass.runtime.batching import padded_rows
from frostglass.runtime.seeding import generator_for

LEAST = 1e-45  # about the smallest probability in single precision, for logarithms


@attacks.register
@parameters
class MirrorGenetic(Attack):
    """MIRROR without gradients: from nothing but scores, breeds a population of styles of a ready-made StyleGAN.

    The population begins as the best of `pool` draws by p_y. In each generation the `elite` stays and all others are children: of two parents,
    drawn with chances in proportion to p_y, a child takes each coordinate of w from the first with probability p₁ / (p₁ + p₂); a tenth of the coordinates is moved by
    up to 0.1 standard deviations of p, the style before the last activation of the mapping network; and w is clamped to the box of `mirror`.

    Paper: An et al., MIRROR: Model Inversion for Deep Learning Network with High Fidelity, NDSS 2022.
    Differs: the published crossover takes the first parent with probability f₁ / (f₁ + f₂), f = ln p_y, and so prefers the worse one
        (`crossover = "published"`). One vector of noise serves all children of a published generation, which differ in where it applies; here each
        child has its own. The published elite is asked for again in each generation; its score is known. The box holds children only, as published: a draw of the prior that
        stays the elite may lie outside. A generator without a mapping network has no activation to undo: the box, the noise and ψ are then on its
        latents. Where no score is above 0, parents are drawn alike. One image per person is published; `candidates`, `survivors` and `keep` are additions.
        Published attackers see log-probabilities; probabilities of less than 1e-45 are all 0 here. MIBench maps mutants back with slope 0.5 instead of 0.2 and never enforces the upper side of the box.

    Args:
        pool: draws of the prior that populations begin from and that the box is taken of, scored once for all people; 100 000 published.
        population: styles in a generation; 1000 in the published script, 100 by default.
        generations: the most that are bred. stop: no more are for a person once the best p_y is at least this.
        elite: how many of the best stay as they are.
        crossover: "fitter" prefers the better parent, "published" the worse.
        mutation: the chance that a coordinate is moved. noise: how far at most, in standard deviations, either way.
        box: half the width of the box, in standard deviations.
        truncation: ψ, 0 to 1; all pictures are made of styles drawn towards their mean, in the first `cutoff` layers.
        cutoff: how many layers are truncated; 8 published.
        candidates: populations per person, from one beginning. survivors: how many of the best are read from each in the end.
        keep: how many of all these are returned, the highest p_y first.
        batch: pictures shown to the target together, rounded up to a multiple of 16; does not change the result.
        samples: passes through the target averaged at each look; above 1 it sees through the noise of defenses such as MID.
    """

    pool: Annotated[int, Field(ge=2)] = 100_000
    population: Annotated[int, Field(ge=2)] = 1000
    generations: Annotated[int, Field(ge=0)] = 100
    stop: Annotated[float, Field(gt=0, le=1)] = 0.95
    elite: Annotated[int, Field(ge=0)] = 1
    crossover: Literal["fitter", "published"] = "fitter"
    mutation: Annotated[float, Field(ge=0, le=1)] = 0.1
    noise: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.1
    box: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    truncation: Annotated[float, Field(ge=0, le=1)] = 0.7
    cutoff: Annotated[int, Field(ge=0)] = 8
    candidates: Annotated[int, Field(ge=1)] = 1
    survivors: Annotated[int, Field(ge=1)] = 1
    keep: Annotated[int, Field(ge=1)] = 1
    batch: Annotated[int, Field(ge=1)] = 256
    samples: Annotated[int, Field(ge=1)] = 1

    access: ClassVar[tuple[Capability, ...]] = ("scores",)

    def __post_init__(self) -> None:
        if self.pool < self.population:
            raise ValueError(f"pool ({self.pool}) must be at least population ({self.population})")
        if self.elite >= self.population:
            raise ValueError(
                f"elite ({self.elite}) must be less than population ({self.population})"
            )
        if self.survivors > self.population:
            raise ValueError(
                f"survivors ({self.survivors}) must not exceed population ({self.population})"
            )
        if self.keep > (most := self.candidates * self.survivors):
            raise ValueError(f"keep ({self.keep}) must not exceed candidates · survivors ({most})")

    @property
    def rows(self) -> int:
        return max(1, self.batch // self.population)

    @property
    def asked_once(self) -> int:
        return self.pool * self.samples

    def effort(self) -> tuple[str, int]:
        asked = (self.population - self.elite) * self.samples
        return (
            f"up to {self.generations} generations of {asked:,} queries",
            self.generations * asked,
        )

    def recipe(self, view: ModelView, prior: Prior, *, seed: int) -> Recipe:
        space = StyleSpace(prior, self.truncation, self.cutoff)
        pool = drawn_styles(space, self.pool, seed=seed)
        box = Box.around(space, pool, self.box)

        def start(labels: Tensor) -> Tensor:
            """Which of the pool make up each population, and what they are worth, (I, candidates, population, 2): their styles would fill the memory for many people."""
            worth = _worth(style_scores(view, space, pool, labels)).T
            places = worth.argsort(dim=1, descending=True, stable=True)[:, : self.population]
            chosen = torch.stack([places.double(), worth.gather(1, places)], dim=2)
            return chosen[:, None].expand(-1, self.candidates, -1, -1).to(pool.device)

        def search(chosen: Tensor, labels: Tensor, draws: Tensor) -> SearchResult:
            ends, steps = [], []
            for (places, worth), label, draw in zip(
                chosen.movedim(2, 1), labels.tolist(), draws.tolist(), strict=True
            ):
                first = pool[places.long()], worth.cpu()
                styles, generation = self._evolve(
                    view,
                    space,
                    box,
                    *first,
                    label,
                    generator_for(seed, "mirror_genetic", label, draw),
                )
                ends.append(styles)
                steps.append(generation)
            return SearchResult(
                torch.stack(ends),
                torch.tensor(steps).to(labels),
                torch.ones_like(labels, dtype=torch.bool),
            )

        return Recipe(
            start,
            search,
            read=lambda state, labels, draws: state,
            show=lambda styles, labels: space.paint(styles, truncate=True).clamp(0, 1),
        )

    def _evolve(
        self,
        view: ModelView,
        space: StyleSpace,
        box: Box,
        styles: Tensor,
        worth: Tensor,
        label: int,
        rng: torch.Generator,
    ) -> tuple[Tensor, int]:
        """The survivors of a population that begins as `styles` (population, size), worth (population,) p_y, and how many generations it took."""
        for generation in range(self.generations + 1):
            order = worth.argsort(descending=True, stable=True)
            styles, worth = styles[order.to(styles.device)], worth[order]
            if worth[0] >= self.stop or generation == self.generations:
                break
            children = self._children(box, styles, worth, rng)
            asked = self._asked(view, space, children, label)
            styles, worth = (
                torch.cat([styles[: self.elite], children]),
                torch.cat([worth[: self.elite], asked]),
            )
        return styles[: self.survivors], generation

    def _children(self, box: Box, styles: Tensor, worth: Tensor, rng: torch.Generator) -> Tensor:
        """All of the next generation but the elite; the rng are a CPU's, wherever the styles are."""
        count, size = len(styles) - self.elite, styles.shape[1]
        chances = worth if worth.any() else torch.ones_like(worth)
        first, second = torch.multinomial(chances, 2 * count, replacement=True, generator=rng).view(
            2, count
        )
        from_first, moved, length = (torch.rand(count, size, generator=rng) for _ in range(3))
        from_first = from_first < self._share(worth[first], worth[second])[:, None]
        parents = torch.where(from_first, first[:, None], second[:, None]).to(styles.device)
        children = styles.gather(0, parents)
        push = self.noise * (2 * length.to(styles) - 1) * box.std
        mutants = box.after(box.before(children) + push)
        return box.held(torch.where((moved < self.mutation).to(styles.device), mutants, children))

    def _share(self, first: Tensor, second: Tensor) -> Tensor:
        """The probability with which a child takes a coordinate from its first parent, by what its parents are worth."""
        if self.crossover == "published":
            first, second = first.clamp(min=LEAST).log(), second.clamp(min=LEAST).log()
        total = first + second
        return torch.where(total == 0, 0.5, first / torch.where(total == 0, 1, total))

    def _asked(self, view: ModelView, space: StyleSpace, styles: Tensor, label: int) -> Tensor:
        """p_y of styles."""

        def look(part: Tensor) -> tuple[Tensor]:
            with torch.no_grad():
                return (
                    view.scores(space.paint(part, truncate=True).clamp(0, 1))[:, label]
                    .double()
                    .cpu(),
                )

        return _worth(
            torch.cat(
                [
                    run_padded(view, look, part)[0]
                    for part in styles.split(len(padded_rows(self.batch)))
                ]
            )
        )


def _worth(scores: Tensor) -> Tensor:
    """Scores, of which those that are not finite are worth nothing."""
    return torch.where(scores.isfinite(), scores, 0)
