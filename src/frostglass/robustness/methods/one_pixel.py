"""One-Pixel: differential evolution over the place and colour of single pixels."""

from collections.abc import Sequence
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from frostglass.core.method import Variants
from frostglass.core.parameters import parameters
from frostglass.core.types import Capability, Shape
from frostglass.core.views import ModelView
from frostglass.robustness.base import CHUNK, Evasion, Victims, threats

MUTATION = 0.5  # F of differential evolution, as published


@threats.register
@parameters
class OnePixel(Evasion):
    """One-Pixel attack: evolve the place and the colour of one pixel; needs scores alone.

    A candidate is (row, column, colour). In each generation member i gets the child
    g_a + 0.5 (g_b - g_c) of three different members, which replaces it if it lowers p_y (targeted:
    raises p_t). The search of an image stops when its class changes (to t).

    Use: an attacker with scores alone, and a check for masked gradients.
    Paper: Su et al., One Pixel Attack for Fooling Deep Neural Networks, IEEE TEVC 2019,
        arXiv 1710.08864; used by CALoR, Appendix F.
    Differs: the paper stops at 5 % of the true class or 90 % of t; the class decides here, so that
        no success is lost. Its population of 400 for 100 generations is the variant "published";
        the defaults, 10 of 10, are those of common libraries; CALoR's are not known here. They find
        few such pixels: the numbers are those of a weak attack.

    Args:
        pixels: number of pixels that may change.
        population: candidates of each image.
        generations: how often they are improved.
    """

    pixels: Annotated[int, Field(ge=1)] = 1
    population: Annotated[int, Field(ge=4)] = 10
    generations: Annotated[int, Field(ge=1)] = 10
    title: ClassVar[str] = "One-Pixel"
    access: ClassVar[tuple[Capability, ...]] = ("scores",)
    variants: ClassVar[Variants] = {
        "published": ("the budget of the paper", {"population": 400, "generations": 100})
    }

    def problems(self, image_shape: Shape, classes: int) -> list[str]:
        problems, most = super().problems(image_shape, classes), image_shape[1] * image_shape[2]
        if self.pixels > most:
            problems.append(f"pixels: expected at most {most}, got {self.pixels}: lower it")
        return problems

    def perturb(self, view: ModelView, victims: Victims, *, seed: int) -> Tensor:
        rngs = victims.rngs(seed, self.name)
        members = self._first(victims.images, rngs)
        fitness, hits = self._scored(view, victims, members)
        active = (~hits.any(1)).nonzero().flatten()
        for _ in range(self.generations):
            if not len(active):
                break
            children = self._children(members[active], [rngs[row] for row in active.tolist()])
            scores, reached = self._scored(view, victims.at(active.cpu()), children)
            # A child that reaches the goal may be no better in p_y: it must not be lost.
            taken = (scores < fitness[active]) | reached
            members[active] = torch.where(taken[:, :, None, None], children, members[active])
            fitness[active] = torch.where(taken, scores, fitness[active])
            hits[active] = reached
            active = active[~reached.any(1)]
        best = torch.where(hits, fitness - 2, fitness).argmin(1)  # fitness is within [-1, 1]
        rows = torch.arange(len(best), device=best.device)
        return painted(victims.images, members[rows, best])

    def _first(self, images: Tensor, rngs: Sequence[torch.Generator]) -> Tensor:
        """Draw candidates (N, population, pixels, 2 + C), all of their values in [0, 1]."""
        shape = (self.population, self.pixels)
        places = torch.stack([torch.rand(*shape, 2, generator=rng) for rng in rngs])
        colours = torch.stack(
            [torch.randn(*shape, images.shape[1], generator=rng) for rng in rngs]
        )  # of mean 128 and deviation 127 out of 255, as published
        return torch.cat([places, (0.5 + 0.5 * colours).clamp(0, 1)], 3).to(images.device)

    def _children(self, members: Tensor, rngs: Sequence[torch.Generator]) -> Tensor:
        """Return a child for each member, from three different members."""
        orders = torch.stack([torch.rand(self.population, generator=rng).argsort() for rng in rngs])
        rows = torch.arange(len(members), device=members.device)[:, None]
        a, b, c = (members[rows, orders.to(members.device).roll(turn, 1)] for turn in range(3))
        return (a + MUTATION * (b - c)).clamp(0, 1)

    def _scored(self, view: ModelView, victims: Victims, members: Tensor) -> tuple[Tensor, Tensor]:
        """Return p_y or -p_t of each candidate, (N, population), and which reach their goal."""
        images, untargeted = victims.images, victims.goals is None
        aims = victims.labels if victims.goals is None else victims.goals
        rows = torch.arange(len(images), device=images.device).repeat_interleave(self.population)
        fitness, hits = [], []
        for own, some in zip(rows.split(CHUNK), members.flatten(0, 1).split(CHUNK), strict=True):
            scores = view.scores(painted(images[own], some))
            chosen = scores.gather(1, aims[own, None])[:, 0]
            fitness.append(chosen if untargeted else -chosen)
            hits.append((scores.argmax(1) == aims[own]) ^ untargeted)
        shape = members.shape[:2]
        return torch.cat(fitness).reshape(shape), torch.cat(hits).reshape(shape)


def painted(images: Tensor, candidates: Tensor) -> Tensor:
    """Return copies of images (N, C, H, W) with the pixels of candidates (N, pixels, 2 + C)."""
    height, width = images.shape[2:]
    size = torch.tensor([height, width], device=images.device)
    places = (candidates[..., :2] * size).long().minimum(size - 1)
    changed, rows = images.clone(), torch.arange(len(images), device=images.device)
    for number in range(candidates.shape[1]):
        row, column = places[:, number].unbind(1)
        changed[rows, :, row, column] = candidates[:, number, 2:]
    return changed
