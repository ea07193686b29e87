"""What an attacker knows of the world before touching a target: a generator learned on public images."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from frostglass.core.errors import ConfigError
from frostglass.core.types import Shape
from frostglass.runtime.device import device_of

UNKNOWN = "not known: nobody can check that the attacked people are not among those this generator was trained on"  # info["seen_identities"] of priors made elsewhere
Condition = Literal["", "label", "hint"]


@dataclass(frozen=True)
class Prior:
    """A generator of images in [0, 1] from standard normal latents, perhaps with the critic that trained it.

    `critic(images)` (N, 1) is larger the more real an image looks. `saw` holds a hash of every identity whose pictures it was trained on; `tied_to`
    the key of the target it was fitted to, if any, and `classes` how many classes that has. What the generator takes beside latents is its
    `condition`: nothing, a class label, or a hint, a row of `hints` (K, ...) for each class. `students` are networks that imitate the target,
    `features` (2, F) mean and standard deviation of the target's penultimate features on public pictures.
    """

    generator: nn.Module
    critic: nn.Module | None
    latent: int
    image_shape: Shape
    seen_identities: Tensor
    info: Mapping[str, Any] = field(default_factory=dict)
    tied_to: str | None = None
    classes: int = 0
    condition: Condition = ""
    hints: Tensor | None = None
    students: tuple[nn.Module, ...] = ()
    features: Tensor | None = None
    key: str = ""

    @property
    def modules(self) -> list[nn.Module]:
        """Every network of the prior."""
        return [self.generator, *([self.critic] if self.critic is not None else []), *self.students]

    @property
    def blocks(self) -> int:
        """How many blocks a StyleGAN2 can be entered at, each with two layers of styles; other generators have none."""
        return getattr(self.generator, "style_blocks", 0)

    def draw(self, *generators: torch.Generator) -> Tensor:
        """One latent from each (CPU) generator, (N, latent), on the generator network's device."""
        return torch.stack(
            [torch.randn(self.latent, generator=generator) for generator in generators]
        ).to(device_of(self.generator))

    def images(self, latents: Tensor, labels: Tensor | None = None) -> Tensor:
        """Pictures for latents (N, latent), float32 in [0, 1], differentiable; a conditional generator makes them for `labels` (N,)."""
        if not self.condition:
            return self.generator(latents)
        if labels is None or (self.condition == "hint" and self.hints is None):
            missing = (
                "labels"
                if labels is None
                else "hints: bind them with dataclasses.replace(prior, hints=frostglass.priors.context.hints_of(prior.info, pictures))"
            )
            raise ConfigError(
                f"the generator makes pictures of a given {self.condition}, and got no {missing}"
            )
        return self.generator(latents, labels if self.hints is None else self.hints[labels])

    def realism(self, images: Tensor) -> Tensor:
        """The critic's opinion of each picture, (N,)."""
        if self.critic is None:
            raise ConfigError("the prior has no critic: set attack.critic_weight to 0")
        return self.critic(images)[:, 0]
