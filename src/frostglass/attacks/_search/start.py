"""Where an attack starts: latents drawn by derived seeds, so that no draw depends on batches, shards or restarts."""

import torch
from torch import Tensor

from frostglass.core.prior import Prior
from frostglass.core.views import ModelView
from frostglass.runtime.device import device_of
from frostglass.runtime.seeding import generator_for

POOL_CHUNK = 256  # fixed, because rounding may depend on the batch size


def fresh(prior: Prior, labels: Tensor, candidates: int, *, seed: int, purpose: str) -> Tensor:
    """Independent draws, (I, K, latent): the draw for (identity, candidate) is the same in any company."""
    return torch.stack([
        prior.draw(*(generator_for(seed, purpose, label, candidate) for candidate in range(candidates))) for label in labels.tolist()
    ])  # fmt: skip


def at_zero(prior: Prior, labels: Tensor, candidates: int) -> Tensor:
    """The middle of the latent space for everybody, (I, K, latent): where distributions begin."""
    return torch.zeros(len(labels), candidates, prior.latent, device=device_of(prior.generator))


class Pool:
    """Latents drawn once and scored once for all classes; each identity starts from those its class likes best."""

    def __init__(self, view: ModelView, prior: Prior, size: int, *, seed: int):
        self.latents = torch.randn(size, prior.latent, generator=generator_for(seed, "pool")).to(
            device_of(prior.generator)
        )
        with torch.no_grad():
            # The logit margin ranks as the probability does, without its rounding to 0 and 1.
            logits = torch.cat(
                [view.logits(prior.images(part)) for part in self.latents.split(POOL_CHUNK)]
            ).cpu()
        top = logits.topk(2, dim=1)
        rival = torch.where(
            top.indices[:, :1] == torch.arange(logits.shape[1]),
            top.values[:, 1:],
            top.values[:, :1],
        )
        self.margins = logits - rival

    def best(self, labels: Tensor, candidates: int) -> Tensor:
        """For each label the `candidates` latents with the largest margin, (I, K, latent)."""
        chosen = self.margins[:, labels].topk(candidates, dim=0).indices.T
        return self.latents[chosen.to(self.latents.device)]
