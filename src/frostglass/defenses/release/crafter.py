"""Crafter: features from which an inversion rebuilds nobody in particular."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from torch import Tensor

from frostglass.core.parameters import parameters
from frostglass.defenses.base import defenses
from frostglass.defenses.release._crafting import LOOK, NEXT_POWER, Craft, Crafting, reciprocal
from frostglass.defenses.release._implicit import (
    Product,
    Solved,
    conjugate_gradient,
    hypergradient,
    largest_curvature,
    neumann,
)

SHORT, LONG = 2, 6  # terms of series that are timed instead of a longer one


@defenses.register
@parameters
class Crafter(Crafting):
    """Feature crafting: the feature that leaves the device is moved until an inversion rebuilds from it a picture like any other of the
    prior, and no further than that needs.

    min_F max_D E D(G(z_r)) - E D(G(z*(F))) + β L_u, with L_u = ‖F - F₀‖² / d and the inversion z*(F) = argmin_z L(F, z), L = scale · ‖F -
    Enc(G(z))‖² / d. In turns: the critic D learns to tell G(z*) from draws G(z_r), z_r ~ N(0, I); F takes a step of Adam on β ∂L_u/∂F -
    (∂²L/∂z∂F)ᵀ H⁻¹ ∂L_p/∂z with L_p = -D(G(z*)) and H = ∂²L/∂z², the implicit gradient; z* follows F. H⁻¹v is α Σ_j (I - αH)ʲ v, cut off.
    The encoder and what follows it are never touched, so this goes with any trained model.

    For each batch is recorded: `emd_start` and `emd_end`, how far fresh critics see the inversions of the plain and of the released
    features from draws (the index of ε-PII, as far as a critic sees it); `deviation`, the mean of L_u; `residual` and `gradient`, the means
    of ‖F - Enc(G(z*))‖² / d and of ‖∂L/∂z‖ at z*, before and after; `terms` of the last step and the `fewest_terms` of any picture.

    Paper: Wang et al., Crafter: Facial Feature Crafting against Inversion-based Identity Theft on Deep Models, NDSS 2024, arXiv 2401.07205.
    Differs: the paper's L is an unsquared norm; the code searches z* with 100 times that norm over the whole batch minus 100 times the
        prior's critic, and takes the implicit gradient of another loss, 2000 times the batch's mean of the squared error over d. Here one
        loss does both, a sum over pictures, so that ∂L/∂z = 0 is where the search ends and nothing but the critic depends on the batch;
        2000 over the code's batch of 128 is scale 15.625, and `realism` is the prior's critic. The code restarts every search at the
        amortizer's guess, and uses one α for all; by default a search here goes on from the last (`warm`) with far fewer steps, α is one
        over the largest curvature of each picture, and the series shorter and stopped where it grows (negative curvature). d is the true
        size of a feature. The outer loss is not multiplied by 100, which Adam does not see. The code runs 450 steps and keeps the feature
        after step 448. Batches are near-equal, no picture is left out. The distances on
        record are those of two critics trained alike from the same start; the code plots what the playing critic says, which first rises
        because that one is still learning. `tolerance`, `solver = "conjugate_gradient"`, `pool`, a step size of the search that follows
        the curvature, and the critic's narrower default are ours.

    Args:
        beta: published 0.5, 1, 2, 10 (CelebA) and 3.5 to 7 (LFW).
        inner_steps: steps of each inversion after the first.
        warm: inversions go on from the last latents; otherwise each starts anew at the amortizer's guess or at the random latent of its
            picture.
        solver: of H x = v: "neumann", the series, or "conjugate_gradient".
        terms: terms of the series, or steps of the solver.
        alpha: α of the series; none for one over the largest curvature.
        damping: conjugate gradients solve H + damping · (largest curvature) · I instead of H.
    """

    variants: ClassVar[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
        "published": (
            "the sizes of the paper and its code: every inversion takes 80 steps from the amortizer's guess, 120 terms with α = 0.001",
            {
                "steps": 450, "batch": 128, "critic_width": 64, "scale": 15.625, "amortized": True, "first_steps": 80,
                "inner_steps": 80, "warm": False, "terms": 120, "alpha": 1e-3,
            },
        )
    }  # fmt: skip

    inner_steps: Annotated[int, Field(ge=0)] = 5
    warm: bool = True
    solver: Literal["neumann", "conjugate_gradient"] = "neumann"
    terms: Annotated[int, Field(ge=0)] = 10
    alpha: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    damping: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.01

    def shorter(self) -> Sequence[tuple[Crafting, float]]:
        if self.terms <= LONG:
            return [(self, 1.0)]
        share = (self.terms - SHORT) / (
            LONG - SHORT
        )  # a slope takes so long with no terms, and as much again for each
        return [(replace(self, terms=SHORT), 1 - share), (replace(self, terms=LONG), share)]

    def beginning(self, craft: Craft) -> Tensor:
        return craft.originals

    def slope(self, craft: Craft) -> Tensor:
        """β ∂L_u/∂F - (∂²L/∂z∂F)ᵀ H⁻¹ ∂L_p/∂z."""
        features = craft.free.detach()

        def inverted(product: Product, vector: Tensor) -> Solved:
            if craft.done % LOOK == 0:
                craft.note(*largest_curvature(product, craft.direction, NEXT_POWER))
            if self.solver == "conjugate_gradient":
                return conjugate_gradient(
                    product, vector, self.damping * craft.curvature, self.terms
                )
            return neumann(
                product,
                vector,
                reciprocal(craft.curvature) if self.alpha is None else self.alpha,
                self.terms,
            )

        made = hypergradient(
            craft.inversion.losses,
            lambda latents: -craft.judge.opinion(craft.inversion.prior.images(latents)),
            features,
            craft.latents,
            inverted,
        )
        craft.facts["terms"] = made.terms.float().mean().item()
        craft.facts["fewest_terms"] = min(
            made.terms.min().item(), craft.facts.get("fewest_terms", self.terms)
        )
        return 2 * self.beta / features[0].numel() * (features - craft.originals) + made.gradient

    def follow(self, craft: Craft) -> None:
        features = craft.free.detach()
        start = craft.latents if self.warm else craft.guess(features)
        craft.latents = craft.inversion.descend(
            features, start, self.inner_steps, self.rate(craft), self.inner_momentum
        )

    def finished(self, craft: Craft) -> tuple[Tensor, dict[str, float]]:
        features = craft.free.detach()
        residual, gradient = craft.inversion.fit(features, craft.latents)
        return features, {"residual_end": residual, "gradient_end": gradient}
