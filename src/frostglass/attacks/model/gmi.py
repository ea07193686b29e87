"""GMI: generative model inversion."""

from typing import Annotated, Any, ClassVar

from pydantic import Field
from torch import Tensor

from frostglass.attacks._search.augmented import NEWER, SUBTRACT, AugmentedDescent
from frostglass.attacks._search.descent import ADAPTIVE, PUBLISHED, brief_pool
from frostglass.attacks._search.fields import Count
from frostglass.attacks._search.query_budget import scaled_down
from frostglass.attacks._search.search import OptimizerName
from frostglass.attacks._search.start import Pool
from frostglass.attacks.base import attacks
from frostglass.core.method import Variants
from frostglass.core.parameters import parameters
from frostglass.core.prior import Prior
from frostglass.core.views import ModelView


@attacks.register
@parameters
class Gmi(AugmentedDescent):
    """Generative model inversion: gradient descent in a GAN's latents on class and critic loss.

    L(z) = (λ · loss(T(G(z)), y) - w · D(G(z))) / B; v ← μv - ηg, z ← z - μv_old + (1 + μ)v, then z
    is clamped to [-c, c].

    Use: the first attack of an audit with weights, on any generator; `variant = "margin"` is the
        usual choice.
    Paper: Zhang et al., The Secret Revealer, CVPR 2020, arXiv 1911.07135.
    Differs: the published losses are means over a batch, so the step of one latent depends on how
        many share its batch; here the batch size is the constant `coupling` and latents are
        independent. The published code keeps the seed with the best target logit (`keep = 1`; here
        the best margin), its followers keep all five (`keep = 5`). `pool`, `optimizer = "adam"`,
        students and the losses other than "ce" are additions from later attacks; the defaults are
        the published form but for `patience`. MIBench has plain momentum, no clamp, and the same
        starts for all people.

    Args:
        coupling: 60 in the KED and BiDO code, 100 in GMI's.
        steps: published 1500 to 3000.
        clamp: c, the box for latents; 0 leaves them free.
        pool: start from the best of this many random draws, scored once for all people; 0 starts
            from any draw.
    """

    title = "GMI"
    variants: ClassVar[Variants] = {**PUBLISHED, **ADAPTIVE, **NEWER, **SUBTRACT}

    optimizer: OptimizerName = "nesterov"
    clamp: Annotated[float, Field(ge=0)] = 1.0
    pool: Count = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pool and self.pool < self.candidates:
            raise ValueError(
                f"pool ({self.pool}) must be 0 or at least candidates ({self.candidates})"
            )

    @property
    def start_draws(self) -> int:
        return self.pool

    def brief_counts(self, candidates: int) -> dict[str, Any]:
        return super().brief_counts(candidates) | {"pool": brief_pool(self.pool, candidates)}

    def scaled_counts(self, share: float) -> dict[str, Any]:
        pool = scaled_down(self.pool, share, max(2, self.candidates))
        return super().scaled_counts(share) | {"pool": pool}

    def centres(self, view: ModelView, prior: Prior, labels: Tensor, *, seed: int) -> Tensor:
        if self.pool:
            pool = Pool(
                view, prior, self.pool, seed=seed, bonus=self.bonus(prior), batch=self.batch
            )
            return pool.best(labels, self.candidates)
        return super().centres(view, prior, labels, seed=seed)

    def project(self, state: Tensor, start: Tensor) -> Tensor:
        return state.clamp(-self.clamp, self.clamp) if self.clamp else state
