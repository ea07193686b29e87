"""The critic that Crafter and Crafter-z play against."""

import torch
from torch import Tensor

from frostglass.priors.wgan import build_critic, gradient_penalty
from frostglass.runtime.seeding import seeded
from frostglass.runtime.tensors import (
    optimizer_tensors,
    restore_optimizer,
    under_prefix,
    with_prefix,
)


class Judge:
    """A critic that learns to tell the pictures an inversion finds from draws of the prior, `real`; a fresh one for each batch of pictures.

    Its loss is mean D(found) - mean D(real) + penalty · GP, the penalty doubled where GP > 1.
    """

    def __init__(
        self, real: Tensor, *, width: int, lr: float, batch: int, penalty: float, seed: int
    ):
        with seeded(seed, "critic"):
            self.network = build_critic(width, real.shape[1], real.shape[2]).to(real.device)
        self.rule = torch.optim.Adam(self.network.parameters(), lr=lr)
        self.real = real
        self.batch = batch
        self.penalty = penalty

    def learn(self, found: Tensor, steps: int, rng: torch.Generator) -> float:
        """Some steps on `batch` pictures of each kind; returns how far apart it saw them in the last."""
        gap = torch.zeros(())
        for _ in range(steps):
            some = self.real[torch.randint(len(self.real), (self.batch,), generator=rng)]
            others = found[torch.randint(len(found), (self.batch,), generator=rng)]
            real, fake = self.network(torch.cat([some, others])).chunk(
                2
            )  # one pass for both: its norms see one picture at a time
            steepness = gradient_penalty(self.network, some, others, rng)
            weight = self.penalty * (1 + (steepness.detach() > 1))
            gap = real.mean() - fake.mean()
            self.rule.zero_grad(set_to_none=True)
            (weight * steepness - gap).backward()
            self.rule.step()
        return gap.item()

    def opinion(self, pictures: Tensor) -> Tensor:
        """D of each picture, (N,), larger the more it looks like a draw."""
        return self.network(pictures)[:, 0]

    def distance(self, found: Tensor) -> float:
        """mean D(real) - mean D(found): the earth mover's distance as far as this critic sees it, the index of ε-PII."""
        with torch.no_grad():
            return (self.opinion(self.real).mean() - self.opinion(found).mean()).item()

    def tensors(self) -> dict[str, Tensor]:
        return with_prefix("network", self.network.state_dict()) | with_prefix(
            "rule", optimizer_tensors(self.rule)
        )

    def restore(self, tensors: dict[str, Tensor]) -> None:
        self.network.load_state_dict(under_prefix("network", tensors))
        restore_optimizer(self.rule, under_prefix("rule", tensors))
