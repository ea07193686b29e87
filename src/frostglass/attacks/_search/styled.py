"""Where the attacks on StyleGANs move: the styles between its mapping network and its synthesis."""

from dataclasses import dataclass

import torch
from torch import Tensor

from frostglass.attacks._search.start import POOL_CHUNK
from frostglass.core.prior import Prior
from frostglass.core.views import ModelView
from frostglass.priors.stylegan2 import StylePictures
from frostglass.runtime.device import device_of
from frostglass.runtime.seeding import generator_for


@dataclass(frozen=True)
class StyleSpace:
    """The styles w of a StyleGAN2, one for all of its layers; of a generator without a mapping network the latents themselves take their place.

    `truncation` ψ draws styles towards their mean, w̄ + ψ(w - w̄), in the first `cutoff` layers; latents have the mean 0 and no layers.
    """

    prior: Prior
    truncation: float = 1.0
    cutoff: int | None = None

    @property
    def _network(self) -> StylePictures | None:
        return self.prior.generator if isinstance(self.prior.generator, StylePictures) else None

    @property
    def size(self) -> int:
        """How many numbers a style has."""
        return self.prior.latent if self._network is None else self._network.settings.w_dim

    @property
    def bent(self) -> bool:
        """Whether styles come out of an activation; latents do not."""
        return self._network is not None

    def enter(self, latents: Tensor) -> Tensor:
        """The styles (N, size) of latents (N, latent), not truncated."""
        return latents if self._network is None else self._network.network.mapping.w(latents)

    def truncated(self, styles: Tensor) -> Tensor:
        """Styles drawn towards their mean, as those of the first layer are."""
        return torch.lerp(self.mean, styles, self.truncation)

    @property
    def mean(self) -> Tensor:
        """The mean style w̄ (size,)."""
        if self._network is None:
            return torch.zeros(self.size, device=device_of(self.prior.generator))
        return self._network.network.mapping.w_avg

    def paint(self, styles: Tensor, *, truncate: bool = False) -> Tensor:
        """Pictures of styles, the same in all layers; values a little outside [0, 1] are left as they are where the generator makes them."""
        network = self._network
        if network is None:
            latents = self.truncated(styles) if truncate else styles
            paint = getattr(self.prior.generator, "paint", self.prior.images)
            return paint(latents)
        layers = network.settings.num_ws
        ws = styles[:, None].expand(-1, layers, -1)
        if truncate:
            cutoff = layers if self.cutoff is None else self.cutoff
            ws = torch.cat(
                [
                    self.truncated(styles)[:, None].expand(-1, min(cutoff, layers), -1),
                    ws[:, cutoff:],
                ],
                dim=1,
            )
        return network.paint(ws)


def drawn_styles(space: StyleSpace, count: int, *, seed: int) -> Tensor:
    """A pool of styles (count, size) for all people, not truncated."""
    latents = torch.randn(count, space.prior.latent, generator=generator_for(seed, "pool")).to(
        device_of(space.prior.generator)
    )
    with torch.no_grad():
        return torch.cat([space.enter(part) for part in latents.split(POOL_CHUNK)])


def style_scores(
    view: ModelView, space: StyleSpace, styles: Tensor, labels: Tensor, *, mirrored: bool = False
) -> Tensor:
    """The target's probabilities of `labels` for each style, (P, I): of truncated pictures, cut off at 0 and 1, each asked about once for all labels.

    With `mirrored` it is the mean of each picture and its mirror image.
    """
    scores = []
    with torch.no_grad():
        for part in styles.split(POOL_CHUNK):
            pictures = space.paint(part, truncate=True).clamp(0, 1)
            shown = [pictures, pictures.flip(3)] if mirrored else [pictures]
            scores.append(
                torch.stack(
                    [
                        probabilities(view, picture)[:, labels.to(picture.device)]
                        for picture in shown
                    ]
                )
                .mean(0)
                .cpu()
            )
    return torch.cat(scores)


def best_styles(styles: Tensor, scores: Tensor, count: int) -> Tensor:
    """For each label (column of `scores`) the `count` styles with the highest score, (I, count, size); one style may serve several labels."""
    chosen = (
        scores.nan_to_num(nan=-1.0).topk(count, dim=0).indices.T
    )  # a score that is no number is the worst
    return styles[chosen.to(styles.device)]


def probabilities(view: ModelView, pictures: Tensor) -> Tensor:
    """Class probabilities in double precision: from logits, where they are granted, a sure target's do not all round to 1."""
    return (
        view.logits(pictures).double().softmax(1)
        if "gradients" in view.access
        else view.scores(pictures).double()
    )
