"""A copy of a generator that is tuned to make some images more likely."""

import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frostglass.core.prior import Prior
from frostglass.core.types import Images, Target, match_shape
from frostglass.priors._style_space import StyleSpace
from frostglass.priors.stylegan2 import StyleImages
from frostglass.priors.wgan import penalty_at
from frostglass.runtime.device import device_of
from frostglass.runtime.hooks import capture
from frostglass.runtime.seeding import generator_for

Features = Callable[[Tensor], Tensor]  # from images (N, C, H, W) to vectors (N, F)
Distance = Callable[[Tensor, Tensor], Tensor]  # of two sets of such vectors
STYLES = 600  # draws from which the spread of styles is estimated, as published
NOISE = 0.05  # first noise on pivots, relative to that spread
QUIET = 0.75  # share of the steps after which there is no noise
RISE, FALL = 0.05, 0.25  # shares of the steps in which the step size rises and falls
ADAM_OF_GANS = (0.5, 0.999)


def pixel_features(images: Tensor) -> Tensor:
    """Return vectors whose squared distance is the mean squared difference of two images."""
    return images.flatten(1) / math.sqrt(images[0].numel())


def layer_features(network: Target) -> Features:
    """Return vectors of a network's taps and embedding, as LPIPS compares them without weights.

    The channels at each position have length 1; squared distances are means over positions, and
    sums over taps.
    """

    def features(images: Tensor) -> Tensor:
        with capture(network.module, network.taps) as seen:
            embedding = network.outputs(images)[1]
            outputs = [*(seen[name] for name in network.taps), embedding]
        maps = [F.normalize(output, dim=1) for output in outputs]
        return torch.cat([each.flatten(1) / math.sqrt(each[0, 0].numel()) for each in maps], dim=1)

    return features


def pointwise(ours: Tensor, theirs: Tensor) -> Tensor:
    """Return the mean squared distance of pairs of vectors (N, F)."""
    return (ours - theirs).square().sum(1).mean()


def conditional_transport(ours: Tensor, theirs: Tensor) -> Tensor:
    """Return the mean cost of moving each set (N, F), (M, F) onto the other, half each way.

    The cost is 1 - cosine; a vector goes to the others with probabilities softmax(x·y).
    """
    likeness = theirs @ ours.T
    cost = 1 - F.normalize(theirs, dim=1) @ F.normalize(ours, dim=1).T
    to_theirs = (likeness.softmax(0) * cost).sum(0).mean()
    to_ours = (likeness.softmax(1) * cost).sum(1).mean()
    return (to_theirs + to_ours) / 2


def mean_discrepancy(ours: Tensor, theirs: Tensor) -> Tensor:
    """Return the squared MMD of two sets, with five Gaussian kernels around the mean distance."""
    both = torch.cat([ours, theirs])
    squares = both.square().sum(1)
    distances = (squares[:, None] + squares - 2 * both @ both.T).clamp(min=0)
    width = distances.detach().sum() / (len(both) * (len(both) - 1))
    kernel = torch.stack([(-distances / (width * 2.0**k)).exp() for k in range(-2, 3)]).sum(0)
    weights = torch.cat(
        [
            both.new_full((len(ours),), 1 / len(ours)),
            both.new_full((len(theirs),), -1 / len(theirs)),
        ]
    )
    return weights @ kernel @ weights


DISTANCES: dict[str, Distance] = {
    "pointwise": pointwise,
    "ct": conditional_transport,
    "mmd": mean_discrepancy,
}


@dataclass
class TunedCopy:
    """A copy of a prior whose generator and critic may be changed; `reset` restores the weights."""

    prior: Prior
    weights: list[dict[str, Tensor]] = field(init=False)

    @classmethod
    def of(cls, prior: Prior) -> "TunedCopy":
        generator, critic = deepcopy(prior.generator).eval(), deepcopy(prior.critic)
        critic = critic.eval() if critic is not None else None
        copy = cls(replace(prior, generator=generator, critic=critic))
        for network in copy.networks:
            network.requires_grad_(False)
        return copy

    def __post_init__(self) -> None:
        self.weights = [
            {name: tensor.clone() for name, tensor in network.state_dict().items()}
            for network in self.networks
        ]

    @property
    def networks(self) -> list[nn.Module]:
        critic = self.prior.critic
        return [self.prior.generator, *([critic] if critic is not None else [])]

    def reset(self) -> None:
        for network, state in zip(self.networks, self.weights, strict=True):
            network.load_state_dict(state)

    def finite(self) -> bool:
        return all(
            tensor.isfinite().all()
            for network in self.networks
            for tensor in network.state_dict().values()
        )

    def images(self, styles: Tensor, labels: Tensor) -> Tensor:
        """Generate images of styles (N, size); those of other generators are latents."""
        if isinstance(self.prior.generator, StyleImages):
            return StyleSpace(self.prior).images(styles)
        return self.prior.images(styles, labels)


