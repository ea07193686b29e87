"""A GMI step over the bare forward and backward pass of the same generator, critic and target with frozen weights."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from benchmarks.timing import ratio
from frostglass.attacks.base import LANES, in_lanes
from frostglass.attacks.gmi import Gmi
from frostglass.models.build import build
from frostglass.models.taps import find_head
from frostglass.priors.base import Prior, identity_hashes
from frostglass.priors.wgan import Wgan
from frostglass.runtime import frozen
from frostglass.types import Target

STEPS, LIMIT = 10, 1.15


def measure() -> Iterator[str]:
    shape = (3, 32, 32)
    generator, critic = (part.eval() for part in Wgan(width=48, critic_width=40).networks(shape))
    module = build("cnn", classes=40, image_shape=shape, seed=0).eval()
    prior = Prior(generator=generator, critic=critic, latent=100, image_shape=shape, saw=identity_hashes([]))
    target = Target(module=module, classes=tuple(map(str, range(40))), image_shape=shape, head=find_head(module, shape))
    view = target.view(["gradients"])
    for batch in (LANES, 4 * LANES):
        latents, labels = torch.randn(batch, 100), torch.arange(batch) % 40
        recipe = Gmi(steps=STEPS).recipe(view, prior, seed=0)

        def ours(latents=latents, labels=labels, recipe=recipe) -> None:
            in_lanes(view, lambda z, y: (recipe.search(z, y),), latents, labels)

        def floor(latents=latents, labels=labels) -> None:
            z = latents.clone().requires_grad_()
            for _ in range(STEPS):
                images = generator(z)
                loss = 100 * F.cross_entropy(module(images), labels, reduction="sum") - critic(images).sum()
                torch.autograd.grad(loss, z)

        with frozen(generator, critic, module):
            times, mine, theirs = ratio(ours, floor)
        yield f"attack step, batch {batch}: {times:.3f} × floor (limit {LIMIT}); {1000 * mine / STEPS:.1f} ms against {1000 * theirs / STEPS:.1f} ms"
