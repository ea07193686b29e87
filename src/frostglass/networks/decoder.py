"""Decoders turn features back into pictures; an attacker trains one against a device, and so does whoever protects it."""

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
from frostglass.networks.perceptual import perceptual_distance
from frostglass.priors.wgan import build_critic, build_generator
from frostglass.runtime.tensors import (
    optimizer_tensors,
    restore_optimizer,
    under_prefix,
    with_prefix,
)

DecoderForm = Literal["mirrored", "adv_learn", "crafter"]
DecoderNorm = Literal["mean_square", "batch_norm"]

WIDEST = 8  # times `width`: channels of the mirrored decoder's widest stage
FLOOR = (
    7  # pixels a side, at most, where up-convolutions begin; 224 pixels are 7 doubled five times
)
PUBLISHED = (
    32,
    16,
    8,
    4,
    1,
)  # times `width`: channels before each up-convolution of AdvLearn's figure
LARGEST = 64  # pixels a side that Crafter's decoder makes with strides of 2
SMALLEST = 8  # pixels a side that a critic can judge
FAINT = 1e-3  # a channel with less of the mean variance than this stays fainter than the others


def build_decoder(
    feature_shape: tuple[int, ...],
    image_shape: Shape,
    *,
    width: int = 64,
    form: DecoderForm = "mirrored",
) -> nn.Sequential:
    """A network that maps features (N, *feature_shape) to pictures (N, *image_shape); draws its weights from torch's global generator.

    It ends in a sigmoid, because our pictures are in [0, 1]. The published ones are in [-1, 1] behind a tanh (AdvLearn), or normalised
    behind a sigmoid that cannot reach them (Crafter).

    "mirrored" undoes a network of any depth: maps are widened, pass two residual blocks, and grow by doubling, so that it is strong also
    where nothing has to grow. Vectors become small maps by two linear layers first. "adv_learn" is AdvLearn's figure 6 at 224 pixels and
    width 64, with fewer stages below: two linear layers on the flat feature, 3×3 up-convolutions. "crafter" is the decoder of Crafter's
    code at 64 and 128 pixels: one linear layer on the flat feature and the up-convolutions of GMI's generator, the last of which has a
    stride of 4 above 64 pixels. Whatever size comes out is brought to that of the picture.
    """
    if not feature_shape or min(feature_shape) < 1:
        raise ConfigError(
            f"a decoder needs features of at least one number, got the shape {tuple(feature_shape)}: cut behind another layer"
        )
    build = {"mirrored": _mirrored, "adv_learn": _adv_learn, "crafter": _crafter}[form]
    return nn.Sequential(
        *build(feature_shape, image_shape, width), Sized(image_shape[1:]), nn.Sigmoid()
    )


class Sized(nn.Module):
    """Maps brought to a size, where they have not got it."""

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
    """Two 3×3 convolutions with batch norm beside the identity, or beside a 1×1 convolution where width or size change."""

    def __init__(self, channels: int, wide: int, stride: int = 1):
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(channels, wide, 3, stride, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU(),
            nn.Conv2d(wide, wide, 3, 1, 1, bias=False), nn.BatchNorm2d(wide),
        )  # fmt: skip
        same = channels == wide and stride == 1
        self.beside = (
            nn.Identity()
            if same
            else nn.Sequential(
                nn.Conv2d(channels, wide, 1, stride, bias=False), nn.BatchNorm2d(wide)
            )
        )

    def forward(self, maps: Tensor) -> Tensor:
        return F.relu(self.inner(maps) + self.beside(maps))


class TokenMaps(nn.Module):
    """Tokens (N, T, D) as D channels on a square grid; a first one for the whole picture is given to every place as D channels more."""

    def __init__(self, tokens: int):
        super().__init__()
        self.side = math.isqrt(tokens)
        self.whole = tokens - self.side**2

    def forward(self, tokens: Tensor) -> Tensor:
        maps = tokens[:, self.whole :].transpose(1, 2).unflatten(2, (self.side, self.side))
        if not self.whole:
            return maps
        return torch.cat(
            [maps, tokens[:, 0, :, None, None].expand(-1, -1, self.side, self.side)], 1
        )


class ChannelsFirst(nn.Module):
    """Maps (N, H, W, C) as (N, C, H, W)."""

    def forward(self, maps: Tensor) -> Tensor:
        return maps.permute(0, 3, 1, 2)


