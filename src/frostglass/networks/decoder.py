"""Decoders that reconstruct images from features, for attacks and for defenses against them."""

import itertools
import math
from collections.abc import Mapping
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frostglass.core.errors import ConfigError, RunError
from frostglass.core.types import Shape, Target
from frostglass.models.cut import SQUARE, channel_axis
from frostglass.networks.dcgan import build_critic, build_generator
from frostglass.networks.perceptual import perceptual_distance
from frostglass.runtime.fused import fuse
from frostglass.runtime.layout import lay_out, protect_narrow_projections
from frostglass.runtime.tensors import (
    optimizer_tensors,
    restore_optimizer,
    under_prefix,
    with_prefix,
)

DecoderForm = Literal["mirrored", "adv_learn", "crafter"]
DecoderNorm = Literal["mean_square", "batch_norm"]

WIDEST = 8  # times `width`: channels of the mirrored decoder's widest stage
FLOOR = 7  # maximal pixels a side where upsampling starts; 224 pixels are 7 doubled five times
PUBLISHED = (32, 16, 8, 4, 1)  # times `width`: channels before each upsampling in AdvLearn's figure
LARGEST = 64  # pixels a side that Crafter's decoder makes with strides of 2
SMALLEST = 8  # pixels a side that a critic accepts
FAINT = 1e-3  # channels below this share of the mean variance are not fully standardised


def build_decoder(
    feature_shape: tuple[int, ...],
    image_shape: Shape,
    *,
    width: int = 64,
    form: DecoderForm = "mirrored",
) -> nn.Sequential:
    """Build a network from features (N, *feature_shape) to images (N, *image_shape).

    Weights are drawn from torch's global generator. It ends in a sigmoid, because our images are in
    [0, 1]. The published ones are in [-1, 1] after a tanh (AdvLearn), or normalised after a sigmoid
    that cannot reach them (Crafter).

    "mirrored" inverts a network of any depth: maps are widened, pass two residual blocks, and grow
    by doubling, so that it is strong even if nothing has to grow. Vectors become small maps by two
    linear layers first. "adv_learn" is AdvLearn's figure 6 at 224 pixels and width 64, with fewer
    stages below: two linear layers on the flat feature, 3×3 transposed convolutions. "crafter" is
    the decoder of Crafter's code at 64 and 128 pixels: one linear layer on the flat feature and the
    transposed convolutions of GMI's generator, the last of which has a stride of 4 above 64 pixels.
    The output is resized to the size of the image.
    """
    if not feature_shape or min(feature_shape) < 1:
        raise ConfigError(
            f"a decoder needs non-empty features, got the shape {tuple(feature_shape)}: cut after "
            "another layer"
        )
    build = {"mirrored": _mirrored, "adv_learn": _adv_learn, "crafter": _crafter}[form]
    return nn.Sequential(
        *build(feature_shape, image_shape, width), Sized(image_shape[1:]), nn.Sigmoid()
    )


class Sized(nn.Module):
    """Resize maps to a size, if they do not have it."""

    def __init__(self, size: tuple[int, ...]):
        super().__init__()
        self.size = tuple(size)

    def forward(self, maps: Tensor) -> Tensor:
        if maps.shape[2:] == self.size:
            return maps
        return F.interpolate(
            maps, size=self.size, mode="bilinear", antialias=True, align_corners=False
        )


class Residual(nn.Module):
    """Two 3×3 convolutions with batch norm, and a shortcut: a 1×1 convolution if shapes change."""

    def __init__(self, channels: int, wide: int, stride: int = 1):
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(channels, wide, 3, stride, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU(),
            nn.Conv2d(wide, wide, 3, 1, 1, bias=False), nn.BatchNorm2d(wide),
        )  # fmt: skip
        self.beside: nn.Module = nn.Identity()
        if channels != wide or stride != 1:
            shortcut = nn.Conv2d(channels, wide, 1, stride, bias=False)
            self.beside = nn.Sequential(shortcut, nn.BatchNorm2d(wide))
            protect_narrow_projections(self.beside)  # features may come with channels last

    def forward(self, maps: Tensor) -> Tensor:
        return F.relu(self.inner(maps) + self.beside(maps))


class TokenMaps(nn.Module):
    """Tokens (N, T, D) as D channels on a square grid; a class token becomes D more channels."""

    def __init__(self, tokens: int):
        super().__init__()
        self.side = math.isqrt(tokens)
        self.whole = tokens - self.side**2

    def forward(self, tokens: Tensor) -> Tensor:
        maps = tokens[:, self.whole :].transpose(1, 2).unflatten(2, (self.side, self.side))
        if not self.whole:
            return maps
        whole = tokens[:, 0, :, None, None].expand(-1, -1, self.side, self.side)
        return torch.cat([maps, whole], 1)


class ChannelsFirst(nn.Module):
    """Maps (N, H, W, C) as (N, C, H, W)."""

    def forward(self, maps: Tensor) -> Tensor:
        return maps.permute(0, 3, 1, 2)


