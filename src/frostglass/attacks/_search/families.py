"""Representations of a latent: a point, or a distribution of which samples are shown to the target.

All work on rows. A row is one person and candidate; everything optimised for it is in its row of
ONE tensor (the state), and rows never influence each other. The caller draws all standard normals.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from frostglass.core.errors import ConfigError
from frostglass.networks.flow import match_noise
from frostglass.runtime.seeding import generator_for

LOG_VARIANCES = (-10.0, 4.0)  # our bound: long schedules would drive log-variances to ±∞


class Family(Protocol):
    """A representation of latents by numbers to optimise; a sample takes `noise` normals."""

    @property
    def latent(self) -> int: ...

    @property
    def noise(self) -> int: ...

    def begin(self, centres: Tensor) -> Tensor:
        """Return the state (N, ...) of N rows around the latents `centres` (N, latent)."""

    def sample(self, state: Tensor, noise: Tensor) -> Tensor:
        """Return latents (N, S, latent) of noise (N, S, self.noise), differentiably."""


class Distribution(Family, Protocol):
    """A family with a density q, which can be kept near the generator's latent distribution."""

    def kl(self, state: Tensor, noise: Tensor) -> Tensor:
        """Return KL(q ‖ N(0, I)) of each row (N,): exact, or an unbiased estimate."""


@dataclass(frozen=True)
class Point:
    """The latent itself, as in GMI, PLG-MI and BREP-MI.

    Args:
        latent: length of the latent vector.
    """

    latent: int

    @property
    def noise(self) -> int:
        return 0

    def begin(self, centres: Tensor) -> Tensor:
        return centres.clone()

    def sample(self, state: Tensor, noise: Tensor) -> Tensor:
        return state[:, None].expand(-1, match_noise(self, state, noise).shape[1], -1)


@dataclass(frozen=True)
class BoundedPoint(Point):
    """A latent and its bounds, which are never moved: the state (N, 3, latent) is (w, low, high).

    Args:
        latent: length of the latent vector.
    """

    def sample(self, state: Tensor, noise: Tensor) -> Tensor:
        return super().sample(state[:, 0], noise)


@dataclass(frozen=True)
class Diagonal:
    """A diagonal Gaussian, z = μ + e^{s/2} ε; the state (N, 2, latent) is (μ, s).

    Paper: Chen et al., Knowledge-Enriched Distributional Model Inversion Attacks (KED-MI), ICCV
        2021, arXiv 2010.04092.
    Differs: s is clamped to [-10, 4] (published: free), with no gradient beyond. `kl` is that of
        the Gaussian before clipping.

    Args:
        latent: length of the latent vector.
        log_variance: s at the start; 1 in KED-MI and LOMMA, 0 in BiDO and TL-DMI.
        clamp: samples are clipped to ±clamp, and clipped coordinates have no gradient (LOMMA and
            TL-DMI: 1); 0 does not clip (KED-MI).
    """

    latent: int
    log_variance: float = 0.0
    clamp: float = 0.0

    def __post_init__(self) -> None:
        low, high = LOG_VARIANCES
        if not low <= self.log_variance <= high:
            raise ConfigError(
                f"log_variance must lie in [{low:g}, {high:g}], got {self.log_variance}"
            )
        if not self.clamp >= 0:
            raise ConfigError(f"clamp must be 0 (no clipping) or positive, got {self.clamp}")

    @property
    def noise(self) -> int:
        return self.latent

    def begin(self, centres: Tensor) -> Tensor:
        return torch.stack([centres, torch.full_like(centres, self.log_variance)], dim=1)

    def sample(self, state: Tensor, noise: Tensor) -> Tensor:
        noise = match_noise(self, state, noise)
        mean, log_variance = state[:, 0, None], state[:, 1, None].clamp(*LOG_VARIANCES)
        latents = mean + (log_variance / 2).exp() * noise
        return latents.clamp(-self.clamp, self.clamp) if self.clamp else latents

    def kl(self, state: Tensor, noise: Tensor) -> Tensor:
        mean, log_variance = state[:, 0], state[:, 1].clamp(*LOG_VARIANCES)
        return (mean**2 + log_variance.exp() - log_variance - 1).sum(dim=1) / 2


