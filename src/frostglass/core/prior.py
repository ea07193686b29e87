"""The prior of an attacker: a generator of images, trained on public images."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from frostglass.core.display import image_grid, image_tag
from frostglass.core.errors import ConfigError
from frostglass.core.types import Shape
from frostglass.runtime.device import device_of

# info["seen_identities"] of generators trained elsewhere, or on images without identities
UNKNOWN = (
    "unknown: nobody can check whether the attacked people are among those this generator was "
    "trained on"
)
Condition = Literal["", "label", "hint"]


@runtime_checkable
class _Blocks(Protocol):
    """A generator with blocks of style layers."""

    style_blocks: int


@dataclass(frozen=True)
class ScoredDraws:
    """Draws of a prior that the target was asked about, and its answers.

    `scores` (N, K) are those of the images of `latents` (N, latent), whose styles were moved to
    their mean by `truncation` ψ in the first `cutoff` layers.
    """

    latents: Tensor
    scores: Tensor
    truncation: float = 1.0
    cutoff: int = 0


@dataclass(frozen=True)
class Prior:
    """A generator of images in [0, 1] from standard normal latents, perhaps with its critic.

    `critic(images)` (N, 1) is larger the more real an image looks. `seen_identities` holds a hash
    of every identity it was trained on. `tied_to` is the key of the target it was fitted to, if
    any, and `classes` the number of that target's classes. `condition` is what the generator takes
    beside latents: nothing, a class label, or a hint, a row of `hints` (K, ...) for each class.
    `students` are networks that imitate the target, `features` (2, F) mean and standard deviation
    of the target's penultimate features on public images, `scored` the draws that students learned
    from, if the target scored no other images.
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
    scored: ScoredDraws | None = None
    key: str = ""

    def __repr__(self) -> str:
        name = self.info.get("method", {}).get("name", type(self.generator).__name__)
        size = "×".join(map(str, self.image_shape))
        return f"Prior({name}, latent {self.latent}, images {size})"

    def _repr_html_(self) -> str:
        if self.condition:  # nothing to show without a class or a hint
            return f"<p>{self!r}</p>"
        with torch.no_grad():
            images = self.images(self.draw(*[torch.Generator().manual_seed(0)] * 16))
        return f"<p>{self!r}</p>{image_tag(image_grid(images, columns=8), alt='draws')}"

    @property
    def modules(self) -> list[nn.Module]:
        """Every network of the prior."""
        return [self.generator, *([self.critic] if self.critic is not None else []), *self.students]

    @property
    def blocks(self) -> int:
        """Number of blocks of a StyleGAN2, each with two style layers; 0 for other generators."""
        return self.generator.style_blocks if isinstance(self.generator, _Blocks) else 0

    def draw(self, *generators: torch.Generator) -> Tensor:
        """Draw a latent from each (CPU) generator, (N, latent), on the network's device."""
        latents = torch.stack([torch.randn(self.latent, generator=rng) for rng in generators])
        return latents.to(device_of(self.generator))

    def images(self, latents: Tensor, labels: Tensor | None = None) -> Tensor:
        """Generate images of latents (N, latent), differentiably, given `labels` (N,) if needed."""
        if not self.condition:
            return self.generator(latents)
        if labels is None or (self.condition == "hint" and self.hints is None):
            missing = (
                "labels"
                if labels is None
                else (
                    "hints: bind them with dataclasses.replace(prior, hints="
                    "frostglass.priors.context.hints_of(prior.info, images))"
                )
            )
            raise ConfigError(f"the generator needs a {self.condition} per image, got no {missing}")
        return self.generator(latents, labels if self.hints is None else self.hints[labels])

    def realism(self, images: Tensor) -> Tensor:
        """Return the critic's score of each image, (N,)."""
        if self.critic is None:
            raise ConfigError("the prior has no critic: set attack.critic_weight to 0")
        return self.critic(images)[:, 0]
