"""GMI at 64 pixels, with the published networks, against the style of the official code.

In that style, weights collect unused gradients, tensors are in the default layout, and seeds run
one after the other. Each side runs in a process of its own, alternately, so that neither profits
from the other's allocator.
"""

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.measured import Measured
from frostglass.attacks.base import invert
from frostglass.attacks.model.gmi import Gmi
from frostglass.core.assets import Assets
from frostglass.core.prior import Prior
from frostglass.models.build import build
from frostglass.models.wrap import wrap
from frostglass.priors.base import identity_hashes
from frostglass.priors.wgan import Wgan
from frostglass.runtime.memory import keep_freed_memory

# In the official code 60 people share a batch, and 5 seeds run after each other (2 here) with 1,500
# to 3,000 steps each. Fewer steps give more weight to the final evaluation, which is the same for
# both: a tenth of the time with 3 steps, a thirtieth with 10.
SHAPE, PEOPLE, SEEDS, STEPS, LIMIT, ROUNDS = (3, 64, 64), 60, 2, 10, 1.7, 3


def measure() -> Iterator[Measured]:
    pairs = [(_seconds("official"), _seconds("ours")) for _ in range(ROUNDS)]
    times = statistics.median(theirs / mine for theirs, mine in pairs)
    theirs, mine = (statistics.median(column) for column in zip(*pairs, strict=True))
    yield Measured(
        "GMI, VGG16 at 64 px, speed over the official style",
        times,
        f"{PEOPLE} people × {SEEDS} seeds × {STEPS} steps: {mine:.1f} s against {theirs:.1f} s",
        least=LIMIT,
    )


def _seconds(side: str) -> float:
    """Return the seconds of a search in a fresh process, after a short warm-up."""
    threads = str(torch.get_num_threads())
    command = [sys.executable, "-m", "benchmarks.official_style", side, threads]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def _ours(generator: nn.Module, critic: nn.Module, module: nn.Module, steps: int) -> None:
    prior = Prior(
        generator=generator,
        critic=critic,
        latent=100,
        image_shape=SHAPE,
        seen_identities=identity_hashes([]),
    )
    attack = Gmi(steps=steps, candidates=SEEDS, keep=SEEDS)
    view = wrap(module, classes=1000, image_shape=SHAPE).view(["gradients"])
    invert(attack, view, Assets(prior=prior), people=range(PEOPLE), seed=0)


def _official(generator: nn.Module, critic: nn.Module, module: nn.Module, steps: int) -> None:
    labels = torch.arange(PEOPLE)
    for seed in range(SEEDS):
        z = torch.randn(PEOPLE, 100, generator=torch.Generator().manual_seed(seed)).requires_grad_()
        velocity = torch.zeros_like(z)
        for _ in range(steps):
            for part in (generator, critic, module):
                part.zero_grad()
            z.grad = None
            images = generator(z)
            (-critic(images).mean() + 100 * F.cross_entropy(module(images), labels)).backward()
            assert z.grad is not None
            before = velocity.clone()
            velocity = 0.9 * velocity - 0.02 * z.grad
            z.data = torch.clamp(z.detach() - 0.9 * before + 1.9 * velocity, -1, 1)
        with torch.no_grad():
            module(generator(z)).argmax(1)


def main(side: str, threads: int) -> None:
    torch.set_num_threads(threads)
    if side == "ours":
        keep_freed_memory()  # as the command line does
    work = _ours if side == "ours" else _official
    generator, critic = (part.eval() for part in Wgan().networks(SHAPE))
    module = build("vgg16", classes=1000, image_shape=SHAPE, seed=0).eval()
    work(generator, critic, module, 1)
    began = time.perf_counter()
    work(generator, critic, module, STEPS)
    print(time.perf_counter() - began)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
