"""What an attacker, or a protection, has of the world besides the view."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from frostglass.core.errors import ConfigError
from frostglass.core.prior import Prior
from frostglass.core.types import Images, Target

Asset = Literal["prior", "amortizer", "embedder", "perceptual", "attribute"]


@dataclass(frozen=True)
class KnownAttribute:
    """What an attacker knows of the attacked people: whether each has one binary attribute.

    `present` says so for every class of the target. `classifier` recognises the attribute, one of
    its `classes`; it was trained on public images.
    """

    name: str
    present: tuple[bool, ...]
    classifier: Target

    def logits(self, images: Tensor) -> Tensor:
        """Return the classifier's logit of the attribute, (N,); above 0 it is there."""
        column = self.classifier.classes.index(self.name)
        return self.classifier.outputs(images)[0][:, column]

    def problems(self, name: str, classes: int) -> list[str]:
        """List what keeps this from being the attribute `name` of the people of all classes."""
        problems = []
        if self.name != name:
            problems.append(
                f"expected to know the attribute {name!r}, got {self.name!r}: pass that one as "
                "Assets(attribute=...)"
            )
        if len(self.present) != classes:
            problems.append(
                f"expected the attribute {self.name!r} of each of {classes} classes, got "
                f"{len(self.present)} values: give one for each"
            )
        if self.name not in self.classifier.classes:
            known = ", ".join(self.classifier.classes) or "nothing"
            problems.append(
                f"expected a classifier of the attribute {self.name!r}, got one of {known}: train "
                "one on public images with that attribute"
            )
        return problems


@dataclass(frozen=True)
class Assets:
    """Public images of other people, and what was learned from them.

    `prior` generates images from latents. `amortizer` predicts the latent (N, latent) behind a
    feature of one encoder. `embedder` tells people apart: its penultimate features are the
    embedding. `perceptual` is another network whose layers compare images. `attribute` is side
    knowledge of the attacked people, which the pipeline hands over only to an attack that names it.
    """

    public: Images | None = None
    prior: Prior | None = None
    amortizer: Callable[[Tensor], Tensor] | None = None
    embedder: Target | None = None
    perceptual: Target | None = None
    attribute: KnownAttribute | None = None

    @property
    def modules(self) -> list[nn.Module]:
        """Every network among the assets."""
        known = self.attribute.classifier if self.attribute else None
        targets = [target.module for target in (self.embedder, self.perceptual, known) if target]
        amortizer = [self.amortizer] if isinstance(self.amortizer, nn.Module) else []
        return [*(self.prior.modules if self.prior else []), *targets, *amortizer]

    def missing(self, needs: frozenset[Asset], user: str) -> list[str]:
        """Describe each needed asset that is missing."""
        given = {
            "prior": self.prior,
            "amortizer": self.amortizer,
            "embedder": self.embedder,
            "perceptual": self.perceptual,
            "attribute": self.attribute,
        }
        return [
            f"{user} needs assets.{asset}, got none: pass Assets({asset}=...)"
            for asset in sorted(needs)
            if given[asset] is None
        ]

    def require_public(self) -> Images:
        if self.public is None or not len(self.public):
            raise ConfigError("public images are needed, got none: pass Assets(public=...)")
        return self.public

    def require_prior(self) -> Prior:
        if self.prior is None:
            raise ConfigError("a prior is needed, got none: pass Assets(prior=...)")
        return self.prior
