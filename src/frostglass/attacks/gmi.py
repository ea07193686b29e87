"""GMI: generative model inversion."""

from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor

from frostglass.attacks.base import Attack, Recipe, attacks
from frostglass.attacks.objective import LOSSES, LossName, margin
from frostglass.attacks.search import OptimizerName, descend
from frostglass.attacks.start import Pool, fresh
from frostglass.checks import parameters
from frostglass.priors.base import Prior
from frostglass.types import Capability, View


@attacks.register
@parameters
class Gmi(Attack):
    """Generative model inversion: gradient descent in the latent space of a GAN, on the class loss and the critic's opinion.

    L(z) = (λ · loss(T(G(z)), y) - w · D(G(z))) / B; v ← μv - ηg, z ← z - μv_old + (1 + μ)v, then z is clamped to [-c, c].

    Paper: Zhang et al., The Secret Revealer, CVPR 2020, arXiv 1911.07135.
    Differs: the published losses are means over a batch, so the step of one latent depends on how many share its batch; here the
        batch size is the constant `coupling` and latents are independent. The published code keeps the seed with the best target logit
        (`keep = 1`; here the best margin), its followers keep all five (`keep = 5`). `pool`, `optimizer = "adam"` and the losses other than "ce" are
        additions found in later attacks; the defaults are the published form.

    Args:
        loss: "ce" (published), "logit", "margin" or "poincare".
        weight: λ, the weight of the class loss.
        critic_weight: w, the weight of the critic; 0 needs no critic.
        coupling: B, the published batch size; 60 in the KED and BiDO code, 100 in GMI's.
        optimizer: "nesterov" (published) or "adam".
        lr: step size η. steps: iterations; published 1500 to 3000. momentum: μ.
        clamp: c, the box for latents; 0 leaves them free.
        candidates: latents tried per identity. keep: how many of them are returned, best target margin first.
        pool: start from the best of this many random draws, scored once for all identities; 0 starts anywhere.
        batch: latents searched together, rounded up to a multiple of 16; does not change the result.
        samples: passes through the target averaged at each look; above 1 it sees through the noise of defenses such as MID.
    """

    loss: LossName = "ce"
    weight: Annotated[float, Field(ge=0)] = 100.0
    critic_weight: Annotated[float, Field(ge=0)] = 1.0
    coupling: Annotated[int, Field(ge=1)] = 60
    optimizer: OptimizerName = "nesterov"
    lr: Annotated[float, Field(gt=0)] = 0.02
    momentum: Annotated[float, Field(gt=0, lt=1)] = 0.9
    steps: Annotated[int, Field(ge=0)] = 1500
    clamp: Annotated[float, Field(ge=0)] = 1.0
    candidates: Annotated[int, Field(ge=1)] = 5
    keep: Annotated[int, Field(ge=1)] = 5
    pool: Annotated[int, Field(ge=0)] = 0
    batch: Annotated[int, Field(ge=1)] = 64
    samples: Annotated[int, Field(ge=1)] = 1

    access: ClassVar[tuple[Capability, ...]] = ("gradients",)

    def __post_init__(self) -> None:
        if self.keep > self.candidates:
            raise ValueError(f"keep ({self.keep}) must not exceed candidates ({self.candidates})")
        if self.pool and self.pool < self.candidates:
            raise ValueError(f"pool ({self.pool}) must be 0 or at least candidates ({self.candidates})")

    def problems(self, view: View, prior: Prior) -> list[str]:
        return (
            ["gmi.critic_weight is not 0 and the prior has no critic: set it to 0"] if self.critic_weight and prior.critic is None else []
        )

    def recipe(self, view: View, prior: Prior, *, seed: int) -> Recipe:
        pool = Pool(view, prior, self.pool, seed=seed) if self.pool else None
        class_loss, critic = LOSSES[self.loss], prior.critic

        def start(labels: Tensor) -> Tensor:
            return pool.best(labels, self.candidates) if pool else fresh(prior, labels, self.candidates, seed=seed, purpose="gmi")

        def search(latents: Tensor, labels: Tensor) -> Tensor:
            def objective(z: Tensor) -> Tensor:
                images = prior.images(z)
                value = self.weight * class_loss(view.logits(images), labels)
                if self.critic_weight and critic is not None:
                    value = value - self.critic_weight * critic(images)[:, 0]
                return value / self.coupling

            return descend(
                latents, objective, steps=self.steps, lr=self.lr, optimizer=self.optimizer, momentum=self.momentum,
                project=(lambda z: z.clamp(-self.clamp, self.clamp)) if self.clamp else (lambda z: z),
            )  # fmt: skip

        return Recipe(start, search, rank=lambda images, labels: -margin(view.logits(images), labels))
