"""A distribution for each layer of a StyleGAN."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from frostglass.attacks._search.families import Distribution
from frostglass.core.errors import ConfigError
from frostglass.networks.flow import match_noise


@dataclass(frozen=True)
class Layered:
    """Latents z_ℓ for each layer ℓ of a StyleGAN, from independent q_ℓ that share one noise ε.

    A latent is (z_1, ..., z_layers) in one row. The first `led` layers have a distribution of their
    own, of the kind of `each`; all others share one standard normal z from further noise, which is
    not optimised. KL is the mean or the sum over all layers of KL(q_ℓ ‖ N(0, I)), where layers that
    are not led add 0. The state is (N, led, ...), with the state of `each` in place of the dots.

    Paper: Wang et al., Variational Model Inversion Attacks (VMI), NeurIPS 2021, arXiv 2201.10787.
    Differs: published layers that are not led have flows too, which no image shows; they stay at
        their start but for the noise of the KL's gradients. All distributions of a row start
        alike and diverge by their gradients. Published layers share the first quarter of ε and draw
        the rest anew; here they share all.

    Args:
        each: the distribution of one layer.
        layers: number of layers of the generator.
        led: number of layers, from the first, that follow a distribution.
        reduction: of the KL of all layers; published "mean" for flows and mixtures, "sum" for
            Gaussians.
    """

    each: Distribution
    layers: int
    led: int
    reduction: Literal["mean", "sum"] = "mean"

    def __post_init__(self) -> None:
        if not 1 <= self.led <= self.layers:
            raise ConfigError(f"led must lie in 1..{self.layers}, got {self.led}")

    @property
    def latent(self) -> int:
        return self.layers * self.each.latent

    @property
    def noise(self) -> int:
        return self.each.noise + (self.each.latent if self.led < self.layers else 0)

    def begin(self, centres: Tensor) -> Tensor:
        led = centres.unflatten(1, (self.layers, -1))[:, : self.led]
        return self.each.begin(led.flatten(0, 1)).unflatten(0, led.shape[:2])

    def sample(self, state: Tensor, noise: Tensor) -> Tensor:
        shared, free = self._noises(state, noise)
        latents = self.each.sample(state.flatten(0, 1), shared)
        latents = latents.unflatten(0, (-1, self.led)).transpose(1, 2)
        if self.led == self.layers:
            return latents.flatten(2)
        others = free.to(latents)[:, :, None].expand(-1, -1, self.layers - self.led, -1)
        return torch.cat([latents, others], dim=2).flatten(2)

    def kl(self, state: Tensor, noise: Tensor) -> Tensor:
        shared, _ = self._noises(state, noise)
        kl = self.each.kl(state.flatten(0, 1), shared).unflatten(0, (-1, self.led)).sum(1)
        return kl if self.reduction == "sum" else kl / self.layers

    def _noises(self, state: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Split noise into ε, repeated for each led layer, and the latent of the other layers."""
        noise = match_noise(self, state, noise)
        shared, free = noise.split([self.each.noise, self.noise - self.each.noise], dim=2)
        return shared.repeat_interleave(self.led, 0), free
