"""The WGAN-GP prior of GMI and its followers."""

import itertools
from contextlib import nullcontext
from dataclasses import asdict
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from frostglass.core.errors import ConfigError
from frostglass.core.parameters import parameters
from frostglass.core.prior import Prior
from frostglass.core.types import Images, Shape
from frostglass.core.views import Capability, ModelView
from frostglass.priors._gan import SHEET, Schedule, train_in_turns
from frostglass.priors.base import identity_hashes, priors
from frostglass.runtime.device import default_device, device_of
from frostglass.runtime.freezing import frozen
from frostglass.runtime.seeding import generator_for, seeded
from frostglass.store.files import Work

DiversityForm = Literal["norm", "mean"]


@priors.register
@parameters
class Wgan:
    """A generator trained against a Wasserstein critic with gradient penalty.

    Critic: E D(G(z)) - E D(x) + penalty · E(‖∇D(x̂)‖ - 1)², x̂ = x + α(G(z) - x), α uniform per sample. Generator: -E D(G(z)).
    The shapes are those of the GMI code at 32 and 64 pixels: transposed 5×5 convolutions with batch norm, sigmoid output; strided 5×5
    convolutions with instance norm in the critic. 16 and 128 pixels leave out or add one stage.
    With `diversity` λ the generator's loss gets -λ · E ‖φ(G(z₁)) - φ(G(z₂))‖ / ‖z₁ - z₂‖, φ the target's penultimate features: latents that differ
    should make people who differ to the target. The prior is then fitted to that target.

    Paper: Zhang et al., The Secret Revealer (GMI), CVPR 2020, arXiv 1911.07135; Gulrajani et al., Improved Training of WGANs, 2017.
    Differs: the paper's diversity term is off by default, as in the released training code, which has it only in the variant with auxiliary assets, as a
    ratio of mean absolute differences (`diversity_form`). The paper's Adam step is 4e-3, the released code's 2e-4. The critic judges the first of
    each pair of pictures only, so that its term is the same with and without diversity. `average` and `cooldown` are options of ours.

    Args:
        latent: length of the latent vector.
        width: channels of the generator's last hidden stage; 64 is published.
        critic_width: channels of the critic's first stage; the generator's width if not given.
        steps: generator steps.
        critic_steps: critic steps before each generator step.
        batch: images a step.
        lr: Adam's step size, with betas (0.5, 0.999).
        penalty: weight of the gradient penalty.
        diversity: weight of the diversity term; 0.5 in the paper. Above 0 the training needs the target's gradients.
        diversity_form: "norm", the paper's mean of ratios of Euclidean norms, or "mean", the released code's ratio of mean absolute differences.
        average: decay of a running mean of the generator's weights, which becomes the prior; 0 is the published training.
        cooldown: share of the steps, at the end, over which lr falls linearly to zero; 0 is the published training.
        checkpoint_every: generator steps between checkpoints; does not change the result.
    """

    latent: Annotated[int, Field(ge=1)] = 100
    width: Annotated[int, Field(ge=4)] = 64
    critic_width: Annotated[int, Field(ge=4)] | None = None
    steps: Annotated[int, Field(ge=1)] = 20_000
    critic_steps: Annotated[int, Field(ge=1)] = 5
    batch: Annotated[int, Field(ge=2)] = 64
    lr: Annotated[float, Field(gt=0)] = 2e-4
    penalty: Annotated[float, Field(ge=0)] = 10.0
    diversity: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    diversity_form: DiversityForm = "norm"
    average: Annotated[float, Field(ge=0, lt=1)] = 0.0
    cooldown: Annotated[float, Field(ge=0, le=1)] = 0.0
    checkpoint_every: Annotated[int, Field(ge=1)] = 200

    @property
    def needs(self) -> Capability | None:
        return "gradients" if self.tied else None

    @property
    def tied(self) -> bool:
        """Whether the training looks at a target."""
        return self.diversity > 0

    def networks(self, image_shape: Shape, classes: int = 0) -> tuple[nn.Sequential, nn.Sequential]:
        """Generator and critic for one image shape, freshly initialised."""
        generator = build_generator(self.latent, self.width, image_shape)
        return generator, build_critic(
            self.critic_width or self.width, image_shape[0], image_shape[1]
        )

    def train(
        self,
        public: Images,
        view: ModelView | None = None,
        *,
        seed: int = 0,
        work: Work | None = None,
    ) -> Prior:
        """Train on public images; resumes from the last checkpoint in `work` with the same result."""
        if self.tied and view is None:
            raise ConfigError(
                "wgan with diversity is fitted to one target: train it with that target's view, or set prior.diversity to 0"
            )
        watched = view if self.tied else None
        work = work or Work.scratch()
        with seeded(seed, "wgan", "init"):
            generator, critic = (
                network.to(default_device()) for network in self.networks(public.shape)
            )

        def critic_loss(rng: torch.Generator) -> Tensor:
            real = public.floats(torch.randint(len(public), (self.batch,), generator=rng)).to(
                default_device()
            )
            fake = generator(draw(generator, self.batch, self.latent, rng)).detach()
            return (
                critic(fake).mean()
                - critic(real).mean()
                + self.penalty * gradient_penalty(critic, real, fake, rng)
            )

        def generator_loss(rng: torch.Generator) -> Tensor:
            latents = draw(generator, self.batch, self.latent, rng)
            fake = generator(latents)
            loss = -critic(fake).mean()
            if watched is None:
                return loss
            others = draw(generator, self.batch, self.latent, rng)
            features, other_features = (
                watched.logits_and_features(pictures)[1] for pictures in (fake, generator(others))
            )
            return loss - self.diversity * diversity(
                features, other_features, latents, others, self.diversity_form
            )

        schedule = Schedule(
            steps=self.steps, critic_steps=self.critic_steps, lr=self.lr, betas=(0.5, 0.999), average=self.average,
            cooldown=self.cooldown, checkpoint_every=self.checkpoint_every,
        )  # fmt: skip
        # Frozen from outside the loop: the gradients of a step are taken after its loss is made, and need the target's buffers unwritten.
        with frozen(watched.module) if watched else nullcontext():
            kept = train_in_turns(
                "wgan", generator, critic, schedule, critic_loss=critic_loss, generator_loss=generator_loss, seed=seed, work=work,
                sample=lambda network: network(draw(network, SHEET, self.latent, generator_for(0, "sheet"))),
            )  # fmt: skip
        return Prior(
            generator=kept,
            critic=critic.eval(),
            latent=self.latent,
            image_shape=public.shape,
            seen_identities=identity_hashes(public.names),
            info={"method": {"name": "wgan", "parameters": asdict(self)}},  # type: ignore[call-overload]
            tied_to=watched.target_key if watched else None,
            classes=watched.classes if watched else 0,
        )


