"""The contract of threats other than inversion: changed images, and poisoned training images."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from frostglass.core.method import Method
from frostglass.core.parameters import parameters
from frostglass.core.registry import Registry
from frostglass.core.types import Capability, Shape
from frostglass.core.views import ModelView
from frostglass.runtime.seeding import generator_for

CHUNK = 128  # images shown to the target together

# The attacks of CALoR's Appendix F, measured if a config names no threats.
DEFAULTS: tuple[dict[str, Any], ...] = (
    {"name": "fgsm"},
    {"name": "pgd"},
    {"name": "bim"},
    {"name": "one_pixel"},
    {"name": "fgsm", "targeted": True},
    {"name": "pgd", "targeted": True},
    {"name": "bim", "targeted": True},
    {"name": "one_pixel", "targeted": True},
    {"name": "badnets"},
    {"name": "blended"},
)


@dataclass(frozen=True)
class Victims:
    """Images (N, C, H, W) in [0, 1] to change, their classes, and what they are to be taken for.

    `goals` is None if any class but the right one will do. `numbers` (N,) are places in the set of
    all images: random draws depend on them, not on the batch.
    """

    images: Tensor
    labels: Tensor
    goals: Tensor | None
    numbers: Tensor

    def rngs(self, seed: int, purpose: str) -> list[torch.Generator]:
        """Return a random generator for each image."""
        return [generator_for(seed, purpose, number) for number in self.numbers.tolist()]

    def at(self, rows: Tensor) -> "Victims":
        """Return some of the images."""
        goals = None if self.goals is None else self.goals[rows]
        return Victims(self.images[rows], self.labels[rows], goals, self.numbers[rows])


class Threat(Method):
    """A frozen set of parameters that changes images so that a classifier errs.

    `access` is what the attacker may ask of the target. Inherit `Evasion` or `Backdoor`.
    """

    access: ClassVar[tuple[Capability, ...]] = ("labels",)

    @property
    def label(self) -> str:
        """What tables call this threat."""
        return self.display_title

    def problems(self, image_shape: Shape, classes: int) -> list[str]:
        """List what keeps the threat from images of this shape and this number of classes."""
        return []

    @abstractmethod
    def goals(self, labels: Tensor, classes: int, *, seed: int) -> Tensor | None:
        """Return the class each image is to be taken for, (N,); None for any but its own."""

    @abstractmethod
    def suits(self, said: Tensor, labels: Tensor, goals: Tensor | None) -> Tensor:
        """Return which images to try, (N,), given the classes that the model says."""

    @abstractmethod
    def perturb(self, view: ModelView, victims: Victims, *, seed: int) -> Tensor:
        """Return changed copies of the images, in [0, 1]."""


@parameters
class Evasion(Threat):
    """Base of adversarial examples: images that are changed after the training.

    Args:
        targeted: make the target say a certain class; else any but the right one.
        target_class: number of that class, from 0; by default another one at random for each image.
    """

    targeted: bool = False
    target_class: Annotated[int, Field(ge=0)] | None = None

    def __post_init__(self) -> None:
        if self.target_class is not None and not self.targeted:
            raise ValueError(
                f"target_class: {self.target_class} is used by targeted attacks alone: set "
                "targeted = true, or leave it out"
            )

    @property
    def label(self) -> str:
        return f"{self.display_title}, targeted" if self.targeted else self.display_title

    def problems(self, image_shape: Shape, classes: int) -> list[str]:
        return [] if self.target_class is None else missing_class(self.target_class, classes)

    def goals(self, labels: Tensor, classes: int, *, seed: int) -> Tensor | None:
        if not self.targeted:
            return None
        if self.target_class is not None:
            return torch.full_like(labels, self.target_class)
        rng = generator_for(seed, "goals")  # the same for all methods
        others = torch.randint(1, classes, (len(labels),), generator=rng)
        return (labels + others.to(labels.device)) % classes

    def suits(self, said: Tensor, labels: Tensor, goals: Tensor | None) -> Tensor:
        right = said == labels
        return right if goals is None else right & (goals != labels)


@parameters
class Backdoor(Threat):
    """Base of backdoors: some training images get a trigger and the label of one class.

    A model trained on them says this class whenever it sees the trigger. Which images are poisoned
    is drawn with the seed, among those of the other classes.

    Args:
        rate: share of the training images that is poisoned.
        target_class: number of the class, from 0, that the trigger stands for.
    """

    rate: Annotated[float, Field(gt=0, lt=1)] = 0.01
    target_class: Annotated[int, Field(ge=0)] = 0

    def problems(self, image_shape: Shape, classes: int) -> list[str]:
        return missing_class(self.target_class, classes)

    def goals(self, labels: Tensor, classes: int, *, seed: int) -> Tensor | None:
        return torch.full_like(labels, self.target_class)

    def suits(self, said: Tensor, labels: Tensor, goals: Tensor | None) -> Tensor:
        return labels != self.target_class

    def perturb(self, view: ModelView, victims: Victims, *, seed: int) -> Tensor:
        # As in training, the trigger goes through the bytes of an image file.
        return self.stamp(victims.images, seed=seed).mul(255).round().div(255)

    @abstractmethod
    def stamp(self, images: Tensor, *, seed: int) -> Tensor:
        """Return copies of images (N, C, H, W) in [0, 1] with the trigger of this seed."""


def missing_class(number: int, classes: int) -> list[str]:
    """Return the problem of a class that does not exist."""
    if number < classes:
        return []
    return [
        f"target_class: expected the number of a class, 0 to {classes - 1}, got {number}: lower it"
    ]


threats = Registry("threat", "frostglass.robustness.methods", contract=Threat)
