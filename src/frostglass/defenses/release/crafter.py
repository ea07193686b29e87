"""Crafter: features from which an inversion reconstructs nobody in particular."""

import math
from dataclasses import replace
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field
from torch import Tensor

from frostglass.core.method import Variants
from frostglass.core.parameters import parameters
from frostglass.defenses.base import defenses
from frostglass.defenses.release._crafting import CHECK_EVERY, NEXT_POWER, Crafting
from frostglass.defenses.release._implicit import (
    Product,
    Solution,
    conjugate_gradient,
    hypergradient,
    largest_curvature,
    neumann,
)
from frostglass.defenses.release._inversion import reciprocal
from frostglass.defenses.release._state import CraftState


@defenses.register
@parameters
class Crafter(Crafting):
    """Feature crafting: moves features until their inversion looks like any image of the prior.

    min_F max_D E D(G(z_r)) - E D(G(z*(F))) + β L_u, with L_u = ‖F - F₀‖² / d and the inversion
    z*(F) = argmin_z L(F, z), L = scale · ‖F - Enc(G(z))‖² / d. In turns: the critic D learns to
    tell G(z*) from draws G(z_r), z_r ~ N(0, I); F takes a step of Adam on
    β ∂L_u/∂F - (∂²L/∂z∂F)ᵀ H⁻¹ ∂L_p/∂z with L_p = -D(G(z*)) and H = ∂²L/∂z², the implicit gradient;
    z* is updated for the new F. H⁻¹v is α Σ_j (I - αH)ʲ v, truncated. Encoder and server are not
    changed, so Crafter works with any trained model.

    Recorded for each batch: `emd_start` and `emd_end`, the distance of the inversions of the plain
    and of the released features from draws, as fresh critics see it (the index of ε-PII);
    `deviation`, the mean of L_u; `residual` and `gradient`, the means of ‖F - Enc(G(z*))‖² / d and
    of ‖∂L/∂z‖ at z*, before and after; `terms` of the last step and the `fewest_terms` of any
    image.

    Use: features that leave a device whose network must stay as it is; needs a generator and time
        for each image. Release each image once: in our trials a decoder had 65 % from
        two releases, 48 % from one.
    Paper: Wang et al., Crafter: Facial Feature Crafting against Inversion-based Identity Theft on
        Deep Models, NDSS 2024, arXiv 2401.07205.
    Differs: the paper's L is an unsquared norm; the code searches z* with 100 times that norm over
        the whole batch minus 100 times the prior's critic, and takes the implicit gradient of
        another loss, 2000 times the batch's mean of the squared error over d. Here one loss does
        both, a sum over images, so that ∂L/∂z = 0 is where the search ends and only the critic
        depends on the batch; 2000 over the code's batch of 128 is scale 15.625, and `realism` is
        the prior's critic. The code restarts every search at the amortizer's prediction, and uses
        one α for all; by default a search here continues from the last one (`warm`) with far fewer
        steps, α is one over the largest curvature of each image, and the series is shorter and
        stopped where it grows (negative curvature). d is the true size of a feature. The outer loss
        is not multiplied by 100, to which Adam is invariant. The code runs 450 steps and keeps the
        feature after step 448. Batches are near-equal, and no image is left out. The recorded
        distances are those of two critics trained alike from the same start; the code plots the
        values of the playing critic, which first rise because it is still learning. `tolerance`,
        `solver = "conjugate_gradient"`, `pool`, a step size of the search that follows the
        curvature, and the critic's narrower default are ours.

    Args:
        beta: published 0.5, 1, 2, 10 (CelebA) and 3.5 to 7 (LFW).
        inner_steps: steps of each inversion after the first.
        warm: inversions continue from the last latents; otherwise each restarts at the amortizer's
            prediction or at the image's random latent.
        solver: of H x = v: "neumann", the series, or "conjugate_gradient".
        terms: terms of the series, or steps of the solver.
        alpha: α of the series; none for one over the largest curvature.
        damping: conjugate gradients solve H + damping · (largest curvature) · I instead of H.
    """

    title: ClassVar[str] = "Crafter"
    adaptive: ClassVar = ("adapt", "averaged")
    variants: ClassVar[Variants] = {
        "published": (
            "the sizes of the paper and its code: every inversion takes 80 steps from the "
            "amortizer's prediction, 120 terms with α = 0.001",
            {
                "steps": 450, "batch": 128, "critic_width": 64, "scale": 15.625, "amortized": True,
                "first_steps": 80, "inner_steps": 80, "warm": False, "terms": 120, "alpha": 1e-3,
            },
        )
    }  # fmt: skip

    inner_steps: Annotated[int, Field(ge=0)] = 5
    warm: bool = True
    solver: Literal["neumann", "conjugate_gradient"] = "neumann"
    terms: Annotated[int, Field(ge=0)] = 10
    alpha: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    damping: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.01

    @property
    def evaluations(self) -> int:
        checks = NEXT_POWER * math.ceil(self.steps / CHECK_EVERY)
        return self.steps * (self.inner_steps + self.terms + 2) + checks

    def brief(self) -> Self:
        inner_steps, terms = min(1, self.inner_steps), min(1, self.terms)
        return replace(super().brief(), inner_steps=inner_steps, terms=terms)

    def initial(self, state: CraftState) -> Tensor:
        return state.plain

    def gradient(self, state: CraftState) -> Tensor:
        """Return β ∂L_u/∂F - (∂²L/∂z∂F)ᵀ H⁻¹ ∂L_p/∂z."""
        features = state.variable.detach()

        def solve(product: Product, vector: Tensor) -> Solution:
            if state.steps % CHECK_EVERY == 0:
                state.raise_curvature(*largest_curvature(product, state.direction, NEXT_POWER))
            if self.solver == "conjugate_gradient":
                damping = self.damping * state.curvature
                return conjugate_gradient(product, vector, damping, self.terms)
            alpha = reciprocal(state.curvature) if self.alpha is None else self.alpha
            return neumann(product, vector, alpha, self.terms)

        implicit = hypergradient(
            state.inversion.losses,
            lambda latents: -state.critic.scores(state.inversion.prior.images(latents)),
            features,
            state.latents,
            solve,
        )
        state.facts["terms"] = implicit.terms.float().mean().item()
        fewest = state.facts.get("fewest_terms", self.terms)
        state.facts["fewest_terms"] = min(implicit.terms.min().item(), fewest)
        return 2 * self.beta / features[0].numel() * (features - state.plain) + implicit.gradient

    def update_latents(self, state: CraftState) -> None:
        features = state.variable.detach()
        start = state.latents if self.warm else state.initial_latents(features)
        state.latents = state.inversion.descend(
            features, start, self.inner_steps, self.inner_rate(state), self.inner_momentum
        )

    def finish(self, state: CraftState) -> tuple[Tensor, dict[str, float]]:
        features = state.variable.detach()
        residual, gradient = state.inversion.fit(features, state.latents)
        return features, {"residual_end": residual, "gradient_end": gradient}
