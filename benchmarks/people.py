"""How time and memory of an attack grow with the number of attacked people, on tiny networks.

Each size runs in a process of its own. Time is that of the CPU, so that other work on the machine
counts less; between two sizes it must grow as the number of people does.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn

from benchmarks.measured import Measured
from frostglass.attacks.base import invert
from frostglass.attacks.model.gmi import Gmi
from frostglass.core.assets import Assets
from frostglass.core.prior import Prior
from frostglass.models.wrap import wrap
from frostglass.priors.base import identity_hashes
from frostglass.runtime.memory import keep_freed_memory, most_resident

SIZES = (10, 100, 1000)
SLOPE = 0.1  # how far the time per further person may differ between the sizes
GROWTH = 1.1  # of the process's memory, from the fewest people to the most
SHAPE, LATENT = (3, 16, 16), 16
ATTACK = Gmi(steps=30, candidates=4, keep=1, patience=0, batch=64)
ROUNDS = 3
ROOT = Path(__file__).parents[1]


def measure() -> Iterator[Measured]:
    # The least of some rounds: other work on the machine only ever adds to a time.
    rounds = [[_child(size) for size in SIZES] for _ in range(ROUNDS)]
    seconds = [min(column)[0] for column in zip(*rounds, strict=True)]
    memory = [max(each[1] for each in column) for column in zip(*rounds, strict=True)]
    few, many = (
        (later - earlier) / (more - fewer)
        for (fewer, earlier), (more, later) in pairwise(zip(SIZES, seconds, strict=True))
    )
    yield Measured(
        "seconds per further person, 100 to 1,000 over 10 to 100",
        many / few,
        " ".join(f"{size:,}: {spent:.2f} s" for size, spent in zip(SIZES, seconds, strict=True)),
        least=1 - SLOPE,
        most=1 + SLOPE,
    )
    yield Measured(
        "memory of an attack on 1,000 people over 10",
        memory[-1] / memory[0],
        " ".join(f"{size:,}: {mib:.0f} MiB" for size, mib in zip(SIZES, memory, strict=True)),
        most=GROWTH,
    )


def _child(people: int) -> tuple[float, float]:
    command = [sys.executable, "-m", "benchmarks.people", str(people)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True)
    seconds, mib = json.loads(done.stdout)
    return seconds, mib


def attacked(people: int) -> tuple[float, float]:
    """Attack so many people; return CPU seconds and the most memory of the process, in MiB."""
    torch.manual_seed(0)
    size = SHAPE[0] * SHAPE[1] * SHAPE[2]
    generator = nn.Sequential(nn.Linear(LATENT, size), nn.Sigmoid(), nn.Unflatten(1, SHAPE))
    target = nn.Sequential(nn.Flatten(), nn.Linear(size, SIZES[-1]))
    prior = Prior(
        generator=generator,
        critic=nn.Sequential(nn.Flatten(), nn.Linear(size, 1)),
        latent=LATENT,
        image_shape=SHAPE,
        seen_identities=identity_hashes([]),
    )
    view = wrap(target, classes=SIZES[-1], image_shape=SHAPE).view(["gradients"])
    invert(ATTACK, view, Assets(prior=prior), people=range(2), seed=0)
    began = time.process_time()
    invert(ATTACK, view, Assets(prior=prior), people=range(people), seed=0)
    return time.process_time() - began, most_resident() / 2**20


if __name__ == "__main__":
    torch.set_num_threads(1)
    keep_freed_memory()
    sys.stdout.write(json.dumps(attacked(int(sys.argv[1]))))
