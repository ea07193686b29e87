"""Steps along the sign of the gradient, inside a box around each image."""

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from frostglass.core.errors import RunError
from frostglass.core.objective import LOSSES
from frostglass.core.parameters import parameters
from frostglass.core.types import Capability
from frostglass.core.views import ModelView
from frostglass.robustness.base import Evasion, Victims

Length = Annotated[float, Field(gt=0, le=1)]


@parameters
class SignSteps(Evasion):
    """Base of attacks that step along the sign of the gradient.

    Args:
        epsilon: the most that a pixel may change; pixels are in [0, 1], so 8/255 is 0.0314.
        loss: "ce", the published cross-entropy, or "margin", max_{j≠y} l_j - l_y, whose gradient
            does not vanish where the target is very confident.
    """

    epsilon: Length = 8 / 255
    loss: Literal["ce", "margin"] = "ce"
    access: ClassVar[tuple[Capability, ...]] = ("gradients",)

    def step(self, view: ModelView, victims: Victims, start: Tensor, size: float) -> Tensor:
        """Move `start` by one step, and clip it to the box around the images and to [0, 1]."""
        current, images = start.detach().requires_grad_(), victims.images
        aims = victims.labels if victims.goals is None else victims.goals
        losses = LOSSES[self.loss](view.logits(current), aims)
        (gradient,) = torch.autograd.grad(losses.sum(), current)
        if not gradient.isfinite().all():
            raise RunError(
                f"{self.name}: the target's gradient is not finite: check its weights and the "
                "range of its inputs"
            )
        direction = -gradient.sign() if self.targeted else gradient.sign()
        moved = current.detach() + size * direction
        return moved.clamp(images - self.epsilon, images + self.epsilon).clamp(0, 1)


@parameters
class IteratedSteps(SignSteps):
    """Base of attacks of several steps.

    Args:
        step_size: α, the change of a pixel in one step.
        steps: number of steps.
    """

    step_size: Length = 2 / 255
    steps: Annotated[int, Field(ge=1)] = 10

    def start(self, victims: Victims, *, seed: int) -> Tensor:
        """Return where the search begins."""
        return victims.images

    def perturb(self, view: ModelView, victims: Victims, *, seed: int) -> Tensor:
        current = self.start(victims, seed=seed)
        for _ in range(self.steps):
            current = self.step(view, victims, current, self.step_size)
        return current
