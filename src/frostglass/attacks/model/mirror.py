"""MIRROR by gradients."""

import math
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from frostglass.attacks._search.augmented import LOMMA, NEWER, SUBTRACT
from frostglass.attacks._search.box import Box
from frostglass.attacks._search.descent import ADAPTIVE, PUBLISHED
from frostglass.attacks._search.families import BoundedPoint, Family
from frostglass.attacks._search.fields import AtLeastOne, Count, Positive, Share, Weight
from frostglass.attacks._search.row_rng import RowRng
from frostglass.attacks._search.styled import (
    StyleDescent,
    best_styles,
    pool_styles,
    style_scores,
)
from frostglass.attacks.base import attacks
from frostglass.core.method import Variants
from frostglass.core.parameters import parameters
from frostglass.core.prior import Prior
from frostglass.core.views import ModelView

RISE, FALL = 0.05, 0.25  # shares of the steps in which the step size grows from and falls to 0


def rise_and_fall(t: float) -> float:
    """Return the scale of the size of step t·E of E steps, numbered from 1.

    min(1, t / 0.05) · (½ - ½ cos(π · min(1, (1 - t) / 0.25)))
    """
    return min(1.0, t / RISE) * (0.5 - 0.5 * math.cos(math.pi * min(1.0, (1 - t) / FALL)))


@attacks.register
@parameters
class Mirror(StyleDescent):
    """MIRROR: searches a StyleGAN's styles within the usual range of their activation's input.

    Starts: of `pool` draws the `candidates` with the highest p_y. Search: L(w) = weight ·
    loss(T(G(w̄ + ψ(w - w̄))), y), images clamped to [0, 1] and mirrored at random; after each step w
    is clamped, coordinate by coordinate, to where p = w / (1 or 0.2, for w ≥ 0 or below) is within
    `box` standard deviations of the mean p of the pool. The step size grows over the first 5 % of
    the steps and falls over the last 25 %; that of the last step is 0.

    Use: the weights are released and there is a StyleGAN2 of such faces; beside `ppa`, because it
        stays among usual styles.
    Paper: An et al., MIRROR: Model Inversion for Deep Learning Network with High Fidelity, NDSS
        2022.
    Differs: the published result is the iterate with the smallest loss of the whole batch, one step
        too late and compared over losses with and without mirroring; here it is each candidate's
        last one. Whether an image is mirrored is drawn for each candidate, published for all eight
        together. Images are clamped after the prior's own cropping and resizing, published before.
        The published generator is a StyleGAN of 2018; the factor √2 of a StyleGAN2's activation is
        left in p, which gives the same box. A generator without a mapping network has no activation
        to undo: the box, and ψ, are then on its latents. Steps are 20 000 in the published code,
        500 in TL-DMI's table, 70 in MIBench, which takes the box from truncated styles and never
        enforces its upper side. Published options that are left out: dropout of the target kept
        active, an energy term, the discriminator's output, a style for each layer.

    Args:
        pool: 100 000 published; the box is taken from it too.
        box: half the width of the box, in standard deviations.
        flip: the probability that an image is mirrored at a step.
        weight: 10 in the published scripts, 1 by default; makes next to no difference to Adam.
    """

    title = "MIRROR"
    variants: ClassVar[Variants] = {**PUBLISHED, **LOMMA, **SUBTRACT, **ADAPTIVE, **NEWER}

    weight: Weight = 10.0
    lr: Annotated[float, Field(gt=0)] = 0.25
    steps: Count = 500
    candidates: AtLeastOne = 8
    keep: AtLeastOne = 8
    pool: Annotated[int, Field(ge=2)] = 100_000
    box: Positive = 1.0
    truncation: Share = 0.7
    flip: Share = 0.5

    def ramp(self, step: int, steps: int) -> float:
        return rise_and_fall(step / steps)

    def family(self, prior: Prior) -> Family:
        return BoundedPoint(self.space(prior).size)

    def centres(self, view: ModelView, prior: Prior, labels: Tensor, *, seed: int) -> Tensor:
        """Return starts with their bounds, (I, candidates, 3, size)."""
        space = self.space(prior)
        styles = pool_styles(space, self.pool, seed=seed)
        box = Box.around(space, styles, self.box)
        scores = style_scores(
            view, space, styles, labels, bonus=self.bonus(prior), batch=self.batch
        )
        starts = best_styles(styles, scores, self.candidates)
        return torch.stack([starts, box.low.expand_as(starts), box.high.expand_as(starts)], dim=2)

    def project(self, state: Tensor, start: Tensor) -> Tensor:
        low, high = start[:, 1:2], start[:, 2:3]
        return torch.cat([state[:, :1].clamp(low, high), low, high], dim=1)

    def images(self, prior: Prior, latents: Tensor, labels: Tensor) -> Tensor:
        return self.space(prior).images(latents, truncate=True).clamp(0, 1)

    def class_loss(
        self, view: ModelView, prior: Prior, images: Tensor, labels: Tensor, rng: RowRng
    ) -> tuple[Tensor, Tensor]:
        mirrored = rng.uniform()[:, None, None, None] < self.flip
        images = torch.where(mirrored, images.flip(3), images)
        return super().class_loss(view, prior, images, labels, rng)
