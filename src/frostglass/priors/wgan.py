"""The WGAN-GP prior of GMI and its followers."""

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from frostglass.core.parameters import parameters
from frostglass.core.types import Shape
from frostglass.core.views import Capability
from frostglass.networks.dcgan import build_critic, build_generator
from frostglass.priors._gan import ConvGanMethod, GanTraining
from frostglass.priors.base import priors

DiversityForm = Literal["norm", "mean"]


@parameters
class WassersteinMethod(ConvGanMethod):
    """A GAN with Wasserstein critics, and a diversity term that asks the target.

    Args:
        diversity: weight of the diversity term. Above 0 training needs the target's gradients and
            the prior is fitted to that target; at 0 the prior serves every target.
        penalty: weight of the gradient penalty.
    """

    diversity: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    penalty: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 10.0

    untie: ClassVar[str] = ", or set prior.diversity to 0"

    @property
    def tied(self) -> bool:
        return self.diversity > 0

    @property
    def access(self) -> Capability | None:
        return "gradients" if self.tied else None

    def target_images(self, public: int) -> int:
        return 2 * self.steps * self.batch if self.tied else 0

    def critic_term(
        self, critic: nn.Module, real: Tensor, fake: Tensor, rng: torch.Generator
    ) -> Tensor:
        """Return the loss of one critic: E D(G) - E D(x) + penalty · E(‖∇D‖ - 1)²."""
        difference = critic(fake).mean() - critic(real).mean()
        return difference + self.penalty * gradient_penalty(critic, real, fake, rng)


class WganTraining(GanTraining["Wgan"]):
    """The losses of `Wgan`."""

    def critic_loss(self, rng: torch.Generator) -> Tensor:
        real = self.images(self.indices(rng))
        fake = self.generator(self.latents(rng)).detach()
        return self.method.critic_term(self.critic, real, fake, rng)

    def generator_loss(self, rng: torch.Generator) -> Tensor:
        method, latents = self.method, self.latents(rng)
        fake = self.generator(latents)
        loss = -self.critic(fake).mean()
        if not method.tied:
            return loss
        others = self.latents(rng)
        features, other_features = (
            self.target.logits_and_features(images)[1] for images in (fake, self.generator(others))
        )
        return loss - method.diversity * diversity(
            features, other_features, latents, others, method.diversity_form
        )


@priors.register
@parameters
class Wgan(WassersteinMethod):
    """A generator trained against a Wasserstein critic with gradient penalty.

    Critic: E D(G(z)) - E D(x) + penalty · E(‖∇D(x̂)‖ - 1)², x̂ = x + α(G(z) - x), α uniform per
    sample. Generator: -E D(G(z)). Adam's betas are (0.5, 0.999). The critic steps come before each
    generator step.
    The shapes are those of the GMI code at 32 and 64 pixels: transposed 5×5 convolutions with batch
    norm, sigmoid output; strided 5×5 convolutions with instance norm in the critic. 16 and 128
    pixels leave out or add one stage.
    With `diversity` λ the generator's loss gets -λ · E ‖φ(G(z₁)) - φ(G(z₂))‖ / ‖z₁ - z₂‖, φ the
    target's penultimate features: different latents should give people that the target tells apart.

    Paper: Zhang et al., The Secret Revealer (GMI), CVPR 2020, arXiv 1911.07135; Gulrajani et al.,
    Improved Training of WGANs, 2017.
    Differs: the paper's diversity term (λ = 0.5) is disabled by default, as in the released
    training code, which has it only in the variant with auxiliary knowledge, as a ratio of mean
    absolute differences (`diversity_form`). The paper's Adam step is 4e-3, the released code's
    2e-4. The critic sees the first image of each pair only, so that its term is the same with and
    without diversity. `average` and `cooldown` are our options.

    Args:
        diversity_form: "norm", the paper's mean of ratios of Euclidean norms, or "mean", the
            released code's ratio of mean absolute differences.
    """

    diversity_form: DiversityForm = "norm"

    title: ClassVar[str] = "WGAN-GP"
    training: ClassVar = WganTraining

    def networks(self, image_shape: Shape, classes: int = 0) -> tuple[nn.Sequential, nn.Sequential]:
        generator = build_generator(self.latent, self.width, image_shape)
        width = self.critic_width or self.width
        return generator, build_critic(width, image_shape[0], image_shape[1])


def diversity(
    features: Tensor, others: Tensor, latents: Tensor, other_latents: Tensor, form: DiversityForm
) -> Tensor:
    """Return the distance of two batches of features (N, F) relative to that of their latents."""
    if form == "norm":
        return ((features - others).norm(dim=1) / (latents - other_latents).norm(dim=1)).mean()
    return (features - others).abs().mean() / (latents - other_latents).abs().mean()


def gradient_penalty(critic: nn.Module, real: Tensor, fake: Tensor, rng: torch.Generator) -> Tensor:
    """Return the mean of (‖∇ critic‖ - 1)² at random points between real and fake images."""
    share = torch.rand(len(real), 1, 1, 1, generator=rng).to(real.device)
    between = (real + share * (fake - real)).requires_grad_()
    (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    return ((slope.flatten(1).norm(dim=1) - 1) ** 2).mean()
