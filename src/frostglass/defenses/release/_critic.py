"""The critic that Crafter and Crafter-z play against."""

import torch
from torch import Tensor

from frostglass.networks.dcgan import build_critic
from frostglass.priors.wgan import gradient_penalty
from frostglass.runtime.seeding import seeded
from frostglass.runtime.tensors import (
    optimizer_tensors,
    restore_optimizer,
    under_prefix,
    with_prefix,
)


class DistributionCritic:
    """A critic trained to tell inverted images from draws of the prior, `real`; one per batch.

    Its loss is mean D(inverted) - mean D(real) + penalty · GP, the penalty doubled where GP > 1.
    """

    def __init__(
        self, real: Tensor, *, width: int, lr: float, batch: int, penalty: float, seed: int
    ):
        with seeded(seed, "critic"):
            self.network = build_critic(width, real.shape[1], real.shape[2]).to(real.device)
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=lr)
        self.real = real
        self.batch = batch
        self.penalty = penalty

    def train(self, inverted: Tensor, steps: int, rng: torch.Generator) -> float:
        """Take steps on `batch` images of each kind; return mean D(real) - mean D(inverted)."""
        gap = torch.zeros(())
        for _ in range(steps):
            real = self.real[torch.randint(len(self.real), (self.batch,), generator=rng)]
            fake = inverted[torch.randint(len(inverted), (self.batch,), generator=rng)]
            # One pass for both: the critic normalises each image on its own.
            real_scores, fake_scores = self.network(torch.cat([real, fake])).chunk(2)
            steepness = gradient_penalty(self.network, real, fake, rng)
            weight = self.penalty * (1 + (steepness.detach() > 1))
            gap = real_scores.mean() - fake_scores.mean()
            self.optimizer.zero_grad(set_to_none=True)
            (weight * steepness - gap).backward()
            self.optimizer.step()
        return gap.item()

    def scores(self, images: Tensor) -> Tensor:
        """Return D of each image, (N,), larger for images that look like draws."""
        return self.network(images)[:, 0]

    def distance(self, inverted: Tensor) -> float:
        """Return mean D(real) - mean D(inverted): this critic's estimate of the index of ε-PII."""
        with torch.no_grad():
            return (self.scores(self.real).mean() - self.scores(inverted).mean()).item()

    def tensors(self) -> dict[str, Tensor]:
        return with_prefix("network", self.network.state_dict()) | with_prefix(
            "optimizer", optimizer_tensors(self.optimizer)
        )

    def restore(self, tensors: dict[str, Tensor]) -> None:
        self.network.load_state_dict(under_prefix("network", tensors))
        restore_optimizer(self.optimizer, under_prefix("optimizer", tensors))
