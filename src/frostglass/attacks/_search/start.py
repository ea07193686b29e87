"""Initial latents, drawn by derived seeds: no draw depends on batches, shards or restarts."""

import torch
from torch import Tensor

from frostglass.core.prior import Prior
from frostglass.core.views import ModelView
from frostglass.runtime.device import device_of
from frostglass.runtime.seeding import generator_for

POOL_CHUNK = 256  # fixed, because rounding may depend on the batch size


def fresh(prior: Prior, labels: Tensor, candidates: int, *, seed: int, purpose: str) -> Tensor:
    """Draw independent latents (I, K, latent), each seeded by its label and candidate number."""

    def of(label: int) -> Tensor:
        return prior.draw(*(generator_for(seed, purpose, label, k) for k in range(candidates)))

    return torch.stack([of(label) for label in labels.tolist()])


def at_zero(prior: Prior, labels: Tensor, candidates: int) -> Tensor:
    """Return the mean of the latent space for everybody, (I, K, latent)."""
    return torch.zeros(len(labels), candidates, prior.latent, device=device_of(prior.generator))


def pool_latents(prior: Prior, size: int, *, seed: int) -> Tensor:
    """Draw latents (size, latent) that serve all people."""
    latents = torch.randn(size, prior.latent, generator=generator_for(seed, "pool"))
    return latents.to(device_of(prior.generator))


class Pool:
    """Latents drawn and scored once for all classes, from which each person's starts are chosen."""

    def __init__(self, view: ModelView, prior: Prior, size: int, *, seed: int):
        self.latents = pool_latents(prior, size, seed=seed)
        with torch.no_grad():
            # The logit margin ranks as the probability does, without its rounding to 0 and 1.
            parts = self.latents.split(POOL_CHUNK)
            logits = torch.cat([view.logits(prior.images(part)) for part in parts]).cpu()
        top = logits.topk(2, dim=1)
        is_top = top.indices[:, :1] == torch.arange(logits.shape[1])
        self.margins = logits - torch.where(is_top, top.values[:, 1:], top.values[:, :1])

    def best(self, labels: Tensor, candidates: int) -> Tensor:
        """Return for each label the latents with the largest margin, (I, K, latent)."""
        chosen = self.margins[:, labels].topk(candidates, dim=0).indices.T
        return self.latents[chosen.to(self.latents.device)]
