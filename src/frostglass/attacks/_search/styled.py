"""Searches among the styles of a StyleGAN, and the pools of styles they start from."""

import math
from typing import Any

import torch
from torch import Tensor

from frostglass.attacks._search.augmented import AugmentedDescent
from frostglass.attacks._search.descent import brief_pool
from frostglass.attacks._search.families import Family, Point
from frostglass.attacks._search.fields import AtLeastOne, Count, Share, Weight
from frostglass.attacks._search.query_budget import scaled_down
from frostglass.attacks._search.start import POOL_CHUNK, Bonus, pool_latents, scored
from frostglass.core.objective import class_margins
from frostglass.core.parameters import parameters
from frostglass.core.prior import Prior
from frostglass.core.views import ModelView
from frostglass.priors._style_space import StyleSpace


@parameters
class StyleDescent(AugmentedDescent):
    """Base of the attacks that search among styles, from the best of a pool of draws.

    Args:
        pool: draws of the prior that starts are chosen from, scored once for all people.
        truncation: ψ, 0 to 1, how far styles are from the mean style.
        cutoff: number of truncated layers; 8 published.
    """

    weight: Weight = 1.0
    critic_weight: Weight = 0.0
    coupling: AtLeastOne = 1
    pool: AtLeastOne = 2000
    truncation: Share = 0.5
    cutoff: Count = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pool < self.candidates:
            raise ValueError(f"pool ({self.pool}) must be at least candidates ({self.candidates})")

    @property
    def start_draws(self) -> int:
        return self.pool

    def brief_counts(self, candidates: int) -> dict[str, Any]:
        return super().brief_counts(candidates) | {"pool": brief_pool(self.pool, candidates)}

    def scaled_counts(self, share: float) -> dict[str, Any]:
        pool = scaled_down(self.pool, share, max(2, self.candidates))
        return super().scaled_counts(share) | {"pool": pool}

    def space(self, prior: Prior) -> StyleSpace:
        return StyleSpace(prior, self.truncation, self.cutoff)

    def family(self, prior: Prior) -> Family:
        return Point(self.space(prior).size)


def pool_styles(space: StyleSpace, count: int, *, seed: int) -> Tensor:
    """Draw styles (count, size) that serve all people, not truncated."""
    latents = pool_latents(space.prior, count, seed=seed)
    with torch.no_grad():
        return torch.cat([space.styles(part) for part in latents.split(POOL_CHUNK)])


def style_scores(
    view: ModelView,
    space: StyleSpace,
    styles: Tensor,
    labels: Tensor,
    *,
    mirrored: bool = False,
    bonus: Bonus | None = None,
    batch: int = POOL_CHUNK,
) -> Tensor:
    """Return the `class_scores` (P, I) of `labels` for truncated images of styles.

    With `mirrored`, each is the mean over the image and its mirror image.
    """

    def score(part: Tensor) -> Tensor:
        images = space.images(part, truncate=True).clamp(0, 1)
        shown = [images, images.flip(3)] if mirrored else [images]
        columns = labels.to(images.device)
        each = [class_scores(view, image, bonus)[:, columns] for image in shown]
        return torch.stack(each).mean(0)

    return scored(view, styles, score, batch=batch)


def best_styles(styles: Tensor, scores: Tensor, count: int) -> Tensor:
    """Return the styles with the highest scores for each label, (I, count, size).

    Labels are the columns of `scores`. NaN scores rank last. One style may serve several labels.
    """
    chosen = scores.nan_to_num(nan=-math.inf).topk(count, dim=0).indices.T
    return styles[chosen.to(styles.device)]


def class_scores(view: ModelView, images: Tensor, bonus: Bonus | None) -> Tensor:
    """Return the target's probabilities (N, K), or its margins and the bonus, if there is one."""
    if bonus is None:
        return probabilities(view, images)
    return (class_margins(view.logits(images)) + bonus(images)).double()


def probabilities(view: ModelView, images: Tensor) -> Tensor:
    """Return class probabilities in double precision, from logits if the view grants them.

    From logits, the probabilities of a confident target do not all round to 1.
    """
    if "gradients" in view.access:
        return view.logits(images).double().softmax(1)
    return view.scores(images).double()
