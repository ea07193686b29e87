"""VMI: variational model inversion."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import Field
from torch import Tensor

from frostglass.attacks._search.descent import Descent
from frostglass.attacks._search.families import Distribution, Family, Gaussian, Mixture
from frostglass.attacks._search.fields import AtLeastOne, Count, Weight
from frostglass.attacks._search.layered import Layered
from frostglass.attacks._search.row_rng import RowRng
from frostglass.attacks._search.search import OptimizerName
from frostglass.attacks._search.start import at_zero
from frostglass.attacks.base import attacks
from frostglass.core.parameters import parameters
from frostglass.core.prior import Prior
from frostglass.core.views import ModelView
from frostglass.networks.flow import Flow
from frostglass.priors.stylegan2 import StyleImages

SIDE_BY_SIDE = 64  # images of all people that are searched together


@attacks.register
@parameters
class Vmi(Descent):
    """Variational inversion: a distribution of latents per person, as wide as the target allows.

    Minimises E_{z~q} [weight · loss(T(G(z)), y)] + γ · KL(q ‖ N(0, I)) over q: a full Gaussian, a
    mixture of Gaussians, or a Glow-style flow. Layered, each layer ℓ of a StyleGAN has a q_ℓ and
    takes the style of its own z_ℓ, all made of the same noise; KL is then the mean over the layers
    for a flow or a mixture, their sum for a Gaussian, as the published code has it.

    Use: to compare with BiDO's and TL-DMI's tables of VMI, or to see how varied the accepted images
        are.
    Paper: Wang et al., Variational Model Inversion Attacks, NeurIPS 2021, arXiv 2201.10787.
    Differs: published on a StyleGAN2 or a DCGAN; any prior serves here. People are searched side by
        side, each with a distribution of its own. Every coordinate of the flow comes from the given
        noise, where the published one draws some again in its splits. `layered`, published for
        CelebA, is false by default because it needs a StyleGAN2; images of its layers that are not
        led have one nuisance latent in common. The published KL of a flow without layers, and of a
        Gaussian, takes 1000 samples, here `points` or the exact value. BiDO's version stops at the
        epoch the evaluator likes best; here nothing is chosen by an evaluator.

    Args:
        q: "gaussian", "mixture" or "flow". components: of the mixture.
        depth: steps of the flow at each level.
        levels: of the flow; half of the coordinates leave at each. hidden: width of its couplings.
        layered: a distribution for each layer of a StyleGAN2 prior.
        identity_layers: how many layers, from the first, have one, all if not given; the others
            take the style of a random latent, new for each image. Published: 7, and all 10 at 64
            pixels.
        gamma: γ; below 1 the prior counts less than the target ("power posterior").
        entropy: weight of -H(q) in the loss, H(q) = ½ ln det 2πe LLᵀ; for a Gaussian without layers
            alone, as in the published code, whose settings have 0.
        points: images drawn from each distribution at a step; 64 published. The KL is estimated
            from as many fresh ones.
        draws: images drawn from each distribution at the end; 50 or 100 published.
        batch: images of the end shown to the target together; a step shows `points` of as many
            people as make 64.
        steps: published 157 a pass, 20 passes.
    """

    title = "VMI"
    unkeyed: ClassVar[Mapping[str, Any]] = {**Descent.unkeyed, "entropy": 0.0}

    weight: Weight = 1.0
    critic_weight: Weight = 0.0
    coupling: AtLeastOne = 1
    optimizer: OptimizerName = "momentum"
    lr: Annotated[float, Field(gt=0)] = 1e-4
    steps: Count = 3140
    candidates: AtLeastOne = 1
    keep: AtLeastOne = 50
    q: Literal["gaussian", "mixture", "flow"] = "flow"
    components: AtLeastOne = 3
    depth: AtLeastOne = 10
    levels: AtLeastOne = 3
    hidden: AtLeastOne = 100
    layered: bool = False
    identity_layers: AtLeastOne | None = None
    gamma: Weight = 1e-3
    entropy: Weight = 0.0
    points: AtLeastOne = 64
    draws: AtLeastOne = 50

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.identity_layers and not self.layered:
            raise ValueError(
                "identity_layers is for layered distributions: set layered to true, or leave it out"
            )
        if self.entropy and (self.q != "gaussian" or self.layered):
            raise ValueError(
                f'entropy ({self.entropy:g}) is for q = "gaussian" without layers: set it to 0'
            )

    @property
    def reads(self) -> int:
        return self.draws

    @property
    def looks(self) -> int:
        return self.points

    @property
    def rows(self) -> int:
        return max(1, SIDE_BY_SIDE // self.points)

    @property
    def batch_multiple(self) -> int:
        # Products of a few small matrices round differently for another number of them.
        return self.rows

    def prior_problems(self, prior: Prior) -> list[str]:
        problems, layers = super().prior_problems(prior), 2 * prior.blocks
        if self.layered and not layers:
            problems.append(
                "vmi.layered needs the layers of a StyleGAN2, but this prior's generator has none: "
                "use a stylegan2 prior, or set it to false"
            )
        elif self.identity_layers and self.identity_layers > layers:
            problems.append(
                f"vmi.identity_layers must be at most {layers}, the layers of the prior's "
                f"generator, got {self.identity_layers}: lower it"
            )
        return problems

    def family(self, prior: Prior) -> Distribution:
        each: Distribution
        if self.q == "gaussian":
            each = Gaussian(prior.latent)
        elif self.q == "mixture":
            each = Mixture(prior.latent, self.components)
        else:
            each = Flow(prior.latent, self.depth, self.levels, self.hidden)
        if not self.layered:
            return each
        layers = 2 * prior.blocks
        reduction: Literal["mean", "sum"] = "sum" if self.q == "gaussian" else "mean"
        return Layered(each, layers, self.identity_layers or layers, reduction)

    def centres(self, view: ModelView, prior: Prior, labels: Tensor, *, seed: int) -> Tensor:
        zeros = at_zero(prior, labels, self.candidates)
        return zeros.repeat(1, 1, 2 * prior.blocks if self.layered else 1)

    def images(self, prior: Prior, latents: Tensor, labels: Tensor) -> Tensor:
        if not self.layered:
            return super().images(prior, latents, labels)
        network = prior.generator
        assert isinstance(network, StyleImages)  # as `prior_problems` checks
        styles = network.network.mapping.w(latents.reshape(-1, prior.latent))
        return network.paint(styles.unflatten(0, (len(latents), -1))).clamp(0, 1)

    def penalty(self, family: Family, state: Tensor, rng: RowRng) -> Tensor | float:
        value: Tensor | float = 0.0
        if self.gamma:
            noise = rng.normal(self.points, family.noise)
            value = self.gamma * cast(Distribution, family).kl(state, noise)
        if self.entropy:
            value = value - self.entropy * cast(Gaussian, family).entropy(state)
        return value
