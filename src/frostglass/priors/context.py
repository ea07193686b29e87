"""GMI with auxiliary knowledge: a generator that completes a masked or blurred image."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from frostglass.core.errors import ConfigError, DataError
from frostglass.core.parameters import parameters
from frostglass.core.pixels import chunks
from frostglass.core.prior import Condition, Prior
from frostglass.core.types import Shape
from frostglass.networks.dcgan import build_critic
from frostglass.priors._gan import SHEET, GanTraining, check_square, draw
from frostglass.priors.base import priors
from frostglass.priors.wgan import WassersteinMethod, diversity
from frostglass.runtime.seeding import generator_for
from frostglass.store.files import Work

Hint = Literal["centre", "face_t", "blur"]
# Holes as rectangles (top, bottom, left, right) in sixteenths of the side: the middle; eyes with
# nose and mouth below.
HOLES: dict[Hint, tuple[tuple[int, int, int, int], ...]] = {
    "centre": ((4, 12, 4, 12),),
    "face_t": ((4, 8, 2, 14), (8, 14, 6, 10)),
}


class ContextTraining(GanTraining["Context"]):
    """The losses of `Context`."""

    generator: "Completion"
    critic: "Critics"

    def prepare(self) -> None:
        pixels = self.public.pixels
        parts = chunks(len(pixels), pixels.shape[1:])
        totals = torch.stack([pixels[part].sum((0, 2, 3)) for part in parts]).sum(0).tolist()
        each = len(pixels) * math.prod(pixels.shape[2:])
        self.fill = [total / each / 255 for total in totals]
        order = torch.randperm(len(pixels), generator=generator_for(0, "sheet"))
        self.shown = self.images(order[: SHEET // 2])

    def hints(self, images: Tensor) -> Tensor:
        return hinted(images, self.method.hint, self.fill, self.method.blur)

    def completed(self, rng: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return public images, their hints, latents, and the completed hints."""
        real = self.images(self.indices(rng))
        hints, latents = self.hints(real), self.latents(rng)
        return real, hints, latents, self.generator(latents, hints)

    def critic_loss(self, rng: torch.Generator) -> Tensor:
        with torch.no_grad():
            real, _, _, fake = self.completed(rng)
        window = self.critic.window(rng)
        whole = self.method.critic_term(self.critic.whole, real, fake, self.shares(rng))
        cut = real[window], fake[window]
        return whole + self.method.critic_term(self.critic.part, *cut, self.shares(rng))

    def generator_loss(self, rng: torch.Generator) -> Tensor:
        _, hints, latents, fake = self.completed(rng)
        whole, part = self.critic.whole, self.critic.part
        loss = -(whole(fake).mean() + part(fake[self.critic.window(rng)]).mean()) / 2
        if not self.method.tied:
            return loss
        others = self.latents(rng)
        features, other_features = (
            self.target.logits_and_features(images)[1]
            for images in (fake, self.generator(others, hints))
        )
        apart = diversity(features, other_features, latents, others, "mean")
        return loss - self.method.diversity * apart

    def sample(self, generator: nn.Module) -> Tensor:
        """Return hints, each beside its completion."""
        hints, rng = self.hints(self.shown), generator_for(0, "sheet")
        completions = generator(draw(generator, len(hints), self.method.latent, rng), hints)
        return torch.stack([hints[:, :-1], completions], 1).flatten(0, 1)

    def finish(self, prior: Prior, work: Work) -> Prior:
        return replace(
            prior, info={**prior.info, "fill": self.fill, "completes": self.public.shape}
        )


