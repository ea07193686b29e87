"""MIRROR by gradients."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from frostglass.attacks._search.box import Box
from frostglass.attacks._search.descent import Descent
from frostglass.attacks._search.families import fitting
from frostglass.attacks._search.row_rng import RowRng
from frostglass.attacks._search.styled import StyleSpace, best_styles, drawn_styles, style_scores
from frostglass.attacks.base import attacks
from frostglass.core.parameters import parameters
from frostglass.core.prior import Prior
from frostglass.core.views import ModelView

RISE, FALL = (
    0.05,
    0.25,
)  # shares of the steps in which the step size grows from 0 and falls back to it


def rise_and_fall(t: float) -> float:
    """What the step size is multiplied by after the share t of the steps: min(1, t / 0.05) · (½ - ½ cos(π · min(1, (1 - t) / 0.25)))."""
    return min(1.0, t / RISE) * (0.5 - 0.5 * math.cos(math.pi * min(1.0, (1 - t) / FALL)))


@dataclass(frozen=True)
class BoxedPoint:
    """A style and the bounds it must keep, which are never moved: the state (N, 3, latent) is (w, low, high).

    Args:
        latent: how many numbers a style has.
    """

    latent: int

    @property
    def noise(self) -> int:
        return 0

    def begin(self, centres: Tensor) -> Tensor:
        return centres.clone()

    def sample(self, state: Tensor, noise: Tensor) -> Tensor:
        return state[:, :1].expand(-1, fitting(self, state, noise).shape[1], -1)


@attacks.register
@parameters
class Mirror(Descent):
    """MIRROR: a search among the styles of a ready-made StyleGAN, each kept within what is usual before the last activation of its mapping network.

    Starts: of `pool` draws the `candidates` with the highest p_y. Search: L(w) = weight · loss(T(G(w̄ + ψ(w - w̄))), y), pictures mirrored at random; after
    each step w is clamped, coordinate by coordinate, to where p = w / (1 or 0.2, for w ≥ 0 or below) is within `box` standard deviations of the mean p of
    the pool. The step size grows over the first 5 % of the steps and falls to 0 over the last 25 %.

    Paper: An et al., MIRROR: Model Inversion for Deep Learning Network with High Fidelity, NDSS 2022.
    Differs: the published result is the iterate with the smallest loss of the whole batch, one step too late and compared over losses with and without mirroring; here it is each
        candidate's last one, where the step size has come to rest. Whether a picture is mirrored is drawn for each candidate, published for all
        eight together. The first step has the size 0, as published, so that it does no more than bring starts into the box. The factor √2 of a StyleGAN2's activation is left in p,
        which gives the same box. A generator without a mapping network has no activation to undo: the box, and ψ, are then on its latents. Steps are 20 000
        in the published code, 500 in TL-DMI's table, 70 in MIBench, which takes the box from truncated styles and never enforces its upper side.
        Published options that are left out: dropout of the target kept active, an energy term, the discriminator's opinion.

    Args:
        pool: draws of the prior that starts are chosen from and that the box is taken of, scored once for all people; 100 000 published.
        box: half the width of the box, in standard deviations.
        truncation: ψ, 0 to 1; all pictures are made of styles drawn towards their mean, in the first `cutoff` layers.
        cutoff: how many layers are truncated; 8 published.
        flip: the chance that a picture is mirrored at a step.
        weight: 10 in the published scripts, 1 by default; makes next to no difference to Adam.
    """

    weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 10.0
    critic_weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    coupling: Annotated[int, Field(ge=1)] = 1
    lr: Annotated[float, Field(gt=0)] = 0.25
    steps: Annotated[int, Field(ge=0)] = 500
    candidates: Annotated[int, Field(ge=1)] = 8
    keep: Annotated[int, Field(ge=1)] = 8
    pool: Annotated[int, Field(ge=2)] = 100_000
    box: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    truncation: Annotated[float, Field(ge=0, le=1)] = 0.7
    cutoff: Annotated[int, Field(ge=0)] = 8
    flip: Annotated[float, Field(ge=0, le=1)] = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pool < self.candidates:
            raise ValueError(f"pool ({self.pool}) must be at least candidates ({self.candidates})")

    @property
    def asked_once(self) -> int:
        return self.pool * self.samples

    @property
    def ramp(self) -> Callable[[float], float]:
        return rise_and_fall

    def space(self, prior: Prior) -> StyleSpace:
        return StyleSpace(prior, self.truncation, self.cutoff)

    def family(self, prior: Prior) -> BoxedPoint:
        return BoxedPoint(self.space(prior).size)

    def centres(self, view: ModelView, prior: Prior, labels: Tensor, *, seed: int) -> Tensor:
        """Starts with their bounds, (I, candidates, 3, size)."""
        space = self.space(prior)
        styles = drawn_styles(space, self.pool, seed=seed)
        box, starts = (
            Box.around(space, styles, self.box),
            best_styles(styles, style_scores(view, space, styles, labels), self.candidates),
        )
        return torch.stack([starts, box.low.expand_as(starts), box.high.expand_as(starts)], dim=2)

    def project(self, state: Tensor, start: Tensor) -> Tensor:
        low, high = start[:, 1:2], start[:, 2:3]
        return torch.cat([state[:, :1].clamp(low, high), low, high], dim=1)

    def pictures(self, prior: Prior, latents: Tensor, labels: Tensor) -> Tensor:
        return self.space(prior).paint(latents, truncate=True)

    def identity(
        self, view: ModelView, prior: Prior, pictures: Tensor, labels: Tensor, rng: RowRng
    ) -> tuple[Tensor, Tensor]:
        turned = rng.uniform()[:, None, None, None] < self.flip
        return super().identity(
            view, prior, torch.where(turned, pictures.flip(3), pictures), labels, rng
        )
