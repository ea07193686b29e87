"""The StyleGAN2 prior: read from a converted file, or trained on public pictures."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from frostglass.core.errors import ConfigError
from frostglass.core.parameters import parameters
from frostglass.core.prior import UNKNOWN, Prior
from frostglass.core.types import Images, Shape
from frostglass.core.views import ModelView
from frostglass.networks.stylegan2.network import StyleCritic, StyleGenerator, StyleSettings
from frostglass.networks.stylegan2.nvidia import load_generator
from frostglass.priors._diffaugment import Change, changed
from frostglass.priors._gan import SHEET, Schedule, train_in_turns
from frostglass.priors.base import check_size, identity_hashes, priors
from frostglass.priors.wgan import draw
from frostglass.runtime.device import default_device
from frostglass.runtime.seeding import generator_for, seeded
from frostglass.store.files import Work

GIB = 2**30
COPIES = 7  # tensors as large as a convolution's output that its gradients keep, measured


class StylePictures(nn.Module):
    """Pictures in [0, 1] from a StyleGAN2, with constant noise: `forward` from latents, `paint` from styles.

    `crop` keeps that many pixels a side in the middle of what the network makes, and the rest is brought to `side` pixels; 0 leaves both as they are. Pictures are made in
    parts of as many as fit into `memory` GiB. If that is fewer than are asked for, the parts are made again when gradients are taken instead of
    being remembered.
    """

    def __init__(self, network: StyleGenerator, memory: float, *, crop: int = 0, side: int = 0):
        super().__init__()
        self.network = network
        self.memory, self.crop, self.side = memory, crop, side

    @property
    def settings(self) -> StyleSettings:
        return self.network.settings

    @property
    def style_blocks(self) -> int:
        """How many blocks the synthesis has."""
        return len(self.settings.sizes)

    def forward(self, latents: Tensor) -> Tensor:
        return self.paint(self.network.mapping(latents)).clamp(0, 1)

    def paint(self, ws: Tensor) -> Tensor:
        """Pictures of styles (N, num_ws, w_dim), or of one style (N, w_dim) for all layers; not cut off at 0 and 1."""
        if ws.dim() == 2:
            ws = ws[:, None].expand(-1, self.settings.num_ws, -1)
        return self.in_parts(lambda part: self.framed(self.network.synthesis(part)), ws)

    def framed(self, raw: Tensor) -> Tensor:
        """Raw pictures in [-1, 1] of the network's size as pictures in [0, 1] of the prior's."""
        if self.crop:
            first = (raw.shape[2] - self.crop) // 2
            raw = raw[:, :, first : first + self.crop, first : first + self.crop]
        if self.side and self.side != raw.shape[2]:
            raw = F.interpolate(
                raw,
                size=(self.side, self.side),
                mode="bilinear",
                antialias=True,
                align_corners=False,
            )
        return raw / 2 + 0.5

    def in_parts(self, make: Any, *columns: Tensor) -> Tensor:
        """`make(*columns)` for as many rows at a time as the memory holds."""
        together = self.together
        if len(columns[0]) <= together:
            return make(*columns)
        parts = zip(*(column.split(together) for column in columns), strict=True)
        if not torch.is_grad_enabled():
            return torch.cat([make(*part) for part in parts])
        return torch.cat(
            [
                checkpoint(make, *part, use_reentrant=False, preserve_rng_state=False)
                for part in parts
            ]
        )

    @property
    def together(self) -> int:
        """How many pictures are made at once: a power of two, at least 1, so that parts of a batch that is filled up to 16 are alike."""
        fitting = int(self.memory * GIB / picture_bytes(self.settings))
        return 2 ** max(0, fitting.bit_length() - 1)


def picture_bytes(settings: StyleSettings) -> int:
    """About how much memory the gradients of one picture take."""
    maps = sum(
        settings.width(size) * size**2 * (1 if size == settings.sizes[0] else 2)
        for size in settings.sizes
    )
    return 4 * COPIES * maps


@priors.register
@parameters
class Stylegan2:
    """A style-based generator: read from a file of `frostglass convert stylegan2`, or trained on public pictures.

    Critic: E sp(D(G(z))) + E sp(-D(x)) + γ/2 · E‖∇D(x)‖²; generator: E sp(-D(G(z))), sp(a) = ln(1 + eᵃ), with a running mean of the generator's weights as
    the result. With `path` λ the generator's loss gets λ · E(‖Jᵀy‖ - a)², J the picture's derivative by the styles, y Gaussian noise, a the mean of ‖Jᵀy‖.
    Pictures are x/2 + ½ of the network's raw ones, cut off at 0 and 1, with constant noise.

    Paper: Karras et al., Analyzing and Improving the Image Quality of StyleGAN, CVPR 2020, arXiv 1912.04958; Karras et al., Training Generative Adversarial
        Networks with Limited Data (ADA), NeurIPS 2020, arXiv 2006.06676; Zhao et al., Differentiable Augmentation, NeurIPS 2020, arXiv 2006.10738.
    Differs: the two regularisers take their turn at random with one chance in `r1_every` (`path_every`), and are added to the loss of that step, where the official code
        has a step of its own at every 16th (8th). a is the mean of the batch, not a running one. `changes` are DiffAugment's at full strength, not
        ADA's adapted ones. Whom weights that are read were trained on is not known, and the report says so. No style mixing, as in ADA's settings for small pictures. No critic is kept: it judges pictures in groups, so
        that candidates would influence each other.

    Args:
        weights: a file written by `frostglass convert stylegan2`; nothing is trained then, and the sizes below are the file's.
        crop: of the pictures that weights make, keep only this many pixels a side in the middle; 0 keeps all. 800 of 1024 is usual for faces.
        resize: accept weights that make pictures of another size than the data has; they are resized, after `crop`.
        resolution: pixels a side of what the network makes; told by the data or by the weights, and refused if it is something else.
        latent: length of the latent z. style: length of the style w. layers: fully connected layers from z to w.
        channel_base: a block at r pixels has channel_base // r channels, ...
        channel_max: ... and at most this many.
        clamp: bound of what convolutions put out; none if not given.
        critic_base: channel_base of the critic; the generator's if not given.
        steps: generator steps. batch: images a step.
        lr: Adam's step size, with betas (0, 0.99).
        r1: γ. r1_every: see above.
        path: λ; 2 published, 0 is off, as in ADA's settings for small pictures. path_every: see above.
        changes: what is done to pictures before the critic sees them: "colour", "move", "cover"; none by default.
        average: decay of the running mean of the generator's weights.
        cooldown: share of the steps, at the end, over which lr falls linearly to zero; 0 is the published training.
        memory: GiB that making pictures may take in an attack; fewer at a time are made where it is not enough. Sizes a result's last digits only.
        checkpoint_every: generator steps between checkpoints; does not change the result.
    """

    weights: str | None = None
    crop: Annotated[int, Field(ge=0)] = 0
    resize: bool = False
    resolution: Annotated[int, Field(ge=8, le=1024)] | None = None
    latent: Annotated[int, Field(ge=1)] = 128
    style: Annotated[int, Field(ge=1)] = 128
    layers: Annotated[int, Field(ge=1, le=64)] = 2
    channel_base: Annotated[int, Field(ge=1)] = 1024
    channel_max: Annotated[int, Field(ge=1)] = 128
    clamp: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    critic_base: Annotated[int, Field(ge=1)] | None = None
    steps: Annotated[int, Field(ge=1)] = 20_000
    batch: Annotated[int, Field(ge=4)] = 32
    lr: Annotated[float, Field(gt=0)] = 2.5e-3
    r1: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.01
    r1_every: Annotated[int, Field(ge=1)] = 16
    path: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    path_every: Annotated[int, Field(ge=1)] = 8
    changes: tuple[Change, ...] = ()
    average: Annotated[float, Field(ge=0, lt=1)] = 0.998
    cooldown: Annotated[float, Field(ge=0, le=1)] = 0.0
    memory: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 4.0
    checkpoint_every: Annotated[int, Field(ge=1)] = 200

    tied: ClassVar[bool] = False
    needs: ClassVar[None] = None
    keeps_critic: ClassVar[bool] = False
    critic_steps: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if self.batch % 4:
            raise ValueError(
                f"batch ({self.batch}) must be a multiple of 4: the critic judges groups of 4"
            )

    @property
    def ready(self) -> bool:
        return self.weights is not None

    def settings(self, image_shape: Shape) -> StyleSettings:
        """What the generator of pictures of this shape is made from."""
        colours, height, width = image_shape
        if self.resolution:
            height = width = self.resolution
        if height != width or height < 8 or height & (height - 1):
            raise ConfigError(
                f"stylegan2 makes square pictures of 8, 16, ..., 1024 pixels, got {height}×{width}: choose another data.size"
            )
        return StyleSettings(
            resolution=height, colours=colours, z_dim=self.latent, w_dim=self.style, layers=self.layers,  # type: ignore[arg-type]
            channel_base=self.channel_base, channel_max=self.channel_max, clamp=self.clamp,
        )  # fmt: skip

    def blocks(self, image_shape: Shape) -> int:
        """How many blocks the generator of pictures of this shape has."""
        return len(self.settings(image_shape).sizes)

    def check_trained(self, image_shape: Shape) -> None:
        """Refuse what only weights that are read can have."""
        if self.crop or self.resolution not in (None, image_shape[1]):
            raise ConfigError(
                f"prior.crop and prior.resolution are for weights that are read: a stylegan2 is trained to make the data's {image_shape[1]} pixels a side"
            )

    def networks(self, image_shape: Shape, classes: int = 0) -> tuple[StylePictures, StyleCritic]:
        """Generator and critic for one image shape, freshly initialised."""
        made = self.settings(image_shape)
        judged = replace(made, channel_base=self.critic_base or self.channel_base)
        return StylePictures(
            StyleGenerator(made), self.memory, crop=self.crop, side=image_shape[1]
        ), StyleCritic(judged)

    def files(self) -> list[Path]:
        """Files this prior reads."""
        return [Path(self.weights)] if self.weights else []

    def read(self, image_shape: Shape) -> Prior:
        """The prior of `weights`, if it fits images of this shape."""
        network = load_generator(str(self.weights))
        made = network.settings
        if self.resolution not in (None, made.resolution):
            raise ConfigError(
                f"prior.resolution ({self.resolution}) is not the {made.resolution} pixels a side that {self.weights} makes: leave it out"
            )
        if image_shape[1] != image_shape[2]:
            raise ConfigError(
                f"stylegan2 makes square pictures, and the data has {image_shape[1]}×{image_shape[2]}: choose another data.size"
            )
        side = self.crop or made.resolution
        if side > made.resolution:
            raise ConfigError(
                f"prior.crop ({side}) is larger than the {made.resolution} pixels a side that {self.weights} makes: lower it"
            )
        if self.resize:
            side = image_shape[1]
        shape = (made.colours, side, side)
        check_size(str(self.weights), shape, image_shape)
        own = replace(
            self, weights=None, resolution=made.resolution, latent=made.z_dim, style=made.w_dim, layers=made.layers, channel_base=made.channel_base,
            channel_max=made.channel_max, clamp=made.clamp,
        )  # fmt: skip
        made_elsewhere = self._prior(
            StylePictures(network, self.memory, crop=self.crop, side=side),
            shape,
            identity_hashes([]),
            own,
        )
        return replace(made_elsewhere, info={**made_elsewhere.info, "seen_identities": UNKNOWN})

    def _prior(
        self, generator: StylePictures, shape: Shape, seen_identities: Tensor, method: "Stylegan2"
    ) -> Prior:
        info = {"method": {"name": "stylegan2", "parameters": asdict(method)}}  # type: ignore[call-overload]
        return Prior(
            generator=generator.eval(),
            critic=None,
            latent=generator.settings.z_dim,
            image_shape=shape,
            seen_identities=seen_identities,
            info=info,
        )

    def train(
        self,
        public: Images,
        view: ModelView | None = None,
        *,
        seed: int = 0,
        work: Work | None = None,
    ) -> Prior:
        """Read the weights, or train on public images; resumes from the last checkpoint in `work` with the same result."""
        if self.weights:
            prior = self.read(public.shape)
            prior.generator.to(default_device())
            return prior
        self.check_trained(public.shape)
        with seeded(seed, "stylegan2", "init"):
            generator, critic = self.networks(public.shape)
        generator.to(default_device())
        critic.to(default_device())
        network = generator.network

        def made(rng: torch.Generator) -> tuple[Tensor, Tensor]:
            styles = network.mapping.w(draw(generator, self.batch, self.latent, rng))
            network.mapping.follow(styles)
            ws = styles[:, None].expand(-1, network.settings.num_ws, -1)
            return network.synthesis(ws, rng), ws

        def judged(pictures: Tensor, rng: torch.Generator) -> Tensor:
            return critic(changed(pictures, self.changes, rng))

        def critic_loss(rng: torch.Generator) -> Tensor:
            real = (
                public.floats(torch.randint(len(public), (self.batch,), generator=rng)).to(
                    default_device()
                )
                * 2
                - 1
            )
            with torch.no_grad():
                fake, _ = made(rng)
            loss = F.softplus(judged(fake, rng)).mean() + F.softplus(-judged(real, rng)).mean()
            if self.r1 and _turn(self.r1_every, rng):
                loss = loss + self.r1_every * self.r1 / 2 * steepness(
                    lambda x: judged(x, rng), real
                )
            return loss

        def generator_loss(rng: torch.Generator) -> Tensor:
            fake, _ = made(rng)
            loss = F.softplus(-judged(fake, rng)).mean()
            if self.path and _turn(self.path_every, rng):
                loss = loss + self.path_every * self.path * path_spread(*made(rng), rng)
            return loss

        schedule = Schedule(
            steps=self.steps,
            critic_steps=1,
            lr=self.lr,
            betas=(0.0, 0.99),
            average=self.average,
            cooldown=self.cooldown,
            checkpoint_every=self.checkpoint_every,
        )
        kept = train_in_turns(
            "stylegan2", generator, critic, schedule, critic_loss=critic_loss, generator_loss=generator_loss, seed=seed, work=work or Work.scratch(),
            sample=lambda network: network(draw(network, SHEET, self.latent, generator_for(0, "sheet"))),
        )  # fmt: skip
        assert isinstance(kept, StylePictures)
        return self._prior(kept, public.shape, identity_hashes(public.names), self)


def _turn(every: int, rng: torch.Generator) -> bool:
    return int(torch.randint(every, (), generator=rng)) == 0


def steepness(critic: Any, pictures: Tensor) -> Tensor:
    """R1: the mean of ‖∇ critic‖² at pictures."""
    pictures = pictures.detach().requires_grad_()
    (slope,) = torch.autograd.grad(critic(pictures).sum(), pictures, create_graph=True)
    return slope.square().sum((1, 2, 3)).mean()


def path_spread(pictures: Tensor, ws: Tensor, rng: torch.Generator) -> Tensor:
    """How unevenly pictures answer to their styles: the variance of ‖Jᵀy‖, y noise of variance 1 / pixels, over a batch."""
    noise = (
        torch.randn(pictures.shape, generator=rng).to(pictures)
        / (pictures.shape[2] * pictures.shape[3]) ** 0.5
    )
    (slopes,) = torch.autograd.grad((pictures * noise).sum(), ws, create_graph=True)
    lengths = slopes.square().sum(2).mean(1).sqrt()
    return (lengths - lengths.mean().detach()).square().mean()