def channels_first(
    feature_shape: tuple[int, ...], image_shape: Shape = SQUARE
) -> tuple[list[nn.Module], Shape]:
    """Layers that put the channels of maps first where they are last, and the maps' shape then."""
    first, second, third = feature_shape
    return (
        ([ChannelsFirst()], (third, first, second))
        if channel_axis(feature_shape, image_shape)
        else ([], (first, second, third))
    )


def _mirrored(feature_shape: tuple[int, ...], image_shape: Shape, width: int) -> list[nn.Module]:
    layers, (channels, high, wide) = _as_maps(feature_shape, image_shape, width)
    doublings = max(
        0, min(round(math.log2(image_shape[1] / high)), round(math.log2(image_shape[2] / wide)))
    )
    widths = [width * min(2**stage, WIDEST) for stage in reversed(range(doublings + 1))]
    layers += [
        nn.Conv2d(channels, widths[0], 3, 1, 1, bias=False),
        nn.BatchNorm2d(widths[0]),
        nn.ReLU(),
    ]
    layers += [Residual(widths[0], widths[0]) for _ in range(2)]
    for before, after in itertools.pairwise(widths):
        layers += [
            nn.ConvTranspose2d(before, after, 4, 2, 1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
        ]
    return [*layers, nn.Conv2d(width, image_shape[0], 3, 1, 1)]


def _as_maps(
    feature_shape: tuple[int, ...], image_shape: Shape, width: int
) -> tuple[list[nn.Module], Shape]:
    """Layers that make maps of a feature, and their shape."""
    if len(feature_shape) == 3:
        return channels_first(feature_shape, image_shape)
    if len(feature_shape) == 2 and feature_shape[0] - math.isqrt(feature_shape[0]) ** 2 in (0, 1):
        grid = TokenMaps(feature_shape[0])
        return [grid], (feature_shape[1] * (1 + grid.whole), grid.side, grid.side)
    begin, _ = _floor(image_shape)
    return _linear(feature_shape, WIDEST * width, begin), (WIDEST * width, *begin)


def _floor(image_shape: Shape) -> tuple[tuple[int, int], int]:
    """The size of the maps that up-convolutions begin with, and how often they double."""
    doublings = max(0, math.ceil(math.log2(max(image_shape[1:]) / FLOOR)))
    return (
        math.ceil(image_shape[1] / 2**doublings),
        math.ceil(image_shape[2] / 2**doublings),
    ), doublings


def _linear(
    feature_shape: tuple[int, ...], channels: int, size: tuple[int, int]
) -> list[nn.Module]:
    return [
        nn.Flatten(), nn.Linear(math.prod(feature_shape), channels), nn.ReLU(),
        nn.Linear(channels, channels * math.prod(size)), nn.ReLU(), nn.Unflatten(1, (channels, *size)),
    ]  # fmt: skip


def _adv_learn(feature_shape: tuple[int, ...], image_shape: Shape, width: int) -> list[nn.Module]:
    begin, doublings = _floor(image_shape)
    multiples = (
        [*[PUBLISHED[0]] * (doublings - len(PUBLISHED)), *PUBLISHED[-doublings:]]
        if doublings
        else [1]
    )
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
    """Features (N, ...) of pictures of a shape, with mean 0 and variance 1 in each channel over the batch, as any attacker makes them with statistics of his own.

    So no scale or shift of a channel, nor of the whole, changes anything: whoever learns to withstand a decoder gains nothing by them. The
    statistics are always those of the batch, differentiably: with stored ones scaling would still pay, until they follow. Channels much
    fainter than the others stay so, or their gradients would explode.
    """
    channels = 1 + channel_axis(tuple(features.shape[1:]), image_shape)
    axes = [axis for axis in range(features.ndim) if axis != channels]
    centred = features - features.mean(axes, keepdim=True)
    variance = centred.square().mean(axes, keepdim=True)
    return centred / (variance + FAINT * variance.mean() + 1e-12).sqrt()


def pixel_distance(made: Tensor, images: Tensor, norm: DecoderNorm) -> Tensor:
    """How far pictures are from others: the "mean_square" of their pixels, or "batch_norm", the length of all differences of the batch."""
    return (
        F.mse_loss(made, images)
        if norm == "mean_square"
        else torch.linalg.vector_norm(made - images)
    )


def decoder_loss(
    made: Tensor,
    images: Tensor,
    *,
    adversarial: float = 0.0,
    perceptual_weight: float = 0.0,
    critic: nn.Module | None = None,
    judge: Target | None = None,
    norm: DecoderNorm = "mean_square",
) -> Tensor:
    """L_p + μ1 L_adv + μ2 L_perc of the pictures a decoder makes: by their pixels, -ln D of a critic's logits, and the layers of a judge."""
    loss = pixel_distance(made, images, norm)
    if adversarial:
        if critic is None:
            raise ConfigError(
                "a decoder with an adversarial weight needs a critic, and none is given: give one, or set the weight to 0"
            )
        loss = loss + adversarial * F.softplus(-critic(made)).mean()
    if perceptual_weight:
        if judge is None:
            raise ConfigError(
                "a decoder with a perceptual weight needs a perceptual network, and none is given: pass judge=..."
            )
        loss = loss + perceptual_weight * perceptual_distance(judge, made, images).mean()
    return loss


def critic_loss(critic: nn.Module, real: Tensor, made: Tensor) -> Tensor:
    """-ln D(x) - ln(1 - D(x̂)), D the sigmoid of the critic's logits; `made` gets no gradient.

    AdvLearn's equation 3 has the two labels swapped, so that critic and decoder would pull the same way.
    """
    return F.softplus(-critic(real)).mean() + F.softplus(critic(made.detach())).mean()


class DecoderGame:
    """A decoder that learns to make pictures of features, perhaps against a critic; between its steps both stand still.

    Standing still means evaluation mode and no gradients for weights: what passes through the decoder then moves no statistic of it. Its
    weights are drawn from torch's global generator. `judge` must stand still by itself.
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
        judge: Target | None = None,
        norm: DecoderNorm = "mean_square",
        device: torch.device | str = "cpu",
    ):
        if adversarial and min(image_shape[1:]) < SMALLEST:
            raise ConfigError(
                f"a decoder's critic needs pictures of {SMALLEST} pixels a side or more, got {image_shape}: set its weight to 0"
            )
        self.decoder = build_decoder(feature_shape, image_shape, width=width, form=form).to(device)
        self.critic = (
            build_critic(width, image_shape[0], min(image_shape[1:])).to(device)
            if adversarial
            else None
        )
        self._networks: dict[str, nn.Module] = {"decoder": self.decoder}
        if self.critic is not None:
            self._networks["critic"] = self.critic
        self._rules = {
            name: torch.optim.Adam(network.parameters(), lr=lr)
            for name, network in self._networks.items()
        }
        self._adversarial, self._perceptual, self._judge, self._norm = (
            adversarial,
            perceptual_weight,
            judge,
            norm,
        )
        for network in self._networks.values():
            network.eval().requires_grad_(False)

    def step(self, features: Tensor, images: Tensor) -> float:
        """Learn from features and their pictures, the critic first; returns the decoder's loss."""
        self.decoder.train().requires_grad_(True)
        made = self.decoder(features)
        if self.critic is not None:
            self.critic.train().requires_grad_(True)
            self._descend("critic", critic_loss(self.critic, images, made))
            self.critic.eval().requires_grad_(False)
        loss = decoder_loss(
            made, images, adversarial=self._adversarial, perceptual_weight=self._perceptual, critic=self.critic, judge=self._judge,
            norm=self._norm,
        )  # fmt: skip
        self._descend("decoder", loss)
        self.decoder.eval().requires_grad_(False)
        return loss.item()

    def tensors(self) -> dict[str, Tensor]:
        """Weights and optimisers, for a checkpoint."""
        found: dict[str, Tensor] = {}
        for name, network in self._networks.items():
            found |= with_prefix(name, network.state_dict()) | with_prefix(
                f"{name}_rule", optimizer_tensors(self._rules[name])
            )
        return found

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Put back what `tensors` gave."""
        for name, network in self._networks.items():
            network.load_state_dict(under_prefix(name, dict(tensors)))
            restore_optimizer(self._rules[name], under_prefix(f"{name}_rule", dict(tensors)))

    def _descend(self, name: str, loss: Tensor) -> None:
        if not loss.isfinite():
            raise RunError(
                f"the {name} that learns to rebuild pictures from features has a loss of {loss.item()}: lower its learning rate"
            )
        loss.backward()
        self._rules[name].step()
        self._rules[name].zero_grad(
            set_to_none=True
        )  # whose memory the others need while this one stands still
