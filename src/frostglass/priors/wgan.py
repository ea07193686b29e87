"""The WGAN-GP prior of GMI and its followers."""

import copy
import itertools
from dataclasses import asdict
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from frostglass.checks import parameters
from frostglass.errors import ConfigError, RunError
from frostglass.files import Work
from frostglass.priors.base import Prior, identity_hashes, priors
from frostglass.runtime import (
    default_device,
    device_of,
    generator_for,
    optimizer_tensors,
    restore_optimizer,
    seeded,
    under_prefix,
    with_prefix,
)
from frostglass.types import Images, Shape, View


@priors.register
@parameters
class Wgan:
    """A generator trained against a Wasserstein critic with gradient penalty.

    Critic: E D(G(z)) - E D(x) + penalty · E(‖∇D(x̂)‖ - 1)², x̂ = x + α(G(z) - x), α uniform per sample. Generator: -E D(G(z)).
    The shapes are those of the GMI code at 32 and 64 pixels: transposed 5×5 convolutions with batch norm, sigmoid output; strided 5×5
    convolutions with instance norm in the critic. 16 and 128 pixels leave out or add one stage.

    Paper: Zhang et al., The Secret Revealer (GMI), CVPR 2020, arXiv 1911.07135; Gulrajani et al., Improved Training of WGANs, 2017.
    Differs: the paper's diversity term is absent, as in the released training code. `average` and `cooldown` are options of ours.

    Args:
        latent: length of the latent vector.
        width: channels of the generator's last hidden stage; 64 is published.
        critic_width: channels of the critic's first stage; the generator's width if not given.
        steps: generator steps.
        critic_steps: critic steps before each generator step.
        batch: images a step.
        lr: Adam's step size, with betas (0.5, 0.999).
        penalty: weight of the gradient penalty.
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
    average: Annotated[float, Field(ge=0, lt=1)] = 0.0
    cooldown: Annotated[float, Field(ge=0, le=1)] = 0.0
    checkpoint_every: Annotated[int, Field(ge=1)] = 200

    tied: ClassVar[bool] = False

    def networks(self, image_shape: Shape) -> tuple[nn.Sequential, nn.Sequential]:
        """Generator and critic for one image shape, freshly initialised."""
        channels, height, width = image_shape
        if height != width or height not in (16, 32, 64, 128):
            raise ConfigError(f"wgan makes square images of 16, 32, 64 or 128 pixels, got {height}×{width}: choose another data.size")
        stages = height.bit_length() - 4  # hidden stages of the generator: 2 at 32 pixels, 3 at 64
        widths = [self.width * 2**i for i in reversed(range(stages + 1))]
        generator: list[nn.Module] = [
            nn.Linear(self.latent, widths[0] * 16, bias=False),
            nn.BatchNorm1d(widths[0] * 16),
            nn.ReLU(),
            nn.Unflatten(1, (widths[0], 4, 4)),
        ]
        for wide, narrow in itertools.pairwise(widths):
            generator += [nn.ConvTranspose2d(wide, narrow, 5, 2, 2, 1, bias=False), nn.BatchNorm2d(narrow), nn.ReLU()]
        generator += [nn.ConvTranspose2d(widths[-1], channels, 5, 2, 2, 1), nn.Sigmoid()]
        widths = [(self.critic_width or self.width) * 2**i for i in range(stages + 1)]
        critic: list[nn.Module] = [nn.Conv2d(channels, widths[0], 5, 2, 2), nn.LeakyReLU(0.2)]
        for narrow, wide in itertools.pairwise(widths):
            critic += [nn.Conv2d(narrow, wide, 5, 2, 2), nn.InstanceNorm2d(wide, affine=True), nn.LeakyReLU(0.2)]
        critic += [nn.Conv2d(widths[-1], 1, 4), nn.Flatten()]
        return nn.Sequential(*generator), nn.Sequential(*critic)

    def _lr_factor(self, step: int) -> float:
        left = (self.steps - step) / self.steps
        return min(1.0, left / self.cooldown) if self.cooldown else 1.0

    def train(self, public: Images, view: View | None = None, *, seed: int = 0, work: Work | None = None) -> Prior:
        """Train on public images; resumes from the last checkpoint in `work` with the same result."""
        work = work or Work.scratch()
        with seeded(seed, "wgan", "init"):
            generator, critic = (network.to(default_device()) for network in self.networks(public.shape))
        mean = copy.deepcopy(generator)
        opt_g, opt_c = (torch.optim.Adam(m.parameters(), lr=self.lr, betas=(0.5, 0.999)) for m in (generator, critic))
        start = 0
        if saved := work.load("wgan"):
            tensors, values = saved
            start = values["step"]
            for name, module in (("generator", generator), ("critic", critic), ("mean", mean)):
                module.load_state_dict(under_prefix(name, tensors))
            restore_optimizer(opt_g, under_prefix("opt_g", tensors))
            restore_optimizer(opt_c, under_prefix("opt_c", tensors))
        for step in range(start, self.steps):
            dice = generator_for(seed, "wgan", step)
            for group in opt_g.param_groups + opt_c.param_groups:
                group["lr"] = self.lr * self._lr_factor(step)
            for _ in range(self.critic_steps):
                real = public.floats(torch.randint(len(public), (self.batch,), generator=dice)).to(default_device())
                fake = _draw(generator, self.batch, self.latent, dice).detach()
                loss_c = critic(fake).mean() - critic(real).mean() + self.penalty * gradient_penalty(critic, real, fake, dice)
                _descend(opt_c, loss_c)
            loss_g = -critic(_draw(generator, self.batch, self.latent, dice)).mean()
            _descend(opt_g, loss_g)
            _follow(mean, generator, self.average)
            if not (loss_c.isfinite() and loss_g.isfinite()):
                raise RunError(
                    f"wgan: the loss is not finite at step {step} (critic {loss_c.item()}, generator {loss_g.item()}): lower prior.lr; the last good checkpoint is kept"
                )
            if (step + 1) % self.checkpoint_every == 0 and step + 1 < self.steps:
                tensors = with_prefix("opt_g", optimizer_tensors(opt_g)) | with_prefix("opt_c", optimizer_tensors(opt_c))
                for name, module in (("generator", generator), ("critic", critic), ("mean", mean)):
                    tensors |= with_prefix(name, module.state_dict())
                work.save("wgan", tensors, {"step": step + 1})
            work.progress(step + 1, self.steps, f"critic {loss_c.item():.2f}")
        return Prior(
            generator=(mean if self.average else generator).eval(),
            critic=critic.eval(),
            latent=self.latent,
            image_shape=public.shape,
            saw=identity_hashes(public.names),
            info={"method": {"name": "wgan", "parameters": asdict(self)}},  # type: ignore[call-overload]
        )


def gradient_penalty(critic: nn.Module, real: Tensor, fake: Tensor, dice: torch.Generator) -> Tensor:
    """Mean of (‖∇ critic‖ - 1)² at random points between real and fake images."""
    share = torch.rand(len(real), 1, 1, 1, generator=dice).to(real.device)
    between = (real + share * (fake - real)).requires_grad_()
    (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    return ((slope.flatten(1).norm(dim=1) - 1) ** 2).mean()


def _draw(generator: nn.Module, count: int, latent: int, dice: torch.Generator) -> Tensor:
    return generator(torch.randn(count, latent, generator=dice).to(device_of(generator)))


def _descend(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()


def _follow(mean: nn.Module, module: nn.Module, decay: float) -> None:
    """Move the running mean of the weights (and of batch norm's statistics) towards the module."""
    with torch.no_grad():
        for ours, theirs in zip(mean.state_dict().values(), module.state_dict().values(), strict=True):
            if ours.is_floating_point():
                ours.lerp_(theirs, 1 - decay)
            else:
                ours.copy_(theirs)
