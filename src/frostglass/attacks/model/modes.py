"""Modes: the distinct people that a class accepts, found by clustering many searches."""

from dataclasses import replace
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from frostglass.attacks._search.fields import AtLeastOne
from frostglass.attacks._search.likeness import Likeness, people_among
from frostglass.attacks._search.runner import Recipe
from frostglass.attacks._search.select import Candidates
from frostglass.attacks._search.wrapped import WrappedAttack
from frostglass.attacks.base import attacks
from frostglass.core.assets import Asset, Assets
from frostglass.core.parameters import parameters
from frostglass.core.views import ModelView

Cosine = Annotated[float, Field(gt=-1, lt=1)]


@attacks.register
@parameters
class Modes(WrappedAttack):
    """Lists the distinct people that a class accepts: clusters the results of many searches.

    Searches as `base` does, `candidates` times for each person. Embeddings e(x) of the results by
    an embedder of public people are joined by average linkage while the mean cosine of two clusters
    is at least `similarity`. Clusters are ranked, and the medoid of each, the image with the
    largest mean cosine to the rest of its cluster, is one guess. If there are fewer clusters than
    `keep`, the other images follow in the order of the base.

    Use: a class may hold several people, as with `decoys`, and the attacker has several guesses.
    Paper: none; our attack on a class that was trained on decoys besides its person, where single
        searches end at one of several people.

    Args:
        similarity: cosine from which two clusters count as one person.
        order: the ranking of clusters: "size" (the base's best first among equals), "best", by the
            best image of each, as the base ranks images, or "quiet", the other way round: for a
            model that was trained to be less sure of the person than of decoys.
        candidates: 10 to 30 find most of a handful of people.
    """

    title = "Modes"

    similarity: Cosine = 0.5
    order: Literal["size", "best", "quiet"] = "size"
    candidates: AtLeastOne = 20

    @property
    def needs(self) -> frozenset[Asset]:
        return super().needs | {"embedder"}

    def recipe(self, view: ModelView, assets: Assets, *, seed: int) -> Recipe:
        recipe, likeness = self.base_attack.recipe(view, assets, seed=seed), Likeness(assets)

        def select(candidates: Candidates) -> Tensor:
            order, images = recipe.select(candidates), candidates.images
            embeddings = likeness.embed_rows(images.flatten(0, 1)).unflatten(0, images.shape[:2])
            rows = []
            for ranking, score, each in zip(order, candidates.score, embeddings, strict=True):
                finished = ranking[score[ranking].isfinite()]
                guesses = finished[self._people(each[finished]).to(finished.device)]
                rows.append(torch.cat([guesses, ranking[~torch.isin(ranking, guesses)]]))
            return torch.stack(rows)

        return replace(recipe, select=select)

    def _people(self, embeddings: Tensor) -> Tensor:
        """Return the medoid of each cluster of embeddings, which are in the order of the base."""
        cosines = (embeddings @ embeddings.T).cpu().double()
        cosines = (cosines + cosines.T) / 2  # products may round the two halves apart
        cosines.fill_diagonal_(0)
        groups = people_among(cosines, self.similarity).tolist()
        clusters = [
            [row for row, group in enumerate(groups) if group == number]
            for number in sorted(set(groups))
        ]
        ranks = {
            "size": lambda rows: (-len(rows), rows[0]),
            "best": lambda rows: rows[0],
            "quiet": lambda rows: -rows[0],
        }
        clusters.sort(key=ranks[self.order])
        medoids = [rows[int(cosines[rows][:, rows].sum(1).argmax())] for rows in clusters]
        return torch.tensor(medoids, dtype=torch.long)