def channels_first(
    feature_shape: tuple[int, ...], image_shape: Shape = SQUARE
) -> tuple[list[nn.Module], Shape]:
    """Return layers that move the channels of maps first, if needed, and the resulting shape."""
    first, second, third = feature_shape
    if channel_axis(feature_shape, image_shape):
        return [ChannelsFirst()], (third, first, second)
    return [], (first, second, third)


def _mirrored(feature_shape: tuple[int, ...], image_shape: Shape, width: int) -> list[nn.Module]:
    layers, (channels, high, wide) = _as_maps(feature_shape, image_shape, width)
    doublings = max(
        0, min(round(math.log2(image_shape[1] / high)), round(math.log2(image_shape[2] / wide)))
    )
    widths = [width * min(2**stage, WIDEST) for stage in reversed(range(doublings + 1))]
    widen = nn.Conv2d(channels, widths[0], 3, 1, 1, bias=False)
    layers += [widen, nn.BatchNorm2d(widths[0]), nn.ReLU()]
    layers += [Residual(widths[0], widths[0]) for _ in range(2)]
    for before, after in itertools.pairwise(widths):
        upscale = nn.ConvTranspose2d(before, after, 4, 2, 1, bias=False)
        layers += [upscale, nn.BatchNorm2d(after), nn.ReLU()]
    return [*layers, nn.Conv2d(width, image_shape[0], 3, 1, 1)]


def _as_maps(
    feature_shape: tuple[int, ...], image_shape: Shape, width: int
) -> tuple[list[nn.Module], Shape]:
    """Return layers that turn a feature into maps, and the shape of the maps."""
    if len(feature_shape) == 3:
        return channels_first(feature_shape, image_shape)
    if len(feature_shape) == 2 and feature_shape[0] - math.isqrt(feature_shape[0]) ** 2 in (0, 1):
        grid = TokenMaps(feature_shape[0])
        return [grid], (feature_shape[1] * (1 + grid.whole), grid.side, grid.side)
    begin, _ = _floor(image_shape)
    return _linear(feature_shape, WIDEST * width, begin), (WIDEST * width, *begin)


def _floor(image_shape: Shape) -> tuple[tuple[int, int], int]:
    """Return the size of the first maps, and how often they are doubled."""
    doublings = max(0, math.ceil(math.log2(max(image_shape[1:]) / FLOOR)))
    height, width = (math.ceil(length / 2**doublings) for length in image_shape[1:])
    return (height, width), doublings


def _linear(
    feature_shape: tuple[int, ...], channels: int, size: tuple[int, int]
) -> list[nn.Module]:
    return [
        nn.Flatten(), nn.Linear(math.prod(feature_shape), channels), nn.ReLU(),
        nn.Linear(channels, channels * math.prod(size)), nn.ReLU(),
        nn.Unflatten(1, (channels, *size)),
    ]  # fmt: skip


def _adv_learn(feature_shape: tuple[int, ...], image_shape: Shape, width: int) -> list[nn.Module]:
    begin, doublings = _floor(image_shape)
    multiples = [1]
    if doublings:
        multiples = [*[PUBLISHED[0]] * (doublings - len(PUBLISHED)), *PUBLISHED[-doublings:]]
    widths = [width * multiple for multiple in multiples]
    layers = _linear(feature_shape, widths[0], begin)
    for before, after in itertools.pairwise(widths):
        layers += [nn.ConvTranspose2d(before, after, 3, 2, 1, 1), nn.BatchNorm2d(after), nn.ReLU()]
    return [*layers, nn.ConvTranspose2d(widths[-1], image_shape[0], 3, 2, 1, 1)]


def _crafter(feature_shape: tuple[int, ...], image_shape: Shape, width: int) -> list[nn.Module]:
    side = min(LARGEST, max(16, 2 ** math.ceil(math.log2(max(image_shape[1:])))))
    *layers, last, _ = build_generator(
        math.prod(feature_shape), width, (image_shape[0], side, side)
    )
    if max(image_shape[1:]) > LARGEST:
        last = nn.ConvTranspose2d(width, image_shape[0], 5, 4, 1, 1)
    return [nn.Flatten(), *layers, last]


def standardised(features: Tensor, image_shape: Shape = SQUARE) -> Tensor:
    """Scale features (N, ...) to mean 0 and variance 1 in each channel over the batch.

    Any attacker can do this. A defense that trains against a decoder thus gains nothing by scaling
    or shifting channels. The statistics are always those of the batch, and differentiable: with
    running ones scaling would pay until they follow. Channels with much less variance than the
    others keep less, or their gradients would explode.
    """
    channels = 1 + channel_axis(tuple(features.shape[1:]), image_shape)
    axes = [axis for axis in range(features.ndim) if axis != channels]
    centred = features - features.mean(axes, keepdim=True)
    variance = centred.square().mean(axes, keepdim=True)
    return centred / (variance + FAINT * variance.mean() + 1e-12).sqrt()


def pixel_distance(decoded: Tensor, images: Tensor, norm: DecoderNorm) -> Tensor:
    """Return the mean square of pixel differences, or for "batch_norm" their norm in the batch."""
    if norm == "mean_square":
        return F.mse_loss(decoded, images)
    return torch.linalg.vector_norm(decoded - images)