@dataclass(frozen=True)
class Gaussian:
    """A Gaussian with any covariance: z = m + ε Lᵀ; the state (N, 1 + latent, latent) is (m, L).

    L is a full matrix that starts as the identity. KL = ½(‖m‖² + ‖L‖² - latent) - log|det L|

    Paper: Wang et al., Variational Model Inversion Attacks (VMI), NeurIPS 2021, arXiv 2201.10787.
    Differs: the published -½ log det LLᵀ + ½E‖z‖² estimates E‖z‖² from 1000 samples and leaves out
        the constant -latent/2; here it is exact.

    Args:
        latent: length of the latent vector.
    """

    latent: int

    @property
    def noise(self) -> int:
        return self.latent

    def begin(self, centres: Tensor) -> Tensor:
        identity = torch.eye(self.latent).to(centres).expand(len(centres), -1, -1)
        return torch.cat([centres[:, None], identity], dim=1)

    def sample(self, state: Tensor, noise: Tensor) -> Tensor:
        noise = match_noise(self, state, noise)
        return torch.baddbmm(state[:, :1], noise, state[:, 1:].transpose(1, 2))

    def kl(self, state: Tensor, noise: Tensor) -> Tensor:
        log_determinant = torch.linalg.slogdet(state[:, 1:]).logabsdet
        return ((state**2).sum(dim=(1, 2)) - self.latent) / 2 - log_determinant

    def entropy(self, state: Tensor) -> Tensor:
        """Return ½ ln det 2πe LLᵀ of each row, (N,)."""
        log_determinant = torch.linalg.slogdet(state[:, 1:]).logabsdet
        return log_determinant + self.latent * (1 + math.log(2 * math.pi)) / 2


@dataclass(frozen=True)
class Mixture:
    """A mixture of diagonal Gaussians; the state (N, components, 1 + 2·latent) is (logit, μ, s).

    A sample's component is the largest of logit + Gumbel noise; backwards it is softmax(logit +
    Gumbel noise) (straight-through Gumbel-softmax). KL = Σ_k w_k E_ε[log q(z_k) - log N(z_k; 0,
    I)], z_k = μ_k + e^{s_k/2} ε, log q by logsumexp over components.

    Paper: Wang et al., Variational Model Inversion Attacks (VMI), NeurIPS 2021, arXiv 2201.10787.
    Differs: components are diagonal (published: full matrices); s is clamped to [-10, 4]; the
        published log q subtracts log(components) a second time. The published KL follows one chosen
        component per sample and sees weights through the straight-through gradient, which is
        biased; here all components are weighted, with the same ε. Gumbel noise is made from
        normals: -log(-log Φ(n)).

    Args:
        latent: length of the latent vector.
        components: number of Gaussians.
    """

    latent: int
    components: int

    def __post_init__(self) -> None:
        if self.components < 1:
            raise ConfigError(f"a mixture needs at least 1 component, got {self.components}")

    @property
    def noise(self) -> int:
        return self.latent + self.components

    def begin(self, centres: Tensor) -> Tensor:
        # Equal components would get equal gradients and stay equal. Their offsets are standard
        # normals, as published, but fixed: a row must start alike in any batch.
        generators = [generator_for(0, "mixture", k) for k in range(self.components)]
        offsets = torch.stack([torch.randn(self.latent, generator=rng) for rng in generators])
        means = centres[:, None] + offsets.to(centres)
        return torch.cat([torch.zeros_like(means[..., :1]), means, torch.zeros_like(means)], dim=2)

    def _parts(self, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, means, log_variances = state.split([1, self.latent, self.latent], dim=2)
        return logits[..., 0], means, log_variances.clamp(*LOG_VARIANCES)

    def sample(self, state: Tensor, noise: Tensor) -> Tensor:
        normals, extra = match_noise(self, state, noise).split(
            [self.latent, self.components], dim=2
        )
        logits, means, log_variances = self._parts(state)
        gumbel = -(-torch.special.log_ndtr(extra)).log()
        soft = (logits[:, None] + gumbel).softmax(dim=2)
        hard = torch.zeros_like(soft).scatter(2, soft.argmax(dim=2, keepdim=True), 1.0)
        choice = hard + (soft - soft.detach())
        return choice @ means + (choice @ (log_variances / 2).exp()) * normals

    def kl(self, state: Tensor, noise: Tensor) -> Tensor:
        normals = match_noise(self, state, noise)[:, :, None, : self.latent]
        logits, means, log_variances = self._parts(state)
        log_weights = logits.log_softmax(dim=1)
        # (N, S, K, latent): a sample of every component
        latents = means[:, None] + (log_variances / 2).exp()[:, None] * normals
        # (N, S, K, K, latent): from every component's sample to every mean
        gaps = latents[:, :, :, None] - means[:, None, None]
        precisions, log_variances = (-log_variances).exp(), log_variances[:, None, None]
        log_each = -((gaps**2 * precisions[:, None, None] + log_variances).sum(dim=4)) / 2
        # log √2π of q and of N(0, I) cancel
        log_q = (log_weights[:, None, None] + log_each).logsumexp(dim=3)
        ratio = (log_q + (latents**2).sum(dim=3) / 2).mean(dim=1)
        return (log_weights.exp() * ratio).sum(dim=1)
