"""PPA: plug & play attacks."""

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from frostglass.attacks._search.descent import Descent
from frostglass.attacks._search.families import Point
from frostglass.attacks._search.row_rng import RowRng
from frostglass.attacks._search.styled import (
    StyleSpace,
    best_styles,
    drawn_styles,
    probabilities,
    style_scores,
)
from frostglass.attacks.base import attacks, run_padded
from frostglass.core.objective import LossName
from frostglass.core.parameters import parameters
from frostglass.core.prior import Prior
from frostglass.core.views import ModelView
from frostglass.data._augment import CROP_DRAWS, cropped

Share = Annotated[float, Field(gt=0, le=1)]


@attacks.register
@parameters
class Ppa(Descent):
    """Plug & play: a search among the styles of a ready-made StyleGAN, on random crops, of which the pictures are kept that stay convincing under change.

    Starts: of `pool` draws the `candidates` whose truncated pictures, and their mirror images, the target gives the highest mean p_y. Search: L(w) = weight ·
    loss(T(crop(G(w))), y), one random crop a step. Kept: those with the highest mean p_y over `trials` random crops, stretched and mirrored.

    Paper: Struppek et al., Plug & Play Attacks, ICML 2022, arXiv 2201.12179.
    Differs: draws are scored once for all people, where the published code scores them again for each. Each candidate has crops of its own; published is one a step for the
        whole batch. A crop is one bilinear sampling of any width, where the published one has whole pixels. Published starts are scored with all layers
        beyond `cutoff` not truncated, and searched from the truncated style in all layers, a different picture; so they are here. Any prior is
        accepted: one without a mapping network is searched in its latents (and ψ does nothing to latents on a sphere). Pictures are cut off at 0 and 1 after cropping and resizing,
        where the published selection does it before. A trial that would be wider or higher than the picture is as wide or high as it, where the published one is drawn again.

    Args:
        pool: draws of the prior that starts are chosen from; 2000 or 5000 published.
        truncation: ψ, how far the draws are from the mean style, 0 to 1. cutoff: how many layers are truncated for the scores.
        area: least and greatest share of a picture that crops of the search keep; (0.75, 1) published for dogs, (1, 1) is off.
        trials: changes under which candidates are compared in the end; 100 published, 0 keeps the best target margins.
        trial_area: as `area`, for those. trial_ratio: how much wider than the picture they are, at least and at most.
        steps: 50 published for FaceScrub, 70 for CelebA, 100 for dogs.
    """

    loss: LossName = "poincare"
    weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    critic_weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    coupling: Annotated[int, Field(ge=1)] = 1
    lr: Annotated[float, Field(gt=0)] = 0.005
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (
        0.1,
        0.1,
    )
    steps: Annotated[int, Field(ge=0)] = 50
    candidates: Annotated[int, Field(ge=1)] = 200
    keep: Annotated[int, Field(ge=1)] = 50
    pool: Annotated[int, Field(ge=1)] = 2000
    truncation: Annotated[float, Field(ge=0, le=1)] = 0.5
    cutoff: Annotated[int, Field(ge=0)] = 8
    area: tuple[Share, Share] = (0.9, 1.0)
    trials: Annotated[int, Field(ge=0)] = 100
    trial_area: tuple[Share, Share] = (0.5, 0.9)
    trial_ratio: tuple[Annotated[float, Field(gt=0)], Annotated[float, Field(gt=0)]] = (0.8, 1.2)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pool < self.candidates:
            raise ValueError(f"pool ({self.pool}) must be at least candidates ({self.candidates})")
        for name in ("area", "trial_area", "trial_ratio"):
            low, high = getattr(self, name)
            if low > high:
                raise ValueError(
                    f"{name} must give the least before the greatest, got {low} and {high}"
                )

    @property
    def asked_once(self) -> int:
        return 2 * self.pool * self.samples

    def effort(self) -> tuple[str, int]:
        what, pictures = super().effort()
        return (
            f"{what} and {self.trials} trials" if self.trials else what
        ), pictures + self.trials * self.samples

    def space(self, prior: Prior) -> StyleSpace:
        return StyleSpace(prior, self.truncation, self.cutoff)

    def family(self, prior: Prior) -> Point:
        return Point(self.space(prior).size)

    def centres(self, view: ModelView, prior: Prior, labels: Tensor, *, seed: int) -> Tensor:
        space = self.space(prior)
        styles = drawn_styles(space, self.pool, seed=seed)
        return space.truncated(
            best_styles(
                styles, style_scores(view, space, styles, labels, mirrored=True), self.candidates
            )
        )

    def pictures(self, prior: Prior, latents: Tensor, labels: Tensor) -> Tensor:
        return self.space(prior).paint(latents)

    def identity(
        self, view: ModelView, prior: Prior, pictures: Tensor, labels: Tensor, rng: RowRng
    ) -> tuple[Tensor, Tensor]:
        seen = (
            pictures
            if self.area == (1, 1)
            else cropped(pictures, rng.uniform(CROP_DRAWS), area=self.area)
        )
        return super().identity(view, prior, seen, labels, rng)

    def ranks(
        self, view: ModelView, prior: Prior, state: Tensor, labels: Tensor, rng: RowRng
    ) -> Tensor | None:
        if not self.trials:
            return None
        with torch.no_grad():
            (made,) = run_padded(
                view, lambda rows, y: (self.pictures(prior, rows, y).clamp(0, 1),), state, labels
            )
        return self.robust(view, made, labels, rng)

    def robust(self, view: ModelView, pictures: Tensor, labels: Tensor, rng: RowRng) -> Tensor:
        """The target's mean probability of the labels over the trials of each picture, (N,)."""

        def look(shown: Tensor, draws: Tensor) -> tuple[Tensor]:
            return (
                probabilities(
                    view,
                    cropped(shown, draws, area=self.trial_area, ratio=self.trial_ratio, mirror=0.5),
                ),
            )

        total = torch.zeros(len(pictures), dtype=torch.double, device=pictures.device)
        with torch.no_grad():
            for _ in range(self.trials):
                (scores,) = run_padded(view, look, pictures, rng.uniform(CROP_DRAWS))
                total += scores.gather(1, labels[:, None])[:, 0]
        return total / max(1, self.trials)
