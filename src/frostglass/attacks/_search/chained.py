"""The base of attacks that search in rounds, each of which knows what earlier ones found."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from frostglass.attacks._search.fields import AtLeastOne
from frostglass.attacks._search.runner import Recipe
from frostglass.attacks._search.search import SearchResult
from frostglass.attacks._search.select import Candidates, in_order
from frostglass.attacks._search.wrapped import GroupedAttack
from frostglass.core.assets import Assets
from frostglass.core.parameters import parameters
from frostglass.core.prior import Prior
from frostglass.core.views import ModelView
from frostglass.runtime.batching import padded_rows


@dataclass(frozen=True)
class Round:
    """The searches of one round for N chains, S for each, and the images of earlier rounds.

    `state` (N · S, ...), `labels` and `draws` (N · S,) are what the base's search takes; `found`
    (N, F, C, H, W) are the images that earlier rounds of each chain found, None in the first.
    """

    state: Tensor
    labels: Tensor
    draws: Tensor
    found: Tensor | None
    searches: int


@parameters
class ChainedAttack(GroupedAttack):
    """Base of the attacks that search for one person in rounds, which together are a chain.

    Chains are independent of each other, so the result for a person depends on nobody else. The
    best image of each round comes first in the ranking, the round with the best one first; then the
    other images, in the order of the base.

    Args:
        rounds: rounds of searches, one after the other.
        searches: a round is such a group.
        candidates: each is a chain.
    """

    rounds: AtLeastOne = 5
    searches: AtLeastOne = 3
    candidates: AtLeastOne = 1

    reads_name: ClassVar[str] = "rounds · searches"

    @abstractmethod
    def search_round(self, recipe: Recipe, given: Any, each: Round) -> SearchResult:
        """Search one round; `given` is what `prepare` returned."""

    @abstractmethod
    def prepare(self, view: ModelView, assets: Assets, *, seed: int) -> Any:
        """Return what all rounds use, made before anything is searched."""

    def begin(self, view: ModelView, given: Any) -> None:
        """Ask the target what all rounds need; called once, when starts are chosen."""
        return

    @property
    def searches_each(self) -> int:
        return self.candidates * self.rounds * self.searches

    @property
    def reads(self) -> int:
        return self.rounds * self.searches * self.base_attack.reads

    @property
    def search_effort(self) -> tuple[str, int]:
        words, images = self.base_attack.search_effort
        words = f"{self.rounds} rounds of {self.searches} × {words}"
        return words, images * self.rounds * self.searches

    @property
    def surrogate_images(self) -> int:
        return self.rounds * self.searches * self.base_attack.surrogate_images

    def recipe(self, view: ModelView, assets: Assets, *, seed: int) -> Recipe:
        base, prior = self.base_attack.recipe(view, assets, seed=seed), assets.require_prior()
        given = self.prepare(view, assets, seed=seed)
        every = range(self.rounds * self.searches)

        def start(labels: Tensor) -> Tensor:
            self.begin(view, given)
            # The best starts are for the first round.
            return base.start(labels).unflatten(1, (len(every), self.candidates)).transpose(1, 2)

        def numbers(draws: Tensor, chosen: range) -> Tensor:
            """Number the base's searches `chosen` of chains, as the base does, (N · chosen,)."""
            places = torch.tensor(chosen, device=draws.device)
            return (places * self.candidates + draws[:, None]).flatten()

        def search(state: Tensor, labels: Tensor, draws: Tensor) -> SearchResult:
            results: list[SearchResult] = []
            found: Tensor | None = None
            for chosen in (every[i : i + self.searches] for i in every[:: self.searches]):
                part = state[:, chosen.start : chosen.stop].flatten(0, 1)
                each = labels.repeat_interleave(self.searches)
                drawn = numbers(draws, chosen)
                result = self.search_round(
                    base, given, Round(part, each, drawn, found, self.searches)
                )
                images = _images(base, prior, result.state, each, drawn)
                images = images.unflatten(0, (len(state), -1))
                found = images if found is None else torch.cat([found, images], dim=1)
                results.append(result)
            return self._joined(results)

        def read(state: Tensor, labels: Tensor, draws: Tensor) -> Tensor:
            each = labels.repeat_interleave(len(every))
            latents = base.read(state.flatten(0, 1), each, numbers(draws, every))
            return latents.unflatten(0, (-1, len(every))).flatten(1, 2)

        def select(candidates: Candidates) -> Tensor:
            return self._best_of_rounds_first(base.select(candidates), candidates.score)

        return Recipe(start, search, read, base.show, base.bonus, select, base.latent_size)

    def _joined(self, results: list[SearchResult]) -> SearchResult:
        """Join the results of all rounds, with a value for each image that is read."""

        def states(state: Tensor) -> Tensor:
            return state.unflatten(0, (-1, self.searches))

        def per_read(column: Tensor) -> Tensor:
            if column.ndim == 1:
                column = column[:, None].expand(-1, self.base_attack.reads)
            return column.unflatten(0, (-1, self.searches)).flatten(1)

        def traced(trace: Tensor) -> Tensor:
            each = trace[:, None].expand(-1, self.base_attack.reads, -1, -1)
            return each.unflatten(0, (-1, self.searches)).flatten(1, 2)

        scores = [per_read(result.score) for result in results if result.score is not None]
        traces = [traced(result.trace) for result in results if result.trace is not None]
        return SearchResult(
            torch.cat([states(result.state) for result in results], dim=1),
            torch.cat([per_read(result.steps) for result in results], dim=1),
            torch.cat([per_read(result.finished) for result in results], dim=1),
            torch.cat(scores, dim=1) if scores else None,
            torch.cat(traces, dim=1) if traces else None,
        )

    def _best_of_rounds_first(self, order: Tensor, score: Tensor) -> Tensor:
        """Move the first image of each round, if its search finished, to the front of an order."""
        rounds = order // (self.searches * self.base_attack.reads)
        same = rounds[:, :, None] == rounds[:, None, :]
        leads = ~same.tril(-1).any(2) & in_order(order, score).isfinite()
        return in_order((~leads).byte().argsort(dim=1, stable=True), order)


def _images(recipe: Recipe, prior: Prior, state: Tensor, labels: Tensor, draws: Tensor) -> Tensor:
    """Return the images of searched rows (N · D, C, H, W), D of each, whatever the batch is."""
    with torch.no_grad():
        latents = recipe.read(state, labels, draws)
        each = labels.repeat_interleave(latents.shape[1])
        rows = padded_rows(len(each)).to(each.device)
        images = (recipe.show or prior.images)(latents.flatten(0, 1)[rows], each[rows])
    return images[: len(each)]
