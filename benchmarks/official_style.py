"""GMI at 64 pixels (VGG16 and the published generator and critic) against the style of the official code, on the same networks in one run.

That style: weights collect gradients nobody uses, tensors in the usual layout, one seed after the other.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from benchmarks.timing import ratio
from frostglass.attacks.base import invert
from frostglass.attacks.gmi import Gmi
from frostglass.models.build import build
from frostglass.models.taps import find_head
from frostglass.priors.base import Prior, identity_hashes
from frostglass.priors.wgan import Wgan
from frostglass.types import Target

# In the official code 60 people share a batch, and 5 seeds follow each other.
SHAPE, PEOPLE, SEEDS, STEPS, WANTED = (3, 64, 64), 60, 5, 3, 1.7


def measure() -> Iterator[str]:
    generator, critic = (part.eval() for part in Wgan().networks(SHAPE))
    module = build("vgg16", classes=1000, image_shape=SHAPE, seed=0).eval()
    prior = Prior(generator=generator, critic=critic, latent=100, image_shape=SHAPE, saw=identity_hashes([]))
    target = Target(module=module, classes=tuple(map(str, range(1000))), image_shape=SHAPE, head=find_head(module, SHAPE))
    attack = Gmi(steps=STEPS, candidates=SEEDS, keep=SEEDS)

    def ours() -> None:
        invert(attack, target.view(["gradients"]), prior, labels=range(PEOPLE), seed=0)

    def official() -> None:
        labels = torch.arange(PEOPLE)
        for seed in range(SEEDS):
            z = torch.randn(PEOPLE, 100, generator=torch.Generator().manual_seed(seed)).requires_grad_()
            speed = torch.zeros_like(z)
            for _ in range(STEPS):
                for part in (generator, critic, module):
                    part.zero_grad()
                z.grad = None
                pictures = generator(z)
                (-critic(pictures).mean() + 100 * F.cross_entropy(module(pictures), labels)).backward()
                before = speed.clone()
                speed = 0.9 * speed - 0.02 * z.grad  # type: ignore[operator]
                z.data = torch.clamp(z.detach() - 0.9 * before + 1.9 * speed, -1, 1)
            with torch.no_grad():
                module(generator(z)).argmax(1)

    times, mine, theirs = ratio(official, ours, rounds=3)
    yield (
        f"GMI, VGG16 at 64 px, {PEOPLE} people × {SEEDS} seeds × {STEPS} steps: {times:.2f} times as fast as the official style "
        f"(wanted {WANTED}); {theirs:.1f} s against {mine:.1f} s"
    )
