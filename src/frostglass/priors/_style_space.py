"""The style space of a StyleGAN, between its mapping network and its synthesis."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from frostglass.core.prior import Prior
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
