"""A step of every attack by gradients over the bare passes it cannot do without, on the same networks with frozen weights."""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.timing import ratio
from frostglass.attacks.base import Attack
from frostglass.attacks.model.gmi import Gmi
from frostglass.attacks.model.kedmi import Kedmi
from frostglass.attacks.model.lomma import Lomma
from frostglass.attacks.model.plgmi import Plgmi
from frostglass.attacks.model.vmi import Vmi
from frostglass.core.prior import Prior
from frostglass.core.types import Target
from frostglass.data._augment import DRAWS, viewed
from frostglass.models.build import build
from frostglass.models.taps import find_head
from frostglass.networks.flow import Flow
from frostglass.priors.base import identity_hashes
from frostglass.priors.wgan import Wgan
from frostglass.runtime.folding import folded
from frostglass.runtime.freezing import channels_last, frozen

SHAPE, STEPS, LIMIT, CLASSES, LATENT = (3, 32, 32), 10, 1.15, 40, 100


def measure() -> Iterator[str]:
    generator, critic = (part.eval() for part in Wgan(width=48, critic_width=40).networks(SHAPE))
    module, student = (
        build("cnn", classes=CLASSES, image_shape=SHAPE, seed=seed, width=32).eval()
        for seed in (0, 1)
    )
    features = torch.zeros(2, module.get_submodule(find_head(module, SHAPE)).in_features)  # type: ignore[arg-type]
    prior = Prior(
        generator=generator,
        critic=critic,
        latent=LATENT,
        image_shape=SHAPE,
        seen_identities=identity_hashes([]),
        students=(student,),
        features=features,
    )
    target = Target(
        module=module,
        classes=tuple(map(str, range(CLASSES))),
        image_shape=SHAPE,
        head=find_head(module, SHAPE),
    )
    networks = generator, critic, module, student
    with frozen(*networks), channels_last(*networks), folded(*networks):
        for attack, rows, floor in _recipes(generator, critic, module, student):
            recipe = attack.recipe(target.view(["gradients"]), prior, seed=0)
            labels, draws = torch.arange(rows) % CLASSES, torch.arange(rows) // CLASSES
            state = (
                recipe.start(torch.arange(CLASSES))
                .flatten(0, 1)[:1]
                .expand(rows, *[-1] * (recipe.start(labels[:1]).ndim - 2))
                .clone()
            )

            def ours(recipe=recipe, state=state, labels=labels, draws=draws) -> None:
                recipe.search(state, labels, draws)

            def bare(floor=floor, state=state, labels=labels) -> None:
                for _ in range(STEPS):
                    leaf = state.clone().requires_grad_()
                    torch.autograd.grad(floor(leaf, labels), leaf)

            times, mine, theirs = ratio(ours, bare, rounds=5)
            name = type(attack).__name__.lower()
            yield f"{name} step, {rows} rows: {times:.3f} × floor (limit {LIMIT}); {1000 * mine / STEPS:.1f} ms against {1000 * theirs / STEPS:.1f} ms"


def _recipes(
    generator: nn.Module, critic: nn.Module, module: nn.Module, student: nn.Module
) -> Iterator[tuple[Attack, int, Callable[[Tensor, Tensor], Tensor]]]:
    """Each attack, how many rows it searches at once, and the passes of one of its steps."""

    def gmi(z: Tensor, y: Tensor) -> Tensor:
        pictures = generator(z)
        return F.cross_entropy(module(pictures), y, reduction="sum") - critic(pictures).sum()

    def kedmi(state: Tensor, y: Tensor) -> Tensor:
        return gmi(state[:, 0] + (state[:, 1] / 2).exp() * torch.ones_like(state[:, 0]), y)

    def lomma(z: Tensor, y: Tensor) -> Tensor:
        pictures = generator(z)
        logits = [network(pictures).gather(1, y[:, None]).sum() for network in (module, student)]
        return -sum(logits) - critic(pictures).sum()

    def plgmi(z: Tensor, y: Tensor) -> Tensor:
        pictures, draws = generator(z), torch.full((len(z), DRAWS), 0.3)
        return sum(
            F.cross_entropy(module(viewed(pictures, draws)), y, reduction="sum") for _ in range(2)
        )  # type: ignore[return-value]

    flow, noise = Flow(LATENT), torch.ones(4, 16, LATENT)

    def vmi(state: Tensor, y: Tensor) -> Tensor:
        logits = module(generator(flow.sample(state, noise).flatten(0, 1)))
        return (
            F.cross_entropy(logits, y.repeat_interleave(16), reduction="sum")
            + flow.kl(state, noise).sum()
        )

    yield Gmi(steps=STEPS), 16, gmi
    yield Gmi(steps=STEPS), 64, gmi
    yield Kedmi(steps=STEPS), 64, kedmi
    yield Lomma(steps=STEPS), 64, lomma
    yield Plgmi(steps=STEPS), 64, plgmi
    yield Vmi(steps=STEPS, points=16), 4, vmi
