"""What an attacker, or a protection, has of the world besides the view."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from frostglass.core.errors import ConfigError
from frostglass.core.prior import Prior
from frostglass.core.types import Images, Target

Asset = Literal["prior", "amortizer", "embedder", "perceptual"]


@dataclass(frozen=True)
class Assets:
    """Public images of other people, and what was learned from them.

    `prior` generates images from latents. `amortizer` predicts the latent (N, latent) behind a
    feature of one encoder. `embedder` tells people apart: its penultimate features are the
    embedding. `perceptual` is another network whose layers compare images.
    """

    public: Images | None = None
    prior: Prior | None = None
    amortizer: Callable[[Tensor], Tensor] | None = None
    embedder: Target | None = None
    perceptual: Target | None = None

    @property
    def modules(self) -> list[nn.Module]:
        """Every network among the assets."""
        targets = [target.module for target in (self.embedder, self.perceptual) if target]
        amortizer = [self.amortizer] if isinstance(self.amortizer, nn.Module) else []
        return [*(self.prior.modules if self.prior else []), *targets, *amortizer]

    def missing(self, needs: frozenset[Asset], user: str) -> list[str]:
        """Describe each needed asset that is missing."""
        given = {
            "prior": self.prior,
            "amortizer": self.amortizer,
            "embedder": self.embedder,
            "perceptual": self.perceptual,
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
