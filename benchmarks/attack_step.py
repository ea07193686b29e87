"""A step of each gradient-based attack over the bare passes it needs, on the same networks."""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.measured import Measured
from benchmarks.timing import ratio
from frostglass.attacks._search.runner import ModelAttack
from frostglass.attacks.base import invert
from frostglass.attacks.features.latent import Latent
from frostglass.attacks.model.gmi import Gmi
from frostglass.attacks.model.kedmi import Kedmi
from frostglass.attacks.model.lomma import Lomma
from frostglass.attacks.model.plgmi import Plgmi
from frostglass.attacks.model.vmi import Vmi
from frostglass.core.assets import Assets
from frostglass.core.prior import Prior
from frostglass.core.types import Target
from frostglass.core.views import FeatureView
from frostglass.data._augment import DRAWS, viewed
from frostglass.models.build import build
from frostglass.models.cut import cut, encoded
from frostglass.models.wrap import wrap
from frostglass.networks.flow import Flow
from frostglass.priors.base import identity_hashes
from frostglass.priors.wgan import Wgan
from frostglass.runtime.folding import folded
from frostglass.runtime.freezing import frozen
from frostglass.runtime.layout import channels_last

SHAPE, STEPS, LIMIT, CLASSES, LATENT = (3, 32, 32), 10, 1.15, 40, 100
Passes = Callable[[Tensor, Tensor], Tensor]


def measure() -> Iterator[Measured]:
    generator, critic = (part.eval() for part in Wgan(width=48, critic_width=40).networks(SHAPE))
    module, student = (
        build("cnn", classes=CLASSES, image_shape=SHAPE, seed=seed, width=32).eval()
        for seed in (0, 1)
    )
    target = wrap(module, classes=CLASSES, image_shape=SHAPE)
    prior = Prior(
        generator=generator,
        critic=critic,
        latent=LATENT,
        image_shape=SHAPE,
        seen_identities=identity_hashes([]),
        students=(student,),
        features=_statistics(target),
    )
    networks = generator, critic, module, student
    with frozen(*networks), channels_last(*networks), folded(*networks):
        for attack, rows, passes in _attacks(generator, critic, module, student):
            ours, bare = _pair(attack, rows, passes, target, prior)
            times, mine, theirs = ratio(ours, bare, rounds=5)
            yield Measured(
                f"{attack.name} step, {rows} rows, over bare passes",
                times,
                f"{1000 * mine / STEPS:.1f} ms against {1000 * theirs / STEPS:.1f} ms",
                most=LIMIT,
            )
    yield _on_features(module, prior)


def _on_features(module: nn.Module, prior: Prior) -> Measured:
    """Measure a whole search of latents for features, starts and read-out included."""
    rows, steps = 64, 4 * STEPS
    split = cut(module, "stage1", SHAPE)
    wanted = encoded(split.encoder, torch.rand(rows, *SHAPE))
    attack, assets = Latent(steps=steps, tries=1), Assets(prior=prior)
    networks = split.encoder, prior.generator

    def ours() -> None:
        invert(attack, FeatureView(split, wanted, ["encoder"]), assets, people=range(rows), seed=0)

    def bare() -> None:
        with frozen(*networks), channels_last(*networks), folded(*networks):
            for _ in range(steps):
                leaf = torch.randn(rows, LATENT).requires_grad_()
                loss = (split.encoder(prior.generator(leaf)) - wanted).square().sum()
                torch.autograd.grad(loss, leaf)

    times, mine, theirs = ratio(ours, bare, rounds=5)
    return Measured(
        f"latent step, {rows} rows, over bare passes",
        times,
        f"{1000 * mine / steps:.1f} ms against {1000 * theirs / steps:.1f} ms",
        most=LIMIT,
    )


def _statistics(target: Target) -> Tensor:
    """Return feature statistics as a prior of LOMMA holds them; their values do not matter."""
    with frozen(target.module), torch.no_grad():
        return torch.zeros(2, target.outputs(torch.zeros(1, *SHAPE))[1].shape[1])


def _pair(
    attack: ModelAttack, rows: int, passes: Passes, target: Target, prior: Prior
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return the attack's search and the bare passes of as many steps, from the same start."""
    recipe = attack.recipe(target.view(["gradients"]), Assets(prior=prior), seed=0)
    labels, draws = torch.arange(rows) % CLASSES, torch.arange(rows) // CLASSES
    first = recipe.start(torch.arange(CLASSES)).flatten(0, 1)[:1]
    state = first.expand(rows, *first.shape[1:]).clone()

    def ours() -> None:
        recipe.search(state, labels, draws)

    def bare() -> None:
        for _ in range(STEPS):
            leaf = state.clone().requires_grad_()
            torch.autograd.grad(passes(leaf, labels), leaf)

    return ours, bare


def _attacks(
    generator: nn.Module, critic: nn.Module, module: nn.Module, student: nn.Module
) -> Iterator[tuple[ModelAttack, int, Passes]]:
    """Yield each attack, the rows it searches at once, and the passes of one of its steps."""

    def gmi(z: Tensor, y: Tensor) -> Tensor:
        images = generator(z)
        return F.cross_entropy(module(images), y, reduction="sum") - critic(images).sum()

    def kedmi(state: Tensor, y: Tensor) -> Tensor:
        return gmi(state[:, 0] + (state[:, 1] / 2).exp() * torch.ones_like(state[:, 0]), y)

    def lomma(z: Tensor, y: Tensor) -> Tensor:
        images = generator(z)
        logits = [network(images).gather(1, y[:, None]).sum() for network in (module, student)]
        return -logits[0] - logits[1] - critic(images).sum()

    def plgmi(z: Tensor, y: Tensor) -> Tensor:
        images, draws = generator(z), torch.full((len(z), DRAWS), 0.3)
        first, second = (
            F.cross_entropy(module(viewed(images, draws)), y, reduction="sum") for _ in range(2)
        )
        return first + second

    flow, noise = Flow(LATENT), torch.ones(4, 16, LATENT)

    def vmi(state: Tensor, y: Tensor) -> Tensor:
        logits = module(generator(flow.sample(state, noise).flatten(0, 1)))
        loss = F.cross_entropy(logits, y.repeat_interleave(16), reduction="sum")
        return loss + flow.kl(state, noise).sum()

    yield Gmi(steps=STEPS), 12, gmi
    yield Gmi(steps=STEPS), 16, gmi
    yield Gmi(steps=STEPS), 64, gmi
    yield Kedmi(steps=STEPS), 64, kedmi
    yield Lomma(steps=STEPS), 64, lomma
    yield Plgmi(steps=STEPS), 64, plgmi
    yield Vmi(steps=STEPS, points=16), 4, vmi
