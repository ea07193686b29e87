"""The inversion attack that Crafter and Crafter-z anticipate."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from frostglass.core.prior import Prior
from frostglass.defenses.release._implicit import expand_rows, largest_curvature

CHUNK = 128  # images encoded at once


@dataclass(frozen=True)
class Inversion:
    """z* = argmin_z L(F, z), L = scale · ‖F - Enc(G(z))‖² / d - realism · D(G(z)), one per row.

    d is the number of values in a feature, D the prior's own critic. Networks must be in evaluation
    mode, so that rows are independent.
    """

    encoder: nn.Module
    prior: Prior
    scale: float
    realism: float

    def encode(self, latents: Tensor) -> Tensor:
        return self.encoder(self.prior.images(latents))

    def losses(self, features: Tensor, latents: Tensor) -> Tensor:
        images = self.prior.images(latents)
        error = self.scale * (self.encoder(images) - features).flatten(1).square().mean(1)
        return error - self.realism * self.prior.realism(images) if self.realism else error

    def descend(
        self, features: Tensor, latents: Tensor, steps: int, lr: Tensor, momentum: float
    ) -> Tensor:
        """Take steps of heavy-ball descent: v ← μv + g, z ← z - ηv, with one η (N,) per row."""
        velocity, lr = torch.zeros_like(latents), expand_rows(lr, latents)
        for _ in range(steps):
            leaf = latents.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(self.losses(features, leaf).sum(), leaf)
            velocity = momentum * velocity + gradient
            latents = leaf.detach() - lr * velocity
        return latents

    def curvature(
        self, features: Tensor, latents: Tensor, direction: Tensor, iterations: int
    ) -> tuple[Tensor, Tensor]:
        """Return the largest curvature (N,) of L in z, and its directions."""
        leaf = latents.detach().requires_grad_()
        loss = self.losses(features, leaf).sum()
        (gradient,) = torch.autograd.grad(loss, leaf, create_graph=True)
        return largest_curvature(
            lambda rows: torch.autograd.grad(gradient, leaf, rows, retain_graph=True)[0],
            direction,
            iterations,
        )

    def fit(self, features: Tensor, latents: Tensor) -> tuple[float, float]:
        """Return mean ‖F - Enc(G(z))‖² / d, and mean ‖∂L/∂z‖, which is 0 at a minimum."""
        leaf = latents.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(self.losses(features, leaf).sum(), leaf)
        with torch.no_grad():
            error = (self.encode(latents) - features).square().mean().item()
        return error, gradient.norm(dim=1).mean().item()

    def nearest(
        self, features: Tensor, count: int, rng: torch.Generator, best: int = 1
    ) -> tuple[Tensor, ...]:
        """Return the `best` of `count` random latents for each feature, by their features.

        The first are the nearest ones of all features, (N, latent), and so on.
        """
        draws = torch.randn(count, self.prior.latent, generator=rng).to(features.device)
        encoded = torch.cat([self.encode(part).flatten(1) for part in draws.split(CHUNK)])
        distances = torch.cdist(features.flatten(1), encoded)
        order = distances.topk(best, dim=1, largest=False).indices
        return tuple(draws[column] for column in order.T)


def reciprocal(values: Tensor) -> Tensor:
    """Return 1 / values, and 0 for values that are not positive."""
    return torch.where(values > 0, 1 / values, 0.0)
