"""How latents move: one loop for every attack that follows gradients."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from frostglass.errors import RunError

OptimizerName = Literal["nesterov", "adam"]
CHECK_EVERY = 50  # a look at the loss for non-finite values, rarely enough to cost nothing


def descend(
    latents: Tensor,
    loss: Callable[[Tensor], Tensor],
    *,
    steps: int,
    lr: float,
    optimizer: OptimizerName = "adam",
    momentum: float = 0.9,
    project: Callable[[Tensor], Tensor] = lambda z: z,
) -> Tensor:
    """Minimise a per-sample loss over latents; samples never influence each other, whoever shares the batch.

    `nesterov` is v ← μv - ηg, z ← z - μv_old + (1 + μ)v; `adam` has torch's default betas. After each step z ← project(z); the optimiser's
    own memory is left alone.
    """
    z = latents.detach().clone().requires_grad_()
    if optimizer == "nesterov":
        rule: torch.optim.Optimizer = torch.optim.SGD([z], lr=lr, momentum=momentum, nesterov=True)
    else:
        rule = torch.optim.Adam([z], lr=lr)
    for step in range(steps):
        value = loss(z).sum()
        (z.grad,) = torch.autograd.grad(value, z)
        rule.step()
        with torch.no_grad():
            z.copy_(project(z))
        if (step + 1) % CHECK_EVERY == 0 or step + 1 == steps:
            _check(value, z, step)
    return z.detach()


def _check(value: Tensor, z: Tensor, step: int) -> None:
    if not (value.isfinite() and z.isfinite().all()):
        raise RunError(
            f"the attack's loss is not finite at step {step}: lower attack.lr or choose another attack.loss; finished identities are kept"
        )