@dataclass(frozen=True)
class PointTuning:
    """Tunes a generator on a few images: first their pivots, then the generator at the pivots.

    Pivots: styles that minimise d(φ(G(w)), φ(x̂)) + realism · mean softplus(-D(G(w))), by
    `inversion` steps of Adam from the mean style, with noise that fades. Then `tuning` steps of
    Adam on the weights of G minimise d at the pivots.
    """

    distance: Distance
    features: Features
    inversion: int
    inversion_lr: float
    realism: float
    tuning: int
    tuning_lr: float

    def run(self, copy: TunedCopy, images: Tensor, labels: Tensor, *, seed: int) -> None:
        with torch.no_grad():
            aims = self.features(images)
        pivots = self.pivots(copy, aims, labels, seed=seed)
        generator = copy.prior.generator.requires_grad_(True)
        optimizer = torch.optim.Adam(generator.parameters(), lr=self.tuning_lr)
        for _ in range(self.tuning):
            loss = self.distance(self.features(copy.images(pivots, labels)), aims)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        generator.requires_grad_(False)

    def pivots(self, copy: TunedCopy, aims: Tensor, labels: Tensor, *, seed: int) -> Tensor:
        """Return the styles (P, size) whose images come near to what has the features `aims`."""
        space, prior = StyleSpace(copy.prior), copy.prior
        rng = generator_for(seed, "pivots")
        with torch.no_grad():
            drawn = torch.randn(STYLES, prior.latent, generator=rng).to(device_of(prior.generator))
            drawn = space.styles(drawn)
            spread = (drawn - drawn.mean(0)).square().sum(1).mean().sqrt()
        pivots = space.mean.expand(len(aims), -1).clone().requires_grad_()
        optimizer = torch.optim.Adam([pivots], lr=self.inversion_lr)
        for step in range(self.inversion):
            done = step / self.inversion
            optimizer.param_groups[0]["lr"] = self.inversion_lr * ramp(done)
            noise = torch.randn(pivots.shape, generator=rng).to(pivots) * spread
            noise *= NOISE * max(0.0, 1 - done / QUIET) ** 2
            made = copy.images(pivots + noise, labels)
            loss = self.distance(self.features(made), aims)
            if self.realism and prior.critic is not None:
                loss = loss + self.realism * F.softplus(-prior.realism(made)).mean()
            (pivots.grad,) = torch.autograd.grad(loss, pivots)
            optimizer.step()
        return pivots.detach()


def ramp(done: float) -> float:
    """Return the scale of the step size after a share of the steps: a rise, and a cosine's fall."""
    fall = min(1.0, (1 - done) / FALL)
    return (0.5 - 0.5 * math.cos(math.pi * fall)) * min(1.0, done / RISE)


@dataclass(frozen=True)
class AdversarialTuning:
    """Trains a WGAN-GP on: real images are public ones and those to make more likely.

    `share` of the real images are of the latter; None draws from all of them alike.
    """

    public: Images
    steps: int
    lr: float
    batch: int
    critic_steps: int
    penalty: float
    share: float | None

    def run(self, copy: TunedCopy, images: Tensor, labels: Tensor, *, seed: int) -> None:
        generator, critic = copy.networks
        optimizers = [
            torch.optim.Adam(network.parameters(), lr=self.lr, betas=ADAM_OF_GANS)
            for network in (generator, critic)
        ]
        rng = generator_for(seed, "adversarial")
        for _ in range(self.steps):
            critic.requires_grad_(True)
            for _ in range(self.critic_steps):
                with torch.no_grad():
                    fake = self._made(copy.prior, rng)
                real = self._real(images, rng)
                share = torch.rand(self.batch, 1, 1, 1, generator=rng)
                gap = critic(fake).mean() - critic(real).mean()
                _descend(optimizers[1], gap + self.penalty * penalty_at(critic, real, fake, share))
            critic.requires_grad_(False)
            generator.requires_grad_(True)
            _descend(optimizers[0], -critic(self._made(copy.prior, rng)).mean())
            generator.requires_grad_(False)

    def _made(self, prior: Prior, rng: torch.Generator) -> Tensor:
        latents = torch.randn(self.batch, prior.latent, generator=rng)
        return prior.images(latents.to(device_of(prior.generator)))

    def _real(self, images: Tensor, rng: torch.Generator) -> Tensor:
        """Draw real images: public ones, and some of `images`."""
        share = self.share
        if share is None:
            share = len(images) / (len(self.public) + len(images))
        ours = torch.rand(self.batch, generator=rng) < share
        public = torch.randint(len(self.public), (self.batch,), generator=rng)
        own = torch.randint(len(images), (self.batch,), generator=rng)
        shape = (int(images.shape[1]), int(images.shape[2]), int(images.shape[3]))
        real = match_shape(self.public.floats(public).to(images.device), shape)
        return torch.where(ours[:, None, None, None].to(images.device), images[own], real)


def _descend(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
