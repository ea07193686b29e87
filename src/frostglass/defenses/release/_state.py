"""The state of one batch of images while its features are crafted."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from frostglass.defenses.release._critic import DistributionCritic
from frostglass.defenses.release._inversion import Inversion
from frostglass.runtime.tensors import (
    optimizer_tensors,
    restore_optimizer,
    under_prefix,
    with_prefix,
)

TENSORS = ("start", "first_latents", "latents", "curvature", "direction", "anchor")


@dataclass
class CraftState:
    """One batch of images: networks, plain features, and what the optimizer has reached.

    `variable` is what the optimizer changes, `anchor` its value at the last check for convergence.
    The anticipated inversion starts at `start`, found `first_latents` for the `plain` features, and
    finds `latents` for the features crafted so far; `curvature` (N,) is the largest so far, the
    last one along `direction`. `steps` counts steps.
    """

    inversion: Inversion
    critic: DistributionCritic
    plain: Tensor
    amortizer: Callable[[Tensor], Tensor] | None
    start: Tensor
    first_latents: Tensor
    latents: Tensor
    curvature: Tensor
    direction: Tensor
    variable: Tensor
    anchor: Tensor
    optimizer: torch.optim.Optimizer
    steps: int = 0
    converged: bool = False
    facts: dict[str, Any] = field(default_factory=dict)

    def optimize_from(self, value: Tensor, lr: float) -> None:
        """Let a new optimizer change a copy of `value`."""
        self.variable = value.detach().clone().requires_grad_()
        self.anchor = value.detach().clone()
        self.optimizer = torch.optim.Adam([self.variable], lr=lr)

    def images(self, latents: Tensor) -> Tensor:
        with torch.no_grad():
            return self.inversion.prior.images(latents)

    def initial_latents(self, features: Tensor) -> Tensor:
        """Return the latents at which a new inversion of features starts."""
        if self.amortizer is None:
            return self.start
        with torch.no_grad():
            return self.amortizer(features)

    def raise_curvature(self, curvature: Tensor, direction: Tensor) -> None:
        """Keep the largest curvature of each row: a lower one could make the descent diverge."""
        self.curvature, self.direction = torch.maximum(self.curvature, curvature), direction

    def checkpoint(self, batch: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors = {name: getattr(self, name) for name in TENSORS}
        tensors["variable"] = self.variable.detach()
        tensors |= with_prefix("optimizer", optimizer_tensors(self.optimizer))
        tensors |= with_prefix("critic", self.critic.tensors())
        values = {"steps": self.steps, "converged": self.converged, "facts": self.facts}
        return tensors, {"batch": batch, **values}

    def restore(self, tensors: dict[str, Tensor], values: Mapping[str, Any], lr: float) -> None:
        self.optimize_from(tensors["variable"].to(self.plain.device), lr)
        for name in TENSORS:
            setattr(self, name, tensors[name].to(self.plain.device))
        restore_optimizer(self.optimizer, under_prefix("optimizer", tensors))
        self.critic.restore(under_prefix("critic", tensors))
        self.steps, self.converged = values["steps"], values["converged"]
        self.facts = dict(values["facts"])
