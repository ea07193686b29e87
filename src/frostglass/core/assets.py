"""What somebody who faces features knows of the world besides them; a protector may know as much as an attacker."""

from dataclasses import dataclass
from typing import Literal

from torch import nn

from frostglass.core.errors import ConfigError
from frostglass.core.prior import Prior
from frostglass.core.types import Images, Target

Asset = Literal["prior", "amortizer", "embedder", "perceptual"]


@dataclass(frozen=True)
class Assets:
    """`public` pictures of other people, where they are needed, and what was learned from them.

    `prior` makes pictures from latents; `amortizer` guesses the latent (N, latent) behind a feature of one encoder; `embedder` tells people apart, and its penultimate
    features are what makes two pictures the same person; `perceptual` is another network, by whose layers pictures are compared.
    """

    public: Images | None = None
    prior: Prior | None = None
    amortizer: nn.Module | None = None
    embedder: Target | None = None
    perceptual: Target | None = None

    def missing(self, needed: frozenset[Asset], who: str) -> list[str]:
        """What is missing for somebody who needs these, in words."""
        return [
            f"{who} needs the {asset}, and none is given: pass {asset}=..."
            for asset in sorted(needed)
            if getattr(self, asset) is None
        ]

    def require_public(self) -> Images:
        if self.public is None or not len(self.public):
            raise ConfigError("public pictures are needed, and none are given: pass public=...")
        return self.public

    def require_prior(self) -> Prior:
        if self.prior is None:
            raise ConfigError("a prior is needed, and none is given: pass prior=...")
        return self.prior
