"""The StyleGAN2 prior: read from a converted file, or trained on public images."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, ClassVar, Self

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from frostglass.core.errors import ConfigError
from frostglass.core.method import AuditSize, Budget
from frostglass.core.parameters import parameters
from frostglass.core.prior import UNKNOWN, Prior
from frostglass.core.types import Shape
from frostglass.networks.stylegan2.critic import StyleCritic
from frostglass.networks.stylegan2.network import StyleGenerator, StyleSettings
from frostglass.networks.stylegan2.nvidia import load_generator
from frostglass.priors._diffaugment import Change, changed
from frostglass.priors._gan import GanMethod, GanTraining
from frostglass.priors._parts import in_parts, rows_at_once
from frostglass.priors.base import LOADED, PriorTask, check_size, on_device, priors

COPIES = 7  # tensors as large as a convolution's output that its gradients keep, measured


class StyleImages(nn.Module):
    """Images in [0, 1] of a StyleGAN2 with constant noise: `forward` of latents, `paint` of styles.

    `crop` keeps that many pixels a side in the middle of what the network makes, which is then
    resized to `side` pixels; 0 disables either. Images are made in parts that fit into `memory`
    GiB. If there are several parts, gradients recompute each part instead of storing it.
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
        """Number of blocks of the synthesis network."""
        return len(self.settings.sizes)

    def forward(self, latents: Tensor) -> Tensor:
        return self.paint(self.network.mapping(latents)).clamp(0, 1)

    def paint(self, ws: Tensor) -> Tensor:
        """Return unclamped images of styles (N, num_ws, w_dim), or (N, w_dim) for all layers."""
        if ws.dim() == 2:
            ws = ws[:, None].expand(-1, self.settings.num_ws, -1)
        return self.in_parts(lambda part: self.framed(self.network.synthesis(part)), ws)

    def framed(self, raw: Tensor) -> Tensor:
        """Crop, resize and scale the network's images in [-1, 1] to the prior's in [0, 1]."""
        if self.crop:
            first = (raw.shape[2] - self.crop) // 2
            raw = raw[:, :, first : first + self.crop, first : first + self.crop]
        if self.side and self.side != raw.shape[2]:
            size = (self.side, self.side)
            raw = F.interpolate(
                raw, size=size, mode="bilinear", antialias=True, align_corners=False
            )
        return raw / 2 + 0.5

    def in_parts(self, make: Callable[..., Tensor], *columns: Tensor) -> Tensor:
        """Return `make(*columns)`, computed for as many rows at a time as the memory holds."""
        return in_parts(make, self.rows_at_once, *columns)

    @property
    def rows_at_once(self) -> int:
        """Images made at once."""
        return rows_at_once(self.memory, image_bytes(self.settings))


def image_bytes(settings: StyleSettings) -> int:
    """Estimate the memory that the gradients of one image take."""
    maps = sum(
        settings.width(size) * size**2 * (1 if size == settings.sizes[0] else 2)
        for size in settings.sizes
    )
    return 4 * COPIES * maps