def build_generator(latent: int, width: int, image_shape: Shape) -> nn.Sequential:
    """The published generator of square pictures from 4×4, `width` channels wide before its last layer; 32 and 64 pixels are published."""
    channels, height, breadth = image_shape
    if height != breadth or height not in (16, 32, 64, 128):
        raise ConfigError(
            f"the generator makes square images of 16, 32, 64 or 128 pixels, got {height}×{breadth}: choose another data.size"
        )
    stages = height.bit_length() - 3
    widths = [width * 2**stage for stage in reversed(range(stages))]
    layers: list[nn.Module] = [
        nn.Linear(latent, widths[0] * 16, bias=False),
        nn.BatchNorm1d(widths[0] * 16),
        nn.ReLU(),
        nn.Unflatten(1, (widths[0], 4, 4)),
    ]
    for wide, narrow in itertools.pairwise(widths):
        layers += [
            nn.ConvTranspose2d(wide, narrow, 5, 2, 2, 1, bias=False),
            nn.BatchNorm2d(narrow),
            nn.ReLU(),
        ]
    return nn.Sequential(
        *layers, nn.ConvTranspose2d(widths[-1], channels, 5, 2, 2, 1), nn.Sigmoid()
    )


def build_critic(width: int, channels: int, side: int) -> nn.Sequential:
    """The published critic of square pictures down to 4×4, its first stage `width` channels wide; 32 and 64 pixels are published."""
    widths = [width * 2**stage for stage in range(side.bit_length() - 3)]
    layers: list[nn.Module] = [nn.Conv2d(channels, widths[0], 5, 2, 2), nn.LeakyReLU(0.2)]
    for narrow, wide in itertools.pairwise(widths):
        layers += [
            nn.Conv2d(narrow, wide, 5, 2, 2),
            nn.InstanceNorm2d(wide, affine=True),
            nn.LeakyReLU(0.2),
        ]
    return nn.Sequential(*layers, nn.Conv2d(widths[-1], 1, 4), nn.Flatten())


def diversity(
    features: Tensor, others: Tensor, latents: Tensor, other_latents: Tensor, form: DiversityForm
) -> Tensor:
    """How far two batches of features (N, F) are apart for the distance of the latents (N, latent) that made them."""
    if form == "norm":
        return ((features - others).norm(dim=1) / (latents - other_latents).norm(dim=1)).mean()
    return (features - others).abs().mean() / (latents - other_latents).abs().mean()


def gradient_penalty(critic: nn.Module, real: Tensor, fake: Tensor, rng: torch.Generator) -> Tensor:
    """Mean of (‖∇ critic‖ - 1)² at random points between real and fake images."""
    share = torch.rand(len(real), 1, 1, 1, generator=rng).to(real.device)
    between = (real + share * (fake - real)).requires_grad_()
    (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    return ((slope.flatten(1).norm(dim=1) - 1) ** 2).mean()


def draw(generator: nn.Module, count: int, latent: int, rng: torch.Generator) -> Tensor:
    """Standard normal latents (count, latent), where the generator is."""
    return torch.randn(count, latent, generator=rng).to(device_of(generator))
