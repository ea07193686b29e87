"""PGD: several small steps along the sign of the gradient, from a random start."""

from typing import ClassVar

import torch
from torch import Tensor

from frostglass.core.parameters import parameters
from frostglass.robustness.base import Victims, threats
from frostglass.robustness.methods._sign_steps import IteratedSteps


@threats.register
@parameters
class Pgd(IteratedSteps):
    """Projected gradient descent: BIM from a random place within ε of the image.

    x ← clip(x + α · sign(∇ loss(T(x), y))) to [x₀ - ε, x₀ + ε] and [0, 1], from x₀ + U(-ε, ε) on.

    Use: the usual test of adversarial examples.
    Paper: Madry et al., Towards Deep Learning Models Resistant to Adversarial Attacks, ICLR 2018,
        arXiv 1706.06083; used by CALoR, Appendix F.
    Differs: one random start. `step_size` and `steps` are those of common libraries, 2/255 and 10;
        CALoR's are not known here.
    """

    title: ClassVar[str] = "PGD"

    def start(self, victims: Victims, *, seed: int) -> Tensor:
        images, rngs = victims.images, victims.rngs(seed, self.name)
        noise = torch.stack([torch.rand(images.shape[1:], generator=rng) for rng in rngs])
        return (images + self.epsilon * (2 * noise.to(images.device) - 1)).clamp(0, 1)
