"""Memory of split, training, prior training and scoring by the number of images at 224 pixels.

Anonymous memory (RssAnon) is measured: pages of a mapped file count as resident too, but belong to
the system's cache, which drops them when memory is short. Each stage has a process of its own. The
goal is for 200,000 images; fewer are measured, and the slope says the rest.
"""

import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.measured import Measured
from frostglass.runtime.memory import keep_freed_memory, own_memory

SIDE = 224
PRIOR_SIDE = 128  # the largest that the WGAN makes; its split is part of that stage
NETWORK = {"width": 4}
METRICS = ("accuracy", "verification", "distance", "manifold")
FEW, MANY, GOAL = 4_000, 32_000, 200_000  # far apart: memory varies by some 50 MiB
LIMIT = 1.5  # GiB above what torch and the package take before any image is read
PEOPLE = 20  # private and public each
ROOT = Path(__file__).parents[1]
MIB = 2**20


def measure() -> Iterator[Measured]:
    few, many = (_peaks(count) for count in (FEW, MANY))
    for stage, peak in many.items():
        slope = (peak - few[stage]) / (MANY - FEW)
        planned = (peak + max(0.0, slope) * (GOAL - MANY)) / 2**30
        note = (
            f"{few[stage] / MIB:,.0f} MiB for {FEW:,}, {peak / MIB:,.0f} MiB for {MANY:,}, "
            f"{slope / 1024:,.1f} KiB an image"
        )
        yield Measured(f"{stage}, GiB above torch for {GOAL:,} images", planned, note, most=LIMIT)


def _peaks(count: int) -> dict[str, int]:
    """Measure each stage on so many images, in a process of its own; all share a store."""
    with tempfile.TemporaryDirectory() as folder:
        write_images(Path(folder), count)
        return {stage: _child(stage, count, folder) for stage in STAGES}


def _child(stage: str, count: int, folder: str) -> int:
    command = [sys.executable, "-m", "benchmarks.scale", stage, str(count), folder]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


@contextmanager
def peak_above(before: int) -> Iterator[list[int]]:
    """Sample the anonymous memory of the block; its peak above `before` is in the list."""
    done, most = threading.Event(), [0]

    def sample() -> None:
        while not done.wait(0.005):
            most[0] = max(most[0], own_memory() - before)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield most
    finally:
        done.set()
        thread.join()


def write_images(folder: Path, count: int) -> None:
    """Write JPEGs of people who all look different, half of them private."""
    import torch
    from PIL import Image

    for number, side in enumerate(("private", "public")):
        rng = torch.Generator().manual_seed(number)
        for place in range(count // 2):
            own = folder / side / f"{side} {place % PEOPLE}"
            own.mkdir(parents=True, exist_ok=True)
            coarse = torch.randint(256, (8, 8, 3), generator=rng, dtype=torch.uint8)
            image = Image.fromarray(coarse.numpy()).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
            image.save(own / f"{place}.jpg", quality=85)


def peak(stage: str, count: int, folder: Path) -> int:
    """Run a stage; return its peak in bytes above what torch and the package take."""
    import lightning_fabric  # noqa: F401  # a training imports it late
    import torch

    from frostglass.data import Folder

    keep_freed_memory()  # as the command line does
    torch.set_num_threads(1)
    size = PRIOR_SIDE if stage == "prior training" else SIDE
    dataset = Folder(private=folder / "private", public=folder / "public", size=size)
    with peak_above(own_memory()) as most:
        STAGES[stage](dataset, count, folder)
    return most[0]


def _split(dataset: Any, count: int, folder: Path) -> Any:
    from frostglass import Store
    from frostglass.auditing.fractions import Fractions
    from frostglass.auditing.steps import SPLIT
    from frostglass.store.keys import fingerprint

    files = fingerprint(dataset)
    return Store(folder / "store").step(SPLIT, dataset, fractions=Fractions(), files=files, seed=0)


def _train(dataset: Any, count: int, folder: Path) -> None:
    from frostglass.training import Training, train_target

    config = Training(model="cnn", options=NETWORK, epochs=1, batch=32)
    train_target(config, _split(dataset, count, folder), seed=0)


def _train_prior(dataset: Any, count: int, folder: Path) -> None:
    from frostglass.priors.base import priors

    prior: Any = priors.build({"name": "wgan", "steps": 4, "critic_steps": 1, "batch": 16})
    prior.train(_split(dataset, count, folder).public, None, seed=0)


def _score(dataset: Any, count: int, folder: Path) -> None:
    """Score a reconstruction for every fourth image, by an untrained evaluator."""
    import torch

    from frostglass.core.pixels import ByteImages, mapped
    from frostglass.core.types import Reconstructions
    from frostglass.data._gather import pixel_writer
    from frostglass.metrics.base import Evidence, measure, metrics
    from frostglass.training import Training
    from frostglass.training.build import untrained

    split, each = _split(dataset, count, folder), count // 4 // PEOPLE
    with pixel_writer(folder / "images", (PEOPLE, each, *split.train.shape)) as write:
        for person in range(PEOPLE):
            write(slice(person, person + 1), split.public.pixels[slice(person, person + each)])
    shape = (PEOPLE, each)
    found = Reconstructions(
        ByteImages(mapped(folder / "images")),
        torch.arange(PEOPLE),
        torch.zeros(*shape, 0),
        torch.zeros(shape),
        queries=0,
        seconds=0.0,
    )
    config = Training(model="cnn", options=NETWORK)
    target = untrained(config, split.classes, split.train.shape, (), seed=0)
    chosen = [metrics.build({"name": name}) for name in METRICS]
    measure(chosen, Evidence(found, target, [target], split))


STAGES = {
    "split": _split,
    "training": _train,
    "prior training": _train_prior,
    "scoring": _score,
}

if __name__ == "__main__":
    sys.stdout.write(json.dumps(peak(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))))