class Stylegan2Training(GanTraining["Stylegan2"]):
    """The losses of `Stylegan2`."""

    generator: StyleImages

    def generated(self, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return images in [-1, 1] and their styles."""
        network = self.generator.network
        styles = network.mapping.w(self.latents(rng))
        network.mapping.follow(styles)
        ws = styles[:, None].expand(-1, network.settings.num_ws, -1)
        return network.synthesis(ws, rng), ws

    def score(self, images: Tensor, rng: torch.Generator) -> Tensor:
        return self.critic(changed(images, self.method.changes, rng))

    def critic_loss(self, rng: torch.Generator) -> Tensor:
        method, real = self.method, self.images(self.indices(rng)) * 2 - 1
        with torch.no_grad():
            fake, _ = self.generated(rng)
        loss = F.softplus(self.score(fake, rng)).mean() + F.softplus(-self.score(real, rng)).mean()
        if method.r1 and _happens(method.r1_every, rng):
            penalty = squared_gradient(lambda x: self.score(x, rng), real)
            loss = loss + method.r1_every * method.r1 / 2 * penalty
        return loss

    def generator_loss(self, rng: torch.Generator) -> Tensor:
        method = self.method
        fake, _ = self.generated(rng)
        loss = F.softplus(-self.score(fake, rng)).mean()
        if method.path and _happens(method.path_every, rng):
            spread = path_length_variance(*self.generated(rng), rng)
            loss = loss + method.path_every * method.path * spread
        return loss


@priors.register
@parameters
class Stylegan2(GanMethod):
    """A style-based generator: read from a file of `frostglass convert stylegan2`, or trained.

    Critic: E sp(D(G(z))) + E sp(-D(x)) + γ/2 · E‖∇D(x)‖²; generator: E sp(-D(G(z))),
    sp(a) = ln(1 + eᵃ), with a running mean of the generator's weights as the result. With `path` λ
    the generator's loss gets λ · E(‖Jᵀy‖ - a)², J the image's derivative by the styles, y Gaussian
    noise, a the mean of ‖Jᵀy‖. Images are x/2 + ½ of the network's raw ones, clamped to [0, 1],
    with constant noise. Adam's betas are (0, 0.99).

    Use: real photos: convert published weights, and use `ppa`, `mirror` or `ifgmi`.
    Paper: Karras et al., Analyzing and Improving the Image Quality of StyleGAN, CVPR 2020, arXiv
        1912.04958; Karras et al., Training Generative Adversarial Networks with Limited Data (ADA),
        NeurIPS 2020, arXiv 2006.06676; Zhao et al., Differentiable Augmentation, NeurIPS 2020,
        arXiv 2006.10738.
    Differs: each regulariser is added to the loss of a step at random, with one chance in
        `r1_every` (`path_every`), where the official code has a step of its own at every 16th
        (8th). a is the mean of the batch, not a running one. `changes` are DiffAugment's at full
        strength, not ADA's adapted ones. Whom weights from a file were trained on is not known, and
        the report says so. No style mixing, as in ADA's settings for small images. No critic is
        kept: it compares images in groups, so that candidates would influence each other.

    Args:
        weights: a file written by `frostglass convert stylegan2`; nothing is trained then, and the
            sizes below are the file's.
        crop: of the images that weights make, keep only this many pixels a side in the middle; 0
            keeps all. 800 of 1024 is usual for faces.
        resize: accept weights that make images of another size than the data has; they are
            resized, after `crop`.
        resolution: pixels a side of what the network makes; known from the data or the weights,
            and refused if it is something else.
        style: length of the style w. layers: fully connected layers from z to w.
        channel_base: a block at r pixels has channel_base // r channels, ...
        channel_max: ... and at most this many.
        clamp: bound of the outputs of convolutions; none if not given.
        critic_base: channel_base of the critic; the generator's if not given.
        r1: γ. r1_every: see above.
        path: λ; 2 is published, 0 disables it, as in ADA's settings for small images.
        path_every: see above.
        changes: augmentations of the critic's images: "colour", "move", "cover"; none by default.
        memory: GiB that making images may take in an attack; fewer at a time are made where it is
            not enough. Changes the last digits of a result only.
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
    batch: Annotated[int, Field(ge=4)] = 32
    lr: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 2.5e-3
    r1: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.01
    r1_every: Annotated[int, Field(ge=1)] = 16
    path: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    path_every: Annotated[int, Field(ge=1)] = 8
    changes: tuple[Change, ...] = ()
    average: Annotated[float, Field(ge=0, lt=1)] = 0.998
    memory: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 4.0

    title: ClassVar[str] = "StyleGAN2"
    betas: ClassVar[tuple[float, float]] = (0.0, 0.99)
    keeps_critic: ClassVar[bool] = False
    training: ClassVar = Stylegan2Training

    def __post_init__(self) -> None:
        if self.batch % 4:
            raise ValueError(
                f"batch ({self.batch}) must be a multiple of 4: the critic compares groups of 4"
            )

    @property
    def ready(self) -> bool:
        return self.weights is not None

    def files(self) -> list[Path]:
        return [Path(self.weights)] if self.weights else []

    def settings(self, image_shape: Shape) -> StyleSettings:
        """Return the sizes of the generator for images of this shape."""
        colours, height, width = image_shape
        if self.resolution:
            height = width = self.resolution
        if height != width or height < 8 or height & (height - 1):
            raise ConfigError(
                f"stylegan2 makes square images of 8, 16, ..., 1024 pixels, got {height}×{width}: "
                "choose another data.size"
            )
        return StyleSettings(
            resolution=height,
            colours=colours,  # type: ignore[arg-type]
            z_dim=self.latent,
            w_dim=self.style,
            layers=self.layers,
            channel_base=self.channel_base,
            channel_max=self.channel_max,
            clamp=self.clamp,
        )

    def networks(self, image_shape: Shape, classes: int = 0) -> tuple[StyleImages, StyleCritic]:
        settings = self.settings(image_shape)
        generator = StyleGenerator(settings)
        base = self.critic_base or self.channel_base
        images = StyleImages(generator, self.memory, crop=self.crop, side=image_shape[1])
        return images, StyleCritic(replace(settings, channel_base=base))

    def untrained(self, image_shape: Shape, classes: int) -> Prior:
        if self.weights:
            return self.read(image_shape)
        self._check_trained(image_shape)
        return super().untrained(image_shape, classes)

    def _check_trained(self, image_shape: Shape) -> None:
        """Refuse parameters that only weights from a file can have."""
        if self.crop or self.resolution not in (None, image_shape[1]):
            raise ConfigError(
                "prior.crop and prior.resolution are for weights from a file: a stylegan2 is "
                f"trained to make the data's {image_shape[1]} pixels a side"
            )

    def read(self, image_shape: Shape) -> Prior:
        """Read the prior of `weights`; refuse it if it does not fit images of this shape."""
        network = load_generator(str(self.weights))
        settings = network.settings
        if self.resolution not in (None, settings.resolution):
            raise ConfigError(
                f"prior.resolution ({self.resolution}) is not the {settings.resolution} pixels a "
                f"side that {self.weights} makes: leave it out"
            )
        if image_shape[1] != image_shape[2]:
            raise ConfigError(
                f"stylegan2 makes square images, and the data has {image_shape[1]}×"
                f"{image_shape[2]}: choose another data.size"
            )
        side = self.crop or settings.resolution
        if side > settings.resolution:
            raise ConfigError(
                f"prior.crop ({side}) is larger than the {settings.resolution} pixels a side that "
                f"{self.weights} makes: lower it"
            )
        if self.resize:
            side = image_shape[1]
        shape: Shape = (settings.colours, side, side)
        check_size(str(self.weights), shape, image_shape)
        # Recorded with the file's sizes, so that a stored prior is read without the file.
        method = replace(
            self,
            weights=None,
            resolution=settings.resolution,
            latent=settings.z_dim,
            style=settings.w_dim,
            layers=settings.layers,
            channel_base=settings.channel_base,
            channel_max=settings.channel_max,
            clamp=settings.clamp,
        )
        generator = StyleImages(network, self.memory, crop=self.crop, side=side)
        prior = method.prior(generator, None, shape, 0)
        return replace(prior, info={**prior.info, "seen_identities": UNKNOWN})

    def fit(self, task: PriorTask) -> Prior:
        if self.weights:
            return on_device(self.read(task.public.shape), task.device)
        self._check_trained(task.public.shape)
        return super().fit(task)

    def brief(self) -> Self:
        return replace(super().brief(), r1_every=1, path_every=1)

    def budget(self, size: AuditSize) -> Budget:
        return Budget(LOADED) if self.weights else super().budget(size)


def _happens(every: int, rng: torch.Generator) -> bool:
    """Draw whether a regulariser is added in this step, with one chance in `every`."""
    return int(torch.randint(every, (), generator=rng)) == 0


def squared_gradient(critic: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
    """Return R1, the mean of ‖∇ critic‖² at images."""
    images = images.detach().requires_grad_()
    (slope,) = torch.autograd.grad(critic(images).sum(), images, create_graph=True)
    return slope.square().sum((1, 2, 3)).mean()


def path_length_variance(images: Tensor, ws: Tensor, rng: torch.Generator) -> Tensor:
    """Return the variance over a batch of ‖Jᵀy‖, y noise of variance 1 / pixels."""
    pixels = images.shape[2] * images.shape[3]
    noise = torch.randn(images.shape, generator=rng).to(images) / pixels**0.5
    (slopes,) = torch.autograd.grad((images * noise).sum(), ws, create_graph=True)
    lengths = slopes.square().sum(2).mean(1).sqrt()
    return (lengths - lengths.mean().detach()).square().mean()
