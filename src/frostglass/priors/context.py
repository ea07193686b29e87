"""GMI with auxiliary assets: a generator that completes a masked picture of the victim, or sharpens a blurred one."""

import itertools
import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from frostglass.core.errors import ConfigError, DataError
from frostglass.core.parameters import parameters
from frostglass.core.prior import Condition, Prior
from frostglass.core.types import Images, Shape
from frostglass.core.views import Capability, ModelView
from frostglass.priors._gan import SHEET, Schedule, train_in_turns
from frostglass.priors.base import identity_hashes, priors
from frostglass.priors.wgan import build_critic, diversity, draw, gradient_penalty
from frostglass.runtime.device import default_device
from frostglass.runtime.freezing import frozen
from frostglass.runtime.seeding import generator_for, seeded
from frostglass.store.files import Work

Hint = Literal["centre", "face_t", "blur"]
# Holes as rectangles (top, bottom, left, right) in sixteenths of the side: the middle; eyes with nose and mouth below.
HOLES: dict[Hint, tuple[tuple[int, int, int, int], ...]] = {
    "centre": ((4, 12, 4, 12),),
    "face_t": ((4, 8, 2, 14), (8, 14, 6, 10)),
}


@priors.register
@parameters
class Context:
    """A generator that completes what an attacker already knows of a victim: a picture with a hole, or a blurred one.

    G(z, hint) is the known part of the hint, exactly, and where nothing is known what a network makes of the hint and the latent z. It is trained against two
    Wasserstein critics with gradient penalty, D for whole pictures and D' for random windows of half the side. Critics: E D(G) - E D(x) + penalty · E(‖∇D‖ - 1)²
    and the same for D'. Generator: ½(-E D(G) - E D'(G)) - diversity · |φ(G(z₁)) - φ(G(z₂))| / |z₁ - z₂|, |·| the mean absolute value, φ the target's
    penultimate features, both pictures of the same hint.

    The hint of a public picture is made from itself; an attack needs the hint of each victim, a row of `Prior.hints` for every class.

    Paper: Zhang et al., The Secret Revealer (GMI), CVPR 2020, arXiv 1911.07135.
    Differs: the released code's Adam step is 4e-3, at which the training easily diverges. Holes are filled with the mean pixel of the public pictures, published
    as that of CelebA. The diversity is the released code's; the paper has Euclidean norms, pair by pair. The released reconstruction loss is computed there and
    not used, and absent here. The released networks are for 64 pixels: other sizes make the branch of z longer or shorter and leave out dilations beyond the
    map. The shapes of T and blur are ours. The prior term of an attack is D alone. `average` and `cooldown` are options of ours.

    Args:
        hint: what is known: "centre" all but a square of half the side in the middle, "face_t" all but eyes, nose and mouth, "blur" a blurred picture.
        blur: standard deviation of the Gaussian that blurs, as a share of the side.
        diversity: weight of the diversity term, for which the training needs the target's gradients; at 0 the prior serves every target.
        latent: length of the latent vector.
        width: channels of the generator's last upsampled stage; 64 is published.
        critic_width: channels of the critics' first stages; the generator's width if not given.
        steps: generator steps; published are 100 passes over the public pictures.
        critic_steps: critic steps before each generator step.
        batch: images a step.
        lr: Adam's step size, with betas (0.5, 0.999).
        penalty: weight of the gradient penalties.
        average: decay of a running mean of the generator's weights, which becomes the prior; 0 is the published training.
        cooldown: share of the steps, at the end, over which lr falls linearly to zero; 0 is the published training.
        checkpoint_every: generator steps between checkpoints; does not change the result.
    """

    hint: Hint = "centre"
    blur: Annotated[float, Field(gt=0, le=0.25)] = 0.1
    diversity: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.5
    latent: Annotated[int, Field(ge=1)] = 100
    width: Annotated[int, Field(ge=4)] = 64
    critic_width: Annotated[int, Field(ge=4)] | None = None
    steps: Annotated[int, Field(ge=1)] = 20_000
    critic_steps: Annotated[int, Field(ge=1)] = 5
    batch: Annotated[int, Field(ge=2)] = 64
    lr: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 2e-4
    penalty: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 10.0
    average: Annotated[float, Field(ge=0, lt=1)] = 0.0
    cooldown: Annotated[float, Field(ge=0, le=1)] = 0.0
    checkpoint_every: Annotated[int, Field(ge=1)] = 200

    condition: ClassVar[Condition] = "hint"

    @property
    def needs(self) -> Capability | None:
        return "gradients" if self.tied else None

    @property
    def tied(self) -> bool:
        """Whether the training looks at a target."""
        return self.diversity > 0

    def networks(self, image_shape: Shape, classes: int = 0) -> tuple["Completion", "Critics"]:
        """Generator and critics for one image shape, freshly initialised."""
        _, height, breadth = image_shape
        if height != breadth or height not in (16, 32, 64, 128):
            raise ConfigError(
                f"context completes square images of 16, 32, 64 or 128 pixels, got {height}×{breadth}: choose another data.size"
            )
        return Completion(self.latent, self.width, image_shape), Critics(
            self.critic_width or self.width, image_shape
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
                "context with diversity is fitted to one target: train it with that target's view, or set prior.diversity to 0"
            )
        with seeded(seed, "context", "init"):
            generator, critics = self.networks(public.shape)
        generator.to(default_device()), critics.to(default_device())
        fill = [
            total / public.pixels[:, 0].numel() / 255
            for total in public.pixels.sum((0, 2, 3)).tolist()
        ]

        def completed(rng: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            real = public.floats(torch.randint(len(public), (self.batch,), generator=rng)).to(
                default_device()
            )
            hints, latents = (
                hinted(real, self.hint, fill, self.blur),
                draw(generator, self.batch, self.latent, rng),
            )
            return real, hints, latents, generator(latents, hints)

        def critic_loss(rng: torch.Generator) -> Tensor:
            with torch.no_grad():
                real, _, _, fake = completed(rng)
            window = critics.window(rng)
            return self._judgement(critics.whole, real, fake, rng) + self._judgement(
                critics.part, real[window], fake[window], rng
            )

        def generator_loss(rng: torch.Generator) -> Tensor:
            _, hints, latents, fake = completed(rng)
            loss = (
                -(critics.whole(fake).mean() + critics.part(fake[critics.window(rng)]).mean()) / 2
            )
            if not self.tied or view is None:
                return loss
            others = draw(generator, self.batch, self.latent, rng)
            features, other_features = (
                view.logits_and_features(pictures)[1]
                for pictures in (fake, generator(others, hints))
            )
            return loss - self.diversity * diversity(
                features, other_features, latents, others, "mean"
            )

        shown = public.floats(
            torch.randperm(len(public), generator=generator_for(0, "sheet"))[: SHEET // 2]
        ).to(default_device())
        with frozen(view.module) if self.tied and view is not None else nullcontext():
            kept = train_in_turns(
                "context", generator, critics, self._schedule(), critic_loss=critic_loss, generator_loss=generator_loss, seed=seed,
                sample=lambda network: _sheet(network, hinted(shown, self.hint, fill, self.blur), self.latent), work=work or Work.scratch(),
            )  # fmt: skip
        return Prior(
            generator=kept,
            critic=critics.eval(),
            latent=self.latent,
            image_shape=public.shape,
            seen_identities=identity_hashes(public.names),
            info={
                "method": {"name": "context", "parameters": asdict(self)},
                "fill": fill,
                "completes": public.shape,
            },  # type: ignore[call-overload]
            tied_to=view.target_key if self.tied and view is not None else None,
            classes=view.classes if self.tied and view is not None else 0,
            condition=self.condition,
        )

    def _schedule(self) -> Schedule:
        return Schedule(
            steps=self.steps, critic_steps=self.critic_steps, lr=self.lr, betas=(0.5, 0.999), average=self.average,
            cooldown=self.cooldown, checkpoint_every=self.checkpoint_every,
        )  # fmt: skip

    def _judgement(
        self, critic: nn.Module, real: Tensor, fake: Tensor, rng: torch.Generator
    ) -> Tensor:
        """The loss of one critic."""
        return (
            critic(fake).mean()
            - critic(real).mean()
            + self.penalty * gradient_penalty(critic, real, fake, rng)
        )


class Completion(nn.Module):
    """Pictures (N, C, H, W) in [0, 1] from latents (N, latent) and hints (N, C + 1, H, W): the known part of a hint, completed.

    The hint is read by convolutions, the last of them dilated, at a quarter of the size; the latent is brought up to there, and both go on together.
    """

    def __init__(self, latent: int, width: int, image_shape: Shape):
        super().__init__()
        channels, quarter = image_shape[0], image_shape[1] // 4
        reading = [
            (channels + 1, width // 2, 5, 1, 1),
            (width // 2, width, 3, 2, 1),
            (width, width, 3, 1, 1),
            (width, 2 * width, 3, 2, 1),
        ]
        reading += [
            (2 * width, 2 * width, 3, 1, dilation)
            for dilation in (1, 1, 2, 4, 8, 16)
            if dilation <= quarter
        ]
        self.reader = nn.Sequential(*(_read(*sizes) for sizes in reading))
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
            _grow(4 * width, 2 * width), _grow(2 * width, width),
            nn.Conv2d(width, width // 2, 3, 1, 1), nn.BatchNorm2d(width // 2), nn.ReLU(),
            nn.Conv2d(width // 2, channels, 3, 1, 1), nn.Sigmoid(),
        )  # fmt: skip

    def forward(self, latents: Tensor, hints: Tensor) -> Tensor:
        made = self.writer(torch.cat([self.reader(hints), self.identity(latents)], 1))
        picture, known = hints[:, :-1], hints[:, -1:]
        return picture * known + made * (1 - known)


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
    """A critic `whole` for pictures, whose opinion (N, 1) is that of the module, and a critic `part` for windows of half the side."""

    def __init__(self, width: int, image_shape: Shape):
        super().__init__()
        self.side = image_shape[1]
        self.whole = build_critic(width, image_shape[0], self.side)
        self.part = build_critic(width, image_shape[0], self.side // 2)

    def forward(self, images: Tensor) -> Tensor:
        return self.whole(images)

    def window(self, rng: torch.Generator) -> tuple[Any, ...]:
        """Where to look for a part: one place at random for all pictures of a batch."""
        half = self.side // 2
        top, left = torch.randint(self.side - half + 1, (2,), generator=rng).tolist()
        return ..., slice(top, top + half), slice(left, left + half)


def hinted(images: Tensor, hint: Hint, fill: Sequence[float], blur: float = 0.1) -> Tensor:
    """What an attacker knows of pictures (N, C, H, W): the picture with the hole filled by `fill`, and 1 where it is known, (N, C + 1, H, W).

    Of a blurred picture no pixel is known.
    """
    count, _, height, width = images.shape
    if hint == "blur":
        return torch.cat(
            [blurred(images, blur * width), images.new_zeros(count, 1, height, width)], 1
        )
    known = images.new_ones(1, 1, height, width)
    for top, bottom, left, right in HOLES[hint]:
        known[
            ...,
            top * height // 16 : bottom * height // 16,
            left * width // 16 : right * width // 16,
        ] = 0
    filled = images.new_tensor(fill).view(1, -1, 1, 1)
    return torch.cat(
        [torch.where(known.bool(), images, filled), known.expand(count, -1, -1, -1)], 1
    )


def blurred(images: Tensor, sigma: float) -> Tensor:
    """Pictures under a Gaussian of standard deviation `sigma` pixels, cut off at three, the border mirrored; differentiable."""
    reach = math.ceil(3 * sigma)
    line = torch.exp(
        -(torch.arange(-reach, reach + 1, device=images.device, dtype=images.dtype) ** 2)
        / (2 * sigma**2)
    )
    line = (line / line.sum()).expand(images.shape[1], 1, 1, -1)
    padded = F.pad(images, (reach,) * 4, mode="reflect")
    return F.conv2d(F.conv2d(padded, line, groups=len(line)), line.mT, groups=len(line))


def hints_of(info: Mapping[str, Any], pictures: Tensor) -> Tensor:
    """The hints (K, C + 1, H, W) that a prior with this record completes, made from one picture (K, C, H, W) of each victim."""
    record = info.get("base", info)  # a prior that was added to keeps the record of the other
    if record.get("method", {}).get("name") != "context":
        raise ConfigError("the prior completes no hints: only one made by the method context does")
    if tuple(pictures.shape[1:]) != tuple(record["completes"]):
        raise DataError(
            f"the prior completes pictures of shape {tuple(record['completes'])}, got {tuple(pictures.shape[1:])}: bring them to that shape first"
        )
    settings = record["method"]["parameters"]
    return hinted(pictures, settings["hint"], record["fill"], settings["blur"])


def _sheet(generator: nn.Module, hints: Tensor, latent: int) -> Tensor:
    """Hints, each beside its completion."""
    completions = generator(draw(generator, len(hints), latent, generator_for(0, "sheet")), hints)
    return torch.stack([hints[:, :-1], completions], 1).flatten(0, 1)
