"""MIRROR from scores alone: a genetic search."""

from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from frostglass.attacks._search.box import Box
from frostglass.attacks._search.descent import brief_pool
from frostglass.attacks._search.fields import AtLeastOne, Count, Positive, Share, Weight
from frostglass.attacks._search.query_budget import scaled_down
from frostglass.attacks._search.runner import QueryAttack, Recipe, run_padded
from frostglass.attacks._search.search import SearchResult
from frostglass.attacks._search.styled import pool_styles, style_scores
from frostglass.attacks.base import attacks
from frostglass.core.assets import Assets
from frostglass.core.parameters import parameters
from frostglass.core.views import ModelView
from frostglass.priors._style_space import StyleSpace
from frostglass.runtime.batching import padded_rows
from frostglass.runtime.seeding import generator_for

LEAST = 1e-45  # about the smallest probability in single precision, for logarithms


@attacks.register
@parameters
class MirrorGenetic(QueryAttack):
    """MIRROR without gradients: breeds a population of a StyleGAN's styles, from scores alone.

    The population begins as the best of `pool` draws by p_y. In each generation the `elite` stays
    and all others are children: of two parents, drawn with probabilities in proportion to p_y, a
    child takes each coordinate of w from the first with probability p₁ / (p₁ + p₂); a tenth of the
    coordinates is moved by up to 0.1 standard deviations of p, the style before the last activation
    of the mapping network; and w is clamped to the box of `mirror`.

    Use: the attacker sees scores and no gradients, as behind an interface.
    Paper: An et al., MIRROR: Model Inversion for Deep Learning Network with High Fidelity, NDSS
        2022.
    Differs: the published crossover takes the first parent with probability f₁ / (f₁ + f₂), f = ln
        p_y, and so prefers the worse one (`crossover = "published"`). One vector of noise serves
        all children of a published generation, which differ in where it applies; here each child
        has its own. The published elite is queried again in each generation; its score is known.
        The box bounds children only, as published: a draw of the prior that stays the elite may lie
        outside. A generator without a mapping network has no activation to undo: the box, the noise
        and ψ are then on its latents. Where no score is above 0, parents are drawn uniformly. One
        image per person is published; `candidates`, `survivors` and `keep` are additions. Published
        attackers see log-probabilities; probabilities of less than 1e-45 are all 0 here. MIBench
        maps mutants back with slope 0.5 instead of 0.2 and never enforces the upper side of the
        box.

    Args:
        pool: draws of the prior that populations begin from and that the box is taken from, scored
            once for all people; 100 000 published.
        population: styles in a generation; 1000 in the published script, 100 by default.
        generations: the most that are bred.
        stop: a population stops early once its best p_y is at least this.
        elite: number of best styles that stay as they are.
        crossover: "fitter" prefers the better parent, "published" the worse.
        mutation: the probability that a coordinate is moved.
        noise: how far at most, in standard deviations, either way.
        box: half the width of the box, in standard deviations.
        truncation: ψ, 0 to 1, how far styles are from the mean style.
        cutoff: number of truncated layers; 8 published.
        candidates: populations per person, from one beginning.
        survivors: number of best styles read from each in the end.
        keep: the highest p_y comes first.
    """

    title = "MIRROR (genetic)"
    reads_name: ClassVar[str] = "survivors"

    pool: Annotated[int, Field(ge=2)] = 100_000
    population: Annotated[int, Field(ge=2)] = 1000
    generations: Count = 100
    stop: Annotated[float, Field(gt=0, le=1)] = 0.95
    elite: Count = 1
    crossover: Literal["fitter", "published"] = "fitter"
    mutation: Share = 0.1
    noise: Weight = 0.1
    box: Positive = 1.0
    truncation: Share = 0.7
    cutoff: Count = 8
    survivors: AtLeastOne = 1

    def __post_init__(self) -> None:
        population = f"population ({self.population})"
        if self.pool < self.population:
            raise ValueError(f"pool ({self.pool}) must be at least {population}")
        if self.elite >= self.population:
            raise ValueError(f"elite ({self.elite}) must be less than {population}")
        if self.survivors > self.population:
            raise ValueError(f"survivors ({self.survivors}) must not exceed {population}")
        super().__post_init__()

    @property
    def access(self) -> tuple[str, ...]:
        return ("scores",)

    @property
    def reads(self) -> int:
        return self.survivors

    @property
    def rows(self) -> int:
        return max(1, self.batch // self.population)

    @property
    def start_draws(self) -> int:
        return self.pool

    @property
    def search_effort(self) -> tuple[str, int]:
        images = (self.population - self.elite) * self.samples
        return f"{self.generations:,} generations of {images:,} images", self.generations * images

    def brief_counts(self, candidates: int) -> dict[str, Any]:
        population = brief_pool(self.population, max(self.elite + 1, self.survivors))
        return {
            "generations": min(1, self.generations),
            "population": population,
            "pool": brief_pool(self.pool, population),
        }

    def scaled_counts(self, share: float) -> dict[str, Any]:
        return {
            "generations": scaled_down(self.generations, share),
            "pool": scaled_down(self.pool, share, self.population),
        }

    def recipe(self, view: ModelView, assets: Assets, *, seed: int) -> Recipe:
        prior = assets.require_prior()
        space = StyleSpace(prior, self.truncation, self.cutoff)
        pool = pool_styles(space, self.pool, seed=seed)
        box = Box.around(space, pool, self.box)

        def start(labels: Tensor) -> Tensor:
            """Return indices into the pool and fitness, (I, candidates, population, 2).

            The styles themselves would fill the memory for many people.
            """
            fitness = _fitness(style_scores(view, space, pool, labels, batch=self.batch)).T
            places = fitness.argsort(dim=1, descending=True, stable=True)[:, : self.population]
            chosen = torch.stack([places.double(), fitness.gather(1, places)], dim=2)
            return chosen[:, None].expand(-1, self.candidates, -1, -1).to(pool.device)

        def search(chosen: Tensor, labels: Tensor, draws: Tensor) -> SearchResult:
            ends, steps = [], []
            for (places, fitness), label, draw in zip(
                chosen.movedim(2, 1), labels.tolist(), draws.tolist(), strict=True
            ):
                rng = generator_for(seed, "mirror_genetic", label, draw)
                styles, generation = self._evolve(
                    view, space, box, pool[places.long()], fitness.cpu(), label, rng
                )
                ends.append(styles)
                steps.append(generation)
            finished = torch.ones_like(labels, dtype=torch.bool)
            return SearchResult(torch.stack(ends), torch.tensor(steps).to(labels), finished)

        return Recipe(
            start,
            search,
            read=lambda state, labels, draws: state,
            show=lambda styles, labels: space.images(styles, truncate=True).clamp(0, 1),
        )

    def _evolve(
        self,
        view: ModelView,
        space: StyleSpace,
        box: Box,
        styles: Tensor,
        fitness: Tensor,
        label: int,
        rng: torch.Generator,
    ) -> tuple[Tensor, int]:
        """Return the survivors of a population (population, size) and the generations it took."""
        for generation in range(self.generations + 1):
            order = fitness.argsort(descending=True, stable=True)
            styles, fitness = styles[order.to(styles.device)], fitness[order]
            if fitness[0] >= self.stop or generation == self.generations:
                break
            children = self._children(box, styles, fitness, rng)
            scores = self._scores(view, space, children, label)
            styles = torch.cat([styles[: self.elite], children])
            fitness = torch.cat([fitness[: self.elite], scores])
        return styles[: self.survivors], generation

    def _children(self, box: Box, styles: Tensor, fitness: Tensor, rng: torch.Generator) -> Tensor:
        """Return the next generation without the elite; `rng` is a CPU's on any device."""
        count, size = len(styles) - self.elite, styles.shape[1]
        chances = fitness if fitness.any() else torch.ones_like(fitness)
        parents = torch.multinomial(chances, 2 * count, replacement=True, generator=rng)
        first, second = parents.view(2, count)
        from_first, moved, length = (torch.rand(count, size, generator=rng) for _ in range(3))
        from_first = from_first < self._first_share(fitness[first], fitness[second])[:, None]
        parents = torch.where(from_first, first[:, None], second[:, None]).to(styles.device)
        children = styles.gather(0, parents)
        push = self.noise * (2 * length.to(styles) - 1) * box.std
        mutants = box.after(box.before(children) + push)
        return box.clamp(torch.where((moved < self.mutation).to(styles.device), mutants, children))

    def _first_share(self, first: Tensor, second: Tensor) -> Tensor:
        """Return the probability of taking a coordinate from the first parent, by fitness."""
        if self.crossover == "published":
            first, second = first.clamp(min=LEAST).log(), second.clamp(min=LEAST).log()
        total = first + second
        return torch.where(total == 0, 0.5, first / torch.where(total == 0, 1, total))

    def _scores(self, view: ModelView, space: StyleSpace, styles: Tensor, label: int) -> Tensor:
        """Query p_y of styles."""

        def look(part: Tensor) -> tuple[Tensor]:
            with torch.no_grad():
                images = space.images(part, truncate=True).clamp(0, 1)
                return (view.scores(images)[:, label].double().cpu(),)

        parts = styles.split(len(padded_rows(self.batch)))
        return _fitness(torch.cat([run_padded(view, look, part)[0] for part in parts]))


def _fitness(scores: Tensor) -> Tensor:
    """Replace scores that are not finite by 0."""
    return torch.where(scores.isfinite(), scores, 0)
