"""An attack from outside: keep the best of many draws of the prior."""

import time
from dataclasses import replace
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from frostglass import (
    Assets,
    Attack,
    AuditSize,
    Budget,
    ModelView,
    Reconstructions,
    Work,
    parameters,
)
from frostglass.core.assets import Asset

CHUNK = 64  # draws scored together


@parameters
class RandomSearch(Attack):
    """Random search: for each person, the draw of the prior that the target likes best.

    Args:
        iterations: batches of 64 draws, scored once for all people.
    """

    iterations: Annotated[int, Field(ge=1)] = 50

    title: ClassVar[str] = "Random search"
    surface = "model"

    @property
    def access(self) -> tuple[str, ...]:
        return ("scores",)

    @property
    def kept(self) -> int:
        return 1

    @property
    def needs(self) -> frozenset[Asset]:
        return frozenset({"prior"})

    def budget(self, size: AuditSize) -> Budget:
        return Budget(f"{self.iterations} × {CHUNK} draws", evaluations=self.iterations * CHUNK)

    def brief(self) -> "RandomSearch":
        return replace(self, iterations=min(2, self.iterations))

    def run(
        self, view: ModelView, assets: Assets, people: Tensor, *, seed: int, work: Work
    ) -> Reconstructions:
        began, prior = time.perf_counter(), assets.require_prior()
        rng = torch.Generator().manual_seed(seed)
        best = torch.full((len(people),), -1.0)
        images = torch.zeros(len(people), *prior.image_shape)
        latents = torch.zeros(len(people), prior.latent)
        for iteration in range(self.iterations):
            z = prior.draw(*[rng] * CHUNK)
            with torch.no_grad():
                drawn = prior.images(z)
                scores, index = view.scores(drawn)[:, people.to(drawn.device)].cpu().max(0)
            better = scores > best
            best = torch.where(better, scores, best)
            images[better], latents[better] = drawn.cpu()[index[better]], z.cpu()[index[better]]
            work.progress(iteration + 1, self.iterations)
        seconds = time.perf_counter() - began
        return Reconstructions(
            images[:, None], people, latents[:, None], best[:, None], view.queries, seconds
        )
