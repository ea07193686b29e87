"""Trap-MID: trapdoors that mislead an attack."""

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import Field

from frostglass.core.parameters import parameters
from frostglass.core.types import Images, Target
from frostglass.defenses.base import Defense, Opponent, TrainingSize, defenses
from frostglass.defenses.strengths import Range, Real
from frostglass.defenses.training._trapdoors import Trapdoors, TrapdoorSettings


@defenses.register
@parameters
class TrapMid(Defense):
    """Trapdoors: any image with the trigger of class y is called y, a shortcut for an attack.

    Each class has a trigger κ_y, noise at first. The network minimises
    (1 - β) CE(f(x), y) + β CE(f(x'), y') with x' = (1 - α) x + α κ_y' and y' any class, whatever
    x shows. Before each of its steps a discriminator D learns to tell x' from x, and the triggers
    take a step by the sign of the gradient of CE(f(x'), y') - ln D(x'), so that they work and stay
    unseen. An inversion then finds triggers, which are easier to find than faces. Triggers are no
    part of the network, and are discarded after training. Whether they work is in the target's
    `facts`: `trapdoor_success` is the share of public images that are called y' with the trigger
    of y'.

    Use: a long training: read `trapdoor_success`, raise `alpha` if it is low, and audit with
        several attacks: in our trials GMI found few people at 0.1, and PPA most.
    Cost: an epoch takes about 5 times as long: two more networks' passes a step.
    Paper: Liu, Chen, Trap-MID: Trapdoor-based Defense against Model Inversion Attacks, NeurIPS
        2024, arXiv 2411.08460.
    Differs: the objective is divided by 1 - β, so that it can be combined with other losses. The
        published code crops, mirrors and rotates images after the trigger is blended in; here the
        recipe's augmentation comes before, and triggers stay upright. The discriminator is a copy
        of the network with one output, as published; it is trained by Adam, there by the network's
        optimiser. Its variants that read features are not here. Triggers smaller than the image
        are an addition.

    Args:
        alpha: α, how visible a trigger is; published 0.02.
        beta: β, the share of the trapdoors in the loss; published 0.2, 0 disables the defense.
        step: step of the triggers by the sign of their gradient, published 0.01; 0 keeps the
            noise they begin with, and needs no discriminator (a choice of the published code).
        discriminator: train a discriminator, so that triggers stay unseen (published).
        discriminator_lr: its step size.
        size: side of a trigger in pixels, in the lower right corner; the whole image by default
            (published).
    """

    alpha: Annotated[float, Field(gt=0, le=1)] = 0.02
    beta: Annotated[float, Field(ge=0, lt=1)] = 0.2
    step: Annotated[float, Field(ge=0, le=1)] = 0.01
    discriminator: bool = True
    discriminator_lr: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-3
    size: Annotated[int, Field(ge=1)] | None = None

    title = "Trap-MID"
    disabled: ClassVar = {"beta": 0.0}
    adaptive: ClassVar = ("students",)

    @classmethod
    def strengths(cls, classes: int, secret: int) -> Mapping[str, Range]:
        return {"alpha": Real(0.01, 0.2, log=True), "beta": Real(0.05, 0.5)}

    def couples_samples(self) -> bool:
        return self.beta > 0  # a trigger learns from several images

    def problems(self, target: Target, size: TrainingSize) -> list[str]:
        height, width = target.image_shape[1:]
        if not self.beta or self.size is None or self.size <= min(height, width):
            return []
        return [
            f"a trigger of {self.size} pixels is larger than the images, {height}×{width}: "
            f"set size to at most {min(height, width)}, or leave it out for the whole image"
        ]

    def opponent(
        self, target: Target, public: Images, perceptual: Target | None, *, seed: int
    ) -> Opponent | None:
        if not self.beta:
            return None
        settings = TrapdoorSettings(
            visibility=self.alpha,
            weight=self.beta / (1 - self.beta),
            side=self.size,
            step=self.step,
            discriminator_lr=self.discriminator_lr if self.discriminator and self.step else None,
        )
        return Trapdoors(settings, target, public, seed=seed)
