"""Repel: searches in rounds that keep away from the people whom earlier rounds found."""

import math
from typing import Any

from torch import Tensor

from frostglass.attacks._search.chained import ChainedAttack, Round
from frostglass.attacks._search.fields import Weight
from frostglass.attacks._search.likeness import Likeness
from frostglass.attacks._search.runner import Recipe
from frostglass.attacks._search.search import SearchResult
from frostglass.attacks.base import attacks
from frostglass.core.assets import Asset, Assets
from frostglass.core.parameters import parameters
from frostglass.core.views import ModelView


@attacks.register
@parameters
class Repel(ChainedAttack):
    """Lists the people a class accepts: each round keeps away from what earlier rounds found.

    Searches as `base` does, in rounds. From the second round on, an image x also costs w · max over
    f of max(0, 1 - ‖e(x) - e(f)‖ / √2), where f are the images that earlier rounds of the chain
    found and e is the embedding, of length 1, by an embedder of public people. This is w for the
    same person and 0 from a cosine of 0 on; unlike the cosine, it has a gradient near f too. The
    searches of one round do not repel one another.

    Use: as `modes`, where searches from many starts all end at the same person.
    Paper: none; our attack on a class that was trained on decoys besides its person.

    Args:
        repulsion: w, in the units of the base's whole loss.
    """

    title = "Repel"

    repulsion: Weight = 20.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.base_attack.steerable:
            raise ValueError(self.not_steerable("repulsion adds a loss"))

    @property
    def needs(self) -> frozenset[Asset]:
        return super().needs | {"embedder"}

    def prepare(self, view: ModelView, assets: Assets, *, seed: int) -> Likeness:
        return Likeness(assets)

    def search_round(self, recipe: Recipe, given: Any, each: Round) -> SearchResult:
        likeness: Likeness = given
        if each.found is None:
            return recipe.search(each.state, each.labels, each.draws)
        earlier = likeness.embed_rows(each.found.flatten(0, 1))
        earlier = earlier.unflatten(0, each.found.shape[:2])

        def repelled(images: Tensor, rows: Tensor) -> Tensor:
            mine = earlier[rows // each.searches]
            gaps = (likeness.embed(images)[:, None] - mine).norm(dim=2).amin(1)
            return self.repulsion * (1 - gaps / math.sqrt(2)).clamp(min=0)

        return recipe.search(each.state, each.labels, each.draws, repelled)
