"""PPA: plug & play attacks."""

from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from frostglass.attacks._search.augmented import LOMMA, NEWER, SUBTRACT
from frostglass.attacks._search.descent import ADAPTIVE, ALL_STEPS, PUBLISHED, Beta
from frostglass.attacks._search.families import Family, Point
from frostglass.attacks._search.fields import AtLeastOne, Count
from frostglass.attacks._search.query_budget import scaled_down
from frostglass.attacks._search.row_rng import RowRng
from frostglass.attacks._search.runner import run_padded
from frostglass.attacks._search.styled import (
    StyleDescent,
    best_styles,
    class_scores,
    pool_styles,
    style_scores,
)
from frostglass.attacks.base import attacks
from frostglass.core.method import Variants
from frostglass.core.objective import LossName
from frostglass.core.parameters import parameters
from frostglass.core.prior import Prior
from frostglass.core.views import ModelView
from frostglass.data._augment import CROP_DRAWS, cropped

Area = Annotated[float, Field(gt=0, le=1)]
Ratio = Annotated[float, Field(gt=0)]


@attacks.register
@parameters
class Ppa(StyleDescent):
    """Plug & play: searches a StyleGAN's styles on random crops, keeps the most robust images.

    Starts: of `pool` draws the `candidates` whose truncated images, and their mirror images, have
    the highest mean p_y. Search: L(w) = weight · loss(T(crop(G(w))), y), one random crop a step.
    Kept: those with the highest mean p_y over `trials` random crops, stretched and mirrored.

    Use: the weights are released and there is a StyleGAN2 of such faces; the usual attack on images
        of 224 pixels.
    Paper: Struppek et al., Plug & Play Attacks, ICML 2022, arXiv 2201.12179.
    Differs: draws are scored once for all people, where the published code scores them again for
        each. Each candidate has crops of its own; published is one a step for the whole batch. A
        crop is one bilinear sampling of any width, where the published one has whole pixels.
        Published starts are scored with all layers beyond `cutoff` not truncated, and searched from
        the truncated style in all layers, a different image; so they are here. Any prior is
        accepted: one without a mapping network is searched in its latents (and ψ does nothing to
        latents on a sphere). Scored images are clamped to [0, 1] after the prior's own cropping and
        resizing, where the published code does it before. A trial that would be wider or higher
        than the image is as wide or high as it, where the published one is drawn again. The
        published term of the discriminator, which no published config uses, is softplus(-D), here
        `critic_weight` counts -D. TL-DMI's table says that w is clipped; the published code never
        does that. MIBench scores 5000 draws and takes 100 steps.

    Args:
        pool: 2000 or 5000 published. cutoff: truncated layers of the images that are scored.
        area: least and greatest share of an image that crops of the search keep; (0.75, 1)
            published for dogs, (1, 1) does not crop.
        trials: random changes under which candidates are compared in the end; 100 published, 0
            keeps the best target margins.
        trial_area: as `area`, for those.
        trial_ratio: how much wider than the image they are, at least and at most.
        steps: 50 published for FaceScrub, 70 for CelebA, 100 for dogs.
        milestones: numbers of steps after which the step size is multiplied by `decay`; none in the
            published configs of the paper's tables, 30 and 40 in the repository's default config.
        decay: 0.1 there.
        w_plus: search a style for each layer of a StyleGAN2, from exactly the image that was
            scored, instead of one for all; false in all published configs.
        clip: clamp images to [0, 1] before they are cropped, without gradient where it is cut;
            false in all published configs.
    """

    title = "PPA"
    variants: ClassVar[Variants] = {
        **PUBLISHED,
        "default-config": (
            "as the repository's default config: the step size falls after 30 and 40 of 50 steps",
            {"milestones": (30, 40), **ALL_STEPS},
        ),
        "w+": ("a style for each layer of a StyleGAN2", {"w_plus": True}),
        **LOMMA,
        **SUBTRACT,
        **ADAPTIVE,
        **NEWER,
    }

    loss: LossName = "poincare"
    lr: Ratio = 0.005
    betas: tuple[Beta, Beta] = (0.1, 0.1)
    steps: Count = 50
    candidates: AtLeastOne = 200
    keep: AtLeastOne = 50
    area: tuple[Area, Area] = (0.9, 1.0)
    trials: Count = 100
    trial_area: tuple[Area, Area] = (0.5, 0.9)
    trial_ratio: tuple[Ratio, Ratio] = (0.8, 1.2)
    milestones: tuple[Count, ...] = ()
    decay: Area = 0.1
    w_plus: bool = False
    clip: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        ranges = {
            "area": self.area,
            "trial_area": self.trial_area,
            "trial_ratio": self.trial_ratio,
        }
        for name, (low, high) in ranges.items():
            if low > high:
                raise ValueError(
                    f"{name} must give the least before the greatest, got {low} and {high}"
                )

    @property
    def start_images(self) -> int:
        return 2 * super().start_images  # with their mirror images

    @property
    def search_effort(self) -> tuple[str, int]:
        words, images = super().search_effort
        words = f"({words} + {self.trials} trials)" if self.trials else words
        return words, images + self.trials * self.samples

    def brief_counts(self, candidates: int) -> dict[str, Any]:
        return super().brief_counts(candidates) | {"trials": min(1, self.trials)}

    def scaled_counts(self, share: float) -> dict[str, Any]:
        return super().scaled_counts(share) | {"trials": scaled_down(self.trials, share, 1)}

    def prior_problems(self, prior: Prior) -> list[str]:
        problems = super().prior_problems(prior)
        if self.w_plus and not prior.blocks:
            problems.append(
                f"{self.name}.w_plus needs the layers of a StyleGAN2, but this prior's generator "
                "has none: use a stylegan2 prior, or set it to false"
            )
        return problems

    def ramp(self, step: int, steps: int) -> float:
        return self.decay ** sum(step > milestone for milestone in self.milestones)

    def family(self, prior: Prior) -> Family:
        space = self.space(prior)
        return Point(space.size * (space.layers if self.w_plus else 1))

    def centres(self, view: ModelView, prior: Prior, labels: Tensor, *, seed: int) -> Tensor:
        space = self.space(prior)
        styles = pool_styles(space, self.pool, seed=seed)
        scores = style_scores(
            view,
            space,
            styles,
            labels,
            mirrored=True,
            bonus=self.bonus(prior),
            batch=self.batch,
        )
        chosen = best_styles(styles, scores, self.candidates)
        return space.per_layer(chosen).flatten(2) if self.w_plus else space.truncated(chosen)

    def images(self, prior: Prior, latents: Tensor, labels: Tensor) -> Tensor:
        space = self.space(prior)
        return space.images(latents.unflatten(1, (-1, space.size)) if self.w_plus else latents)

    def class_loss(
        self, view: ModelView, prior: Prior, images: Tensor, labels: Tensor, rng: RowRng
    ) -> tuple[Tensor, Tensor]:
        images = images.clamp(0, 1) if self.clip else images
        if self.area != (1, 1):
            images = cropped(images, rng.uniform(CROP_DRAWS), area=self.area)
        return super().class_loss(view, prior, images, labels, rng)

    def rank(
        self, view: ModelView, prior: Prior, state: Tensor, labels: Tensor, rng: RowRng
    ) -> Tensor | None:
        if not self.trials:
            return None

        def show(rows: Tensor, y: Tensor) -> tuple[Tensor]:
            return (self.images(prior, rows, y).clamp(0, 1),)

        with torch.no_grad():
            (images,) = run_padded(view, show, state, labels)
        return self.robustness(view, prior, images, labels, rng)

    def robustness(
        self, view: ModelView, prior: Prior, images: Tensor, labels: Tensor, rng: RowRng
    ) -> Tensor:
        """Return the target's mean probability of the labels over the trials, (N,).

        With `subtract`, the mean of its margin and the bonus.
        """
        bonus = self.bonus(prior)

        def look(images: Tensor, draws: Tensor) -> tuple[Tensor]:
            crop = cropped(images, draws, area=self.trial_area, ratio=self.trial_ratio, mirror=0.5)
            return (class_scores(view, crop, bonus),)

        total = torch.zeros(len(images), dtype=torch.double, device=images.device)
        with torch.no_grad():
            for _ in range(self.trials):
                (scores,) = run_padded(view, look, images, rng.uniform(CROP_DRAWS))
                total += scores.gather(1, labels[:, None])[:, 0]
        return total / max(1, self.trials)
