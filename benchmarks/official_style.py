"""GMI at 64 pixels (VGG16 and the published generator and critic) against the style of the official code, on the same networks.

That style: weights collect gradients nobody uses, tensors in the usual layout, one seed after the other. Each side has a process of its own, and they
take turns: what one leaves behind in the allocator would be the other's advantage.
"""

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from frostglass.attacks.base import invert
from frostglass.attacks.model.gmi import Gmi
from frostglass.core.prior import Prior
from frostglass.core.types import Target
from frostglass.models.build import build
from frostglass.models.taps import find_head
from frostglass.priors.base import identity_hashes
from frostglass.priors.wgan import Wgan
from frostglass.runtime.memory import keep_freed_memory

# In the official code 60 people share a batch, and 5 seeds follow each other with 1500 to 3000 steps each. The fewer steps, the more weighs the one look at
# the end, which both take alike: a tenth of the time with 3, a thirtieth with 10.
SHAPE, PEOPLE, SEEDS, STEPS, WANTED, ROUNDS = (3, 64, 64), 60, 5, 10, 1.7, 3


def measure() -> Iterator[str]:
    pairs = [(_seconds("official"), _seconds("ours")) for _ in range(ROUNDS)]
    times = statistics.median(theirs / mine for theirs, mine in pairs)
    theirs, mine = (statistics.median(column) for column in zip(*pairs, strict=True))
    yield (
        f"GMI, VGG16 at 64 px, {PEOPLE} people × {SEEDS} seeds × {STEPS} steps: {times:.2f} times as fast as the official style "
        f"(wanted {WANTED}); {mine:.1f} s against {theirs:.1f} s"
    )


def _seconds(side: str) -> float:
    """What a search takes in a fresh process, after a short one."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.official_style",
        side,
        str(torch.get_num_threads()),
    ]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def _ours(generator: nn.Module, critic: nn.Module, module: nn.Module, steps: int) -> None:
    prior = Prior(
        generator=generator,
        critic=critic,
        latent=100,
        image_shape=SHAPE,
        seen_identities=identity_hashes([]),
    )
    target = Target(
        module=module,
        classes=tuple(map(str, range(1000))),
        image_shape=SHAPE,
        head=find_head(module, SHAPE),
    )
    invert(
        Gmi(steps=steps, candidates=SEEDS, keep=SEEDS),
        target.view(["gradients"]),
        prior,
        labels=range(PEOPLE),
        seed=0,
    )


def _official(generator: nn.Module, critic: nn.Module, module: nn.Module, steps: int) -> None:
    labels = torch.arange(PEOPLE)
    for seed in range(SEEDS):
        z = torch.randn(PEOPLE, 100, generator=torch.Generator().manual_seed(seed)).requires_grad_()
        speed = torch.zeros_like(z)
        for _ in range(steps):
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


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[2]))
    work = _official
    if sys.argv[1] == "ours":
        keep_freed_memory()  # as the command line does
        work = _ours
    networks = (
        *(part.eval() for part in Wgan().networks(SHAPE)),
        build("vgg16", classes=1000, image_shape=SHAPE, seed=0).eval(),
    )
    work(*networks, 1)
    began = time.perf_counter()
    work(*networks, STEPS)
    print(time.perf_counter() - began)
