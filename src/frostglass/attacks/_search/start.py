"""Initial latents, drawn by derived seeds: no draw depends on batches, shards or restarts."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from frostglass.core.objective import class_margins
from frostglass.core.prior import Prior
from frostglass.core.views import ModelView
from frostglass.runtime.batching import padded_rows
from frostglass.runtime.device import device_of
from frostglass.runtime.seeding import generator_for

Bonus = Callable[[Tensor], Tensor]  # from images (N, ...) to a score for each class, (N, K)
POOL_CHUNK = 256  # draws that are scored together at most
MOST_PARTS = 16  # of a pool, each made by one process


def pool_chunk(batch: int) -> int:
    """Return how many draws of a pool are scored together: as many as a search shows at once."""
    return min(POOL_CHUNK, len(padded_rows(batch)))


def scored(
    view: ModelView, draws: Tensor, score: Callable[[Tensor], Tensor], *, batch: int
) -> Tensor:
    """Return the scores of a pool of draws (P, ...), by `score` of as many as are shown together.

    Processes of a run share the work in parts of whole chunks: no draw's company depends on them.
    """
    chunks = draws.split(pool_chunk(batch))
    size = math.ceil(len(chunks) / MOST_PARTS)

    def part(number: int) -> Tensor:
        with torch.no_grad():
            own = chunks[number * size : (number + 1) * size]
            return torch.cat([score(chunk).cpu() for chunk in own])

    return torch.cat(view.in_parts(math.ceil(len(chunks) / size), part))


def fresh(prior: Prior, labels: Tensor, candidates: int, *, seed: int, purpose: str) -> Tensor:
    """Draw independent latents (I, K, latent), each seeded by its label and candidate number."""

    def of(label: int) -> Tensor:
        return prior.draw(*(generator_for(seed, purpose, label, k) for k in range(candidates)))

    return torch.stack([of(label) for label in labels.tolist()])


def at_zero(prior: Prior, labels: Tensor, candidates: int) -> Tensor:
    """Return the mean of the latent space for everybody, (I, K, latent)."""
    return torch.zeros(len(labels), candidates, prior.latent, device=device_of(prior.generator))


def pool_latents(prior: Prior, size: int, *, seed: int) -> Tensor:
    """Draw latents (size, latent) that serve all people."""
    latents = torch.randn(size, prior.latent, generator=generator_for(seed, "pool"))
    return latents.to(device_of(prior.generator))


class Pool:
    """Latents drawn and scored once for all classes, from which each person's starts are chosen.

    `bonus(images)` (N, K), if given, is added to the target's margin of every class. `batch` is the
    attack's: a generator that fits into memory with it also does here.
    """

    def __init__(
        self,
        view: ModelView,
        prior: Prior,
        size: int,
        *,
        seed: int,
        bonus: Bonus | None = None,
        batch: int = POOL_CHUNK,
    ):
        def margins(latents: Tensor) -> Tensor:
            images = prior.images(latents)
            # The logit margin ranks as the probability does, without its rounding to 0 and 1.
            margin = class_margins(view.logits(images))
            return margin + bonus(images) if bonus else margin

        self.latents = pool_latents(prior, size, seed=seed)
        self.margins = scored(view, self.latents, margins, batch=batch)

    def best(self, labels: Tensor, candidates: int) -> Tensor:
        """Return for each label the latents with the largest margin, (I, K, latent)."""
        chosen = self.margins[:, labels].topk(candidates, dim=0).indices.T
        return self.latents[chosen.to(self.latents.device)]