@priors.register
@parameters
class Context(WassersteinMethod):
    """A generator that completes what an attacker knows of a person: a masked or blurred image.

    G(z, hint) is the known part of the hint, exactly; elsewhere it is what a network makes of the
    hint and the latent z. It is trained against two Wasserstein critics with gradient penalty, D
    for whole images and D' for random windows of half the side. Critics: E D(G) - E D(x) +
    penalty · E(‖∇D‖ - 1)² and the same for D'. Generator: ½(-E D(G) - E D'(G)) - diversity ·
    |φ(G(z₁)) - φ(G(z₂))| / |z₁ - z₂|, |·| the mean absolute value, φ the target's penultimate
    features, both images of the same hint. Adam's betas are (0.5, 0.999). The critic steps come
    before each generator step.

    The hint of a public image is made from itself; an attack needs the hint of each attacked
    person, a row of `Prior.hints` for every class.

    Use: the attacker has a masked or blurred image of the victim.
    Paper: Zhang et al., The Secret Revealer (GMI), CVPR 2020, arXiv 1911.07135.
    Differs: the released code's Adam step is 4e-3, at which the training easily diverges, and its
    length is 100 passes over the public images. Holes are filled with the mean pixel of the public
    images, published as that of CelebA. The diversity is the released code's; the paper has
    Euclidean norms, pair by pair. The released reconstruction loss is computed there and not used,
    and absent here. The released networks are for 64 pixels: other sizes make the branch of z
    longer or shorter and leave out dilations beyond the map. The shapes of T and blur are ours. The
    prior term of an attack is D alone. `average` and `cooldown` are our options.

    Args:
        hint: what is known: "centre" all but a square of half the side in the middle, "face_t" all
            but eyes, nose and mouth, "blur" a blurred image.
        blur: standard deviation of the Gaussian that blurs, as a share of the side.
    """

    hint: Hint = "centre"
    blur: Annotated[float, Field(gt=0, le=0.25)] = 0.1
    diversity: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.5

    title: ClassVar[str] = "Context GAN (GMI)"
    condition: ClassVar[Condition] = "hint"
    training: ClassVar = ContextTraining

    def networks(self, image_shape: Shape, classes: int = 0) -> tuple["Completion", "Critics"]:
        check_square(self.name, image_shape)
        generator = Completion(self.latent, self.width, image_shape)
        return generator, Critics(self.critic_width or self.width, image_shape)

    def skeleton(self, image_shape: Shape, classes: int, base: Prior | None = None) -> Prior:
        prior = super().skeleton(image_shape, classes)
        placeholder = {"fill": [0.5] * image_shape[0], "completes": image_shape}
        return replace(prior, info={**prior.info, **placeholder})


