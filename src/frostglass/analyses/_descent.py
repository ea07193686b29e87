"""A plain attack by gradient, whose every step an analysis can look at."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from frostglass.core.errors import ConfigError, RunError
from frostglass.core.objective import LOSSES
from frostglass.core.prior import Prior
from frostglass.core.types import Target
from frostglass.runtime.device import device_of
from frostglass.runtime.freezing import frozen
from frostglass.runtime.seeding import generator_for

LossName = Literal["ce", "margin", "logit", "poincare"]


@dataclass(frozen=True)
class Search:
    """A search of latents (N, latent) for `labels` (N,), by Adam on the loss of a target."""

    target: Target
    prior: Prior
    labels: Tensor
    loss: LossName = "ce"
    lr: float = 0.05

    def images(self, latents: Tensor, labels: Tensor | None = None) -> Tensor:
        return self.prior.images(latents, self.labels if labels is None else labels)

    def losses(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return the loss of each image, (N,)."""
        logits = self.target.module(self.target.fit(images))
        return LOSSES[self.loss](logits, self.labels if labels is None else labels)

    def start(self, seed: int) -> Tensor:
        """Draw a latent for each label."""
        return self.prior.draw(
            *(generator_for(seed, "search", number) for number in range(len(self.labels)))
        )

    def visit(self, latents: Tensor, steps: Iterable[int]) -> Iterator[tuple[int, Tensor]]:
        """Yield the latents after each of some numbers of steps, in increasing order."""
        wanted = sorted(set(steps))
        latents = latents.clone().requires_grad_(True)
        optimizer = torch.optim.Adam([latents], self.lr)
        with frozen(self.target.module, *self.prior.modules):
            for number in range(wanted[-1] + 1):
                if number in wanted:
                    yield number, latents.detach().clone()
                loss = self.losses(self.images(latents)).sum()
                if not bool(loss.isfinite()):
                    raise RunError(f"the search's loss is not finite after {number} steps")
                (latents.grad,) = torch.autograd.grad(loss, latents)
                optimizer.step()


def people_labels(target: Target, people: int, classes: int) -> Tensor:
    """Return the first classes, as many as asked for."""
    if people > classes:
        raise ConfigError(f"people: expected at most {classes}, the private people, got {people}")
    return torch.arange(people, device=device_of(target.module))
