"""The style space of a StyleGAN, between its mapping network and its synthesis."""

import math
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from frostglass.attacks._search.augmented import AugmentedDescent
from frostglass.attacks._search.descent import brief_pool
from frostglass.attacks._search.families import Family, Point
from frostglass.attacks._search.fields import AtLeastOne, Count, Share, Weight
from frostglass.attacks._search.query_budget import scaled_down
from frostglass.attacks._search.start import POOL_CHUNK, Bonus, pool_chunk, pool_latents
from frostglass.core.objective import class_margins
from frostglass.core.parameters import parameters
from frostglass.core.prior import Prior
from frostglass.core.views import ModelView
from frostglass.priors.stylegan2 import StyleImages
from frostglass.runtime.device import device_of


@runtime_checkable
class _Unclamped(Protocol):
    """A generator that also returns images whose values may lie outside [0, 1]."""

    def paint(self, latents: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class StyleSpace:
    """The styles w of a StyleGAN2, one for all layers; other generators use latents as styles.

    `truncation` ψ moves styles towards their mean, w̄ + ψ(w - w̄), in the first `cutoff` layers;
    latents have the mean 0 and no layers.
    """

    prior: Prior
    truncation: float = 1.0
    cutoff: int | None = None

    @property
    def _network(self) -> StyleImages | None:
        return self.prior.generator if isinstance(self.prior.generator, StyleImages) else None

    @property
    def size(self) -> int:
        """Length of a style."""
        return self.prior.latent if self._network is None else self._network.settings.w_dim

    @property
    def layers(self) -> int:
        """Number of layers that each take a style; latents serve all there are."""
        return 1 if self._network is None else self._network.settings.num_ws

    @property
    def activated(self) -> bool:
        """Whether styles are the output of an activation; latents are not."""
        return self._network is not None

    def styles(self, latents: Tensor) -> Tensor:
        """Map latents (N, latent) to styles (N, size), not truncated."""
        return latents if self._network is None else self._network.network.mapping.w(latents)

    def truncated(self, styles: Tensor) -> Tensor:
        """Move styles towards their mean."""
        return torch.lerp(self.mean, styles, self.truncation)

    @property
    def mean(self) -> Tensor:
        """The mean style w̄ (size,)."""
        if self._network is None:
            return torch.zeros(self.size, device=device_of(self.prior.generator))
        return self._network.network.mapping.w_avg

    def per_layer(self, styles: Tensor) -> Tensor:
        """Return styles (..., size) for each layer, (..., layers, size), truncated up to `cutoff`.

        Latents have no layers, and are truncated whatever the cutoff is.
        """
        if self._network is None:
            return self.truncated(styles)[..., None, :]
        cutoff = self.layers if self.cutoff is None else min(self.cutoff, self.layers)
        first = self.truncated(styles)[..., None, :]
        parts = [(first, cutoff), (styles[..., None, :], self.layers - cutoff)]
        return torch.cat(
            [part.expand(*styles.shape[:-1], count, self.size) for part, count in parts], dim=-2
        )

    def images(self, styles: Tensor, *, truncate: bool = False) -> Tensor:
        """Generate images of styles (N, size) for all layers, or (N, layers, size) for each.

        They are not clamped if the generator can do without.
        """
        network, styles = self._network, self.per_layer(styles) if truncate else styles
        if network is not None:
            return network.paint(styles)
        latents = styles[:, 0] if styles.ndim == 3 else styles
        if isinstance(self.prior.generator, _Unclamped):
            return self.prior.generator.paint(latents)
        return self.prior.images(latents)


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
    scores = []
    with torch.no_grad():
        for part in styles.split(pool_chunk(batch)):
            images = space.images(part, truncate=True).clamp(0, 1)
            shown = [images, images.flip(3)] if mirrored else [images]
            columns = labels.to(images.device)
            each = [class_scores(view, image, bonus)[:, columns] for image in shown]
            scores.append(torch.stack(each).mean(0).cpu())
    return torch.cat(scores)


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