class Completion(nn.Module):
    """Images (N, C, H, W) in [0, 1] from latents (N, latent) and hints (N, C + 1, H, W).

    Convolutions, the last of them dilated, reduce the hint to a quarter of the size. The latent is
    upsampled to that size, and further layers make an image of both. Known pixels are copied.
    """

    def __init__(self, latent: int, width: int, image_shape: Shape):
        super().__init__()
        channels, quarter = image_shape[0], image_shape[1] // 4
        wide, dilations = 2 * width, [d for d in (1, 1, 2, 4, 8, 16) if d <= quarter]
        self.reader = nn.Sequential(
            _read(channels + 1, width // 2, 5, 1, 1),
            _read(width // 2, width, 3, 2, 1),
            _read(width, width, 3, 1, 1),
            _read(width, wide, 3, 2, 1),
            *(_read(wide, wide, 3, 1, dilation) for dilation in dilations),
        )
        widths = [2 * width * 2**stage for stage in reversed(range(quarter.bit_length() - 2))]
        start = [
            nn.Linear(latent, widths[0] * 16, bias=False),
            nn.BatchNorm1d(widths[0] * 16),
            nn.ReLU(),
            nn.Unflatten(1, (widths[0], 4, 4)),
        ]
        self.identity = nn.Sequential(
            *start, *(_grow(wide, narrow) for wide, narrow in itertools.pairwise(widths))
        )
        self.writer = nn.Sequential(
            _grow(4 * width, 2 * width),
            _grow(2 * width, width),
            nn.Conv2d(width, width // 2, 3, 1, 1),
            nn.BatchNorm2d(width // 2),
            nn.ReLU(),
            nn.Conv2d(width // 2, channels, 3, 1, 1),
            nn.Sigmoid(),
        )

    def forward(self, latents: Tensor, hints: Tensor) -> Tensor:
        completion = self.writer(torch.cat([self.reader(hints), self.identity(latents)], 1))
        image, known = hints[:, :-1], hints[:, -1:]
        return image * known + completion * (1 - known)


def _read(narrow: int, wide: int, kernel: int, stride: int, dilation: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(narrow, wide, kernel, stride, kernel // 2 * dilation, dilation),
        nn.ReLU(),
        nn.BatchNorm2d(wide),
    )


def _grow(wide: int, narrow: int) -> nn.Sequential:
    return nn.Sequential(
        nn.ConvTranspose2d(wide, narrow, 5, 2, 2, 1, bias=False), nn.BatchNorm2d(narrow), nn.ReLU()
    )


class Critics(nn.Module):
    """A critic `whole` of images and a critic `part` of windows of half the side.

    The output (N, 1) of the module is that of `whole`.
    """

    def __init__(self, width: int, image_shape: Shape):
        super().__init__()
        self.side = image_shape[1]
        self.whole = build_critic(width, image_shape[0], self.side)
        self.part = build_critic(width, image_shape[0], self.side // 2)

    def forward(self, images: Tensor) -> Tensor:
        return self.whole(images)

    def window(self, rng: torch.Generator) -> tuple[Any, ...]:
        """Draw the index of one window for all images of a batch."""
        half = self.side // 2
        top, left = torch.randint(self.side - half + 1, (2,), generator=rng).tolist()
        return ..., slice(top, top + half), slice(left, left + half)


def hinted(images: Tensor, hint: Hint, fill: Sequence[float], blur: float = 0.1) -> Tensor:
    """Return hints (N, C + 1, H, W): images with the hole filled by `fill`, and 1 where known.

    No pixel of a blurred image is known.
    """
    count, _, height, width = images.shape
    if hint == "blur":
        unknown = images.new_zeros(count, 1, height, width)
        return torch.cat([blurred(images, blur * width), unknown], 1)
    known = images.new_ones(1, 1, height, width)
    for top, bottom, left, right in HOLES[hint]:
        rows = slice(top * height // 16, bottom * height // 16)
        known[..., rows, left * width // 16 : right * width // 16] = 0
    filled = torch.where(known.bool(), images, images.new_tensor(fill).view(1, -1, 1, 1))
    return torch.cat([filled, known.expand(count, -1, -1, -1)], 1)


def blurred(images: Tensor, sigma: float) -> Tensor:
    """Blur images by a Gaussian of `sigma` pixels, cut off at 3σ, with a mirrored border."""
    reach = math.ceil(3 * sigma)
    offsets = torch.arange(-reach, reach + 1, device=images.device, dtype=images.dtype)
    line = torch.exp(-(offsets**2) / (2 * sigma**2))
    line = (line / line.sum()).expand(images.shape[1], 1, 1, -1)
    padded = F.pad(images, (reach,) * 4, mode="reflect")
    return F.conv2d(F.conv2d(padded, line, groups=len(line)), line.mT, groups=len(line))


def hints_of(info: Mapping[str, Any], images: Tensor) -> Tensor:
    """Make the hints (K, C + 1, H, W) for a prior with this record from images (K, C, H, W)."""
    record = info.get("base", info)  # a prior with students keeps the record of its base
    if record.get("method", {}).get("name") != "context":
        raise ConfigError("the prior completes no hints: only one made by the method context does")
    if tuple(images.shape[1:]) != tuple(record["completes"]):
        raise DataError(
            f"the prior completes images of shape {tuple(record['completes'])}, got "
            f"{tuple(images.shape[1:])}: bring them to that shape first"
        )
    settings = record["method"]["parameters"]
    return hinted(images, settings["hint"], record["fill"], settings["blur"])
