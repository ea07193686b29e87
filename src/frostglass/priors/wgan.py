"""The WGAN-GP prior of GMI and its followers."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from frostglass.core.errors import RunError
from frostglass.core.method import AuditSize, Budget
from frostglass.core.parameters import parameters
from frostglass.core.prior import Prior
from frostglass.core.ranks import ALONE
from frostglass.core.types import Shape
from frostglass.core.views import Capability
from frostglass.networks.dcgan import build_critic, build_generator
from frostglass.priors._gan import ConvGanMethod, GanTraining, draw
from frostglass.priors.base import priors
from frostglass.runtime.freezing import frozen
from frostglass.runtime.seeding import generator_for
from frostglass.runtime.tensors import (
    optimizer_tensors,
    restore_optimizer,
    under_prefix,
    with_prefix,
)
from frostglass.store.files import Work

DiversityForm = Literal["norm", "mean"]
SETTLED = "settled-critic"  # the checkpoint of the last steps


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

    def critic_term(self, critic: nn.Module, real: Tensor, fake: Tensor, share: Tensor) -> Tensor:
        """Return the loss of one critic: E D(G) - E D(x) + penalty · E(‖∇D‖ - 1)²."""
        difference = critic(fake).mean() - critic(real).mean()
        return difference + self.penalty * penalty_at(critic, real, fake, share)


class WganTraining(GanTraining["Wgan"]):
    """The losses of `Wgan`."""

    def critic_loss(self, rng: torch.Generator) -> Tensor:
        real = self.images(self.indices(rng))
        fake = self.generator(self.latents(rng)).detach()
        return self.method.critic_term(self.critic, real, fake, self.shares(rng))

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

    def finish(self, prior: Prior, work: Work) -> Prior:
        """Settle the critic of the final generator, in this process alone."""
        method, self.ranks = self.method, ALONE
        if not method.settling:
            return prior
        assert prior.critic is not None  # as every Wgan has one
        critic = prior.critic.train()
        optimizer = torch.optim.Adam(critic.parameters(), lr=method.lr, betas=method.betas)
        first = 0
        if saved := work.load(SETTLED):
            tensors, values = saved
            critic.load_state_dict(under_prefix("critic", tensors))
            restore_optimizer(optimizer, under_prefix("optimizer", tensors))
            first = values["step"]
        for step in range(first, method.settling):
            optimizer.param_groups[0]["lr"] = method.lr * (1 - step / method.settling)
            rng = generator_for(self.seed, method.name, "settling", step)
            real = self.images(self.indices(rng))
            with frozen(prior.generator), torch.no_grad():
                fake = prior.images(self.stretched(prior, rng))
            loss = method.critic_term(critic, real, fake, self.shares(rng))
            if not loss.isfinite():
                raise RunError(f"{method.name}: the settling critic diverged: lower prior.lr")
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            done = step + 1
            if done % method.checkpoint_every == 0:
                tensors = with_prefix("critic", critic.state_dict())
                tensors |= with_prefix("optimizer", optimizer_tensors(optimizer))
                work.save(SETTLED, tensors, {"step": done})
            work.progress(done, method.settling, f"settling critic {loss.item():.2f}")
        critic.eval()
        return prior

    def stretched(self, prior: Prior, rng: torch.Generator) -> Tensor:
        """Draw a batch of latents, every second one shortened or lengthened at random."""
        method = self.method
        latents = draw(prior.generator, method.batch, method.latent, rng)
        exponents = 2 * torch.rand(method.batch, 1, generator=rng) - 1
        exponents[::2] = 0
        return latents * (method.stretch**exponents).to(latents)


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

    Use: the prior of an audit without published weights; a few thousand steps give usable faces at
        32 to 64 pixels.
    Paper: Zhang et al., The Secret Revealer (GMI), CVPR 2020, arXiv 1911.07135; Gulrajani et al.,
    Improved Training of WGANs, 2017.
    Differs: the paper's diversity term (λ = 0.5) is disabled by default, as in the released
    training code, which has it only in the variant with auxiliary knowledge, as a ratio of mean
    absolute differences (`diversity_form`). The paper's Adam step is 4e-3, the released code's
    2e-4. The critic sees the first image of each pair only, so that its term is the same with and
    without diversity. `average`, `cooldown` and `settling` are our options. A critic that has only
    seen usual latents extrapolates: where real images have more contrast than generated ones, it
    prefers ever larger latents, which have ever more, and an attack that follows it leaves the
    faces. `settling` teaches it otherwise.

    Args:
        first_size: pixels a side of the generator's first map: 4, or 8 as in Crafter's Table XII, a
            stage less and a larger linear layer (256×8×8 at 64 pixels and width 64).
        diversity_form: "norm", the paper's mean of ratios of Euclidean norms, or "mean", the
            released code's ratio of mean absolute differences.
        settling: further steps of the critic alone, against images of the final generator, every
            second one of an unusual latent; lr falls linearly to zero; 0 is the published training.
        stretch: unusual latents are multiplied by 1/stretch to stretch; the logarithm is uniform.
    """

    first_size: Literal[4, 8] = 4
    diversity_form: DiversityForm = "norm"
    settling: Annotated[int, Field(ge=0)] = 0
    stretch: Annotated[float, Field(gt=1, allow_inf_nan=False)] = 16.0

    title: ClassVar[str] = "WGAN-GP"
    unkeyed: ClassVar[Mapping[str, Any]] = {"first_size": 4}
    training: ClassVar = WganTraining

    @property
    def shares_batches(self) -> bool:
        return not self.tied

    def brief(self) -> Self:
        return replace(super().brief(), settling=min(1, self.settling))

    def budget(self, size: AuditSize) -> Budget:
        budget, more = super().budget(size), self.settling
        if not more:
            return budget
        return replace(
            budget,
            description=f"{budget.description}, {more:,} of the critic alone",
            trained=budget.trained + more * self.batch,
        )

    def networks(self, image_shape: Shape, classes: int = 0) -> tuple[nn.Sequential, nn.Sequential]:
        generator = build_generator(self.latent, self.width, image_shape, self.first_size)
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
    return penalty_at(critic, real, fake, torch.rand(len(real), 1, 1, 1, generator=rng))


def penalty_at(critic: nn.Module, real: Tensor, fake: Tensor, share: Tensor) -> Tensor:
    """Return the mean of (‖∇ critic‖ - 1)² at shares (N, 1, 1, 1) of the way from real to fake."""
    between = (real + share.to(real.device) * (fake - real)).requires_grad_()
    (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    return ((slope.flatten(1).norm(dim=1) - 1) ** 2).mean()