def decoder_loss(
    decoded: Tensor,
    images: Tensor,
    *,
    adversarial: float = 0.0,
    perceptual_weight: float = 0.0,
    critic: nn.Module | None = None,
    perceptual: Target | None = None,
    norm: DecoderNorm = "mean_square",
) -> Tensor:
    """Return L_p + μ1 L_adv + μ2 L_perc of decoded images.

    The terms are the pixel distance, -ln D of a critic's logits, and the distance of the layers of
    a perceptual network.
    """
    loss = pixel_distance(decoded, images, norm)
    if adversarial:
        if critic is None:
            raise ConfigError(
                "a decoder with an adversarial weight needs a critic, got none: pass critic=..., "
                "or set the weight to 0"
            )
        loss = loss + adversarial * F.softplus(-critic(decoded)).mean()
    if perceptual_weight:
        if perceptual is None:
            raise ConfigError(
                "a decoder with a perceptual weight needs a perceptual network, got none: pass "
                "perceptual=..., or set the weight to 0"
            )
        distance = perceptual_distance(perceptual, decoded, images)
        loss = loss + perceptual_weight * distance.mean()
    return loss


def critic_loss(critic: nn.Module, real: Tensor, decoded: Tensor) -> Tensor:
    """Return -ln D(x) - ln(1 - D(x̂)), D the sigmoid of logits; `decoded` gets no gradient.

    AdvLearn's equation 3 has the two labels swapped, so that critic and decoder would cooperate.
    """
    return F.softplus(-critic(real)).mean() + F.softplus(critic(decoded.detach())).mean()


class DecoderGame:
    """A decoder that is trained to reconstruct images from features, optionally against a critic.

    Between its steps both are frozen: in evaluation mode and without weight gradients, so that a
    forward pass changes no statistics. Weights are drawn from torch's global generator. The caller
    freezes `perceptual`.
    """

    def __init__(
        self,
        feature_shape: tuple[int, ...],
        image_shape: Shape,
        *,
        width: int = 64,
        form: DecoderForm = "mirrored",
        lr: float = 1e-3,
        adversarial: float = 0.0,
        perceptual_weight: float = 0.0,
        perceptual: Target | None = None,
        norm: DecoderNorm = "mean_square",
        device: torch.device | str = "cpu",
    ):
        if adversarial and min(image_shape[1:]) < SMALLEST:
            raise ConfigError(
                f"a decoder's critic needs images of at least {SMALLEST} pixels a side, got "
                f"{image_shape}: set its weight to 0"
            )
        self.decoder = build_decoder(feature_shape, image_shape, width=width, form=form).to(device)
        lay_out(self.decoder, torch.channels_last)  # a step takes two thirds to nine tenths of it
        self.critic: nn.Module | None = None
        self._networks: dict[str, nn.Module] = {"decoder": self.decoder}
        if adversarial:
            self.critic = build_critic(width, image_shape[0], min(image_shape[1:])).to(device)
            self._networks["critic"] = self.critic
        self._optimizers = {
            name: fuse(torch.optim.Adam(network.parameters(), lr=lr))
            for name, network in self._networks.items()
        }
        self._adversarial, self._norm = adversarial, norm
        self._perceptual_weight, self._perceptual = perceptual_weight, perceptual
        for network in self._networks.values():
            network.eval().requires_grad_(False)

    def step(self, features: Tensor, images: Tensor) -> float:
        """Take one step on features and their images, critic first; return the decoder's loss."""
        self.decoder.train().requires_grad_(True)
        decoded = self.decoder(features)
        if self.critic is not None:
            self.critic.train().requires_grad_(True)
            self._descend("critic", critic_loss(self.critic, images, decoded))
            self.critic.eval().requires_grad_(False)
        loss = decoder_loss(
            decoded, images, adversarial=self._adversarial, critic=self.critic,
            perceptual_weight=self._perceptual_weight, perceptual=self._perceptual, norm=self._norm,
        )  # fmt: skip
        self._descend("decoder", loss)
        self.decoder.eval().requires_grad_(False)
        return loss.item()

    def tensors(self) -> dict[str, Tensor]:
        """Return weights and optimizer states, for a checkpoint."""
        tensors: dict[str, Tensor] = {}
        for name, network in self._networks.items():
            tensors |= with_prefix(name, network.state_dict())
            tensors |= with_prefix(f"{name}_rule", optimizer_tensors(self._optimizers[name]))
        return tensors

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what `tensors` returned."""
        for name, network in self._networks.items():
            network.load_state_dict(under_prefix(name, dict(tensors)))
            restore_optimizer(self._optimizers[name], under_prefix(f"{name}_rule", dict(tensors)))

    def _descend(self, name: str, loss: Tensor) -> None:
        if not loss.isfinite():
            raise RunError(
                f"expected a finite loss of the {name} that reconstructs images from features, got "
                f"{loss.item()}: lower its learning rate"
            )
        loss.backward()
        self._optimizers[name].step()
        self._optimizers[name].zero_grad(set_to_none=True)  # frees memory for the other networks
