"""Memory of split, training, prior training and scoring by the number of images at 224 pixels.

Anonymous memory (RssAnon) is measured: pages of a mapped file count as resident too, but belong to
the system's cache, which drops them when memory is short. Each number of images has a process of
its own. The goal is for 200,000 images; fewer are measured, and the slope says the rest.
"""

import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.measured import Measured

SIDE = 224
PRIOR_SIDE = 128  # the largest that the WGAN makes; its split is part of that stage
FEW, MANY, GOAL = 1_000, 4_000, 200_000
LIMIT = 1.5  # GiB above what torch and the package take before any image is read
PEOPLE = 20  # private and public each
ROOT = Path(__file__).parents[1]
MIB = 2**20


def measure() -> Iterator[Measured]:
    few, many = (_child(count) for count in (FEW, MANY))
    for stage, peak in many.items():
        slope = (peak - few[stage]) / (MANY - FEW)
        planned = (peak + max(0.0, slope) * (GOAL - MANY)) / 2**30
        note = (
            f"{few[stage] / MIB:,.0f} MiB for {FEW:,}, {peak / MIB:,.0f} MiB for {MANY:,}, "
            f"{slope / 1024:,.1f} KiB an image"
        )
        yield Measured(f"{stage}, GiB above torch for {GOAL:,} images", planned, note, most=LIMIT)


def _child(count: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.scale", str(count), folder]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


def anonymous() -> int:
    """Return the bytes of memory that this process has and no file is behind."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) * 1024


@contextmanager
def peak_of(stage: str, peaks: dict[str, float], before: int) -> Iterator[None]:
    """Sample the anonymous memory while a stage runs; keep its peak above `before`."""
    done, most = threading.Event(), [anonymous()]

    def sample() -> None:
        while not done.wait(0.01):
            most[0] = max(most[0], anonymous())

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        peaks[stage] = max(most[0], anonymous()) - before


def write_images(folder: Path, count: int) -> dict[str, Path]:
    """Write JPEGs of people who all look different, half of them private."""
    import torch
    from PIL import Image

    sides = {side: folder / side for side in ("private", "public")}
    for number, side in enumerate(sides):
        rng = torch.Generator().manual_seed(number)
        for place in range(count // 2):
            own = sides[side] / f"{side} {place % PEOPLE}"
            own.mkdir(parents=True, exist_ok=True)
            coarse = torch.randint(256, (8, 8, 3), generator=rng, dtype=torch.uint8)
            image = Image.fromarray(coarse.numpy()).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
            image.save(own / f"{place}.jpg", quality=85)
    return sides


def stages(count: int, folder: Path) -> dict[str, float]:
    """Run each stage on so many images; return the peaks above torch in bytes."""
    import torch

    from frostglass import Store
    from frostglass.auditing.experiment import Fractions
    from frostglass.auditing.steps import SPLIT
    from frostglass.core.pixels import ByteImages
    from frostglass.core.types import Reconstructions, Split
    from frostglass.data import Folder
    from frostglass.data._gather import mapped, pixel_writer
    from frostglass.metrics.base import Evidence, measure, metrics
    from frostglass.priors.base import priors
    from frostglass.runtime.memory import keep_freed_memory
    from frostglass.store.keys import fingerprint
    from frostglass.training import Training, train_target

    keep_freed_memory()  # as the command line does
    torch.set_num_threads(1)
    dataset = Folder(**write_images(folder, count), size=SIDE)
    config = Training(model="cnn", options={"width": 4}, epochs=1, batch=32)
    accelerated()

    def split_of(dataset: Folder) -> Split:
        return Store(folder / "store").step(
            SPLIT, dataset, fractions=Fractions(), files=fingerprint(dataset), seed=0
        )

    peaks: dict[str, float] = {}
    before = anonymous()
    with peak_of("split", peaks, before):
        split = split_of(dataset)
    with peak_of("training", peaks, before):
        target = train_target(config, split, seed=0)
    prior: Any = priors.build(
        {"name": "wgan", "steps": 2, "critic_steps": 1, "batch": 4, "width": 16}
    )
    with peak_of("prior training", peaks, before):
        prior.train(split_of(replace(dataset, size=PRIOR_SIDE)).public, None, seed=0)
    each = count // 4 // PEOPLE
    with pixel_writer(folder / "images", (PEOPLE, each, 3, SIDE, SIDE)) as write:
        for person in range(PEOPLE):
            write(slice(person, person + 1), split.public.pixels[person * each :][:each])
    found = Reconstructions(
        ByteImages(mapped(folder / "images")),
        torch.arange(PEOPLE),
        torch.zeros(PEOPLE, each, 0),
        torch.zeros(PEOPLE, each),
        queries=0,
        seconds=0.0,
    )
    names = ("accuracy", "verification", "distance", "manifold")
    with peak_of("scoring", peaks, before):
        measure([metrics.build({"name": name}) for name in names],
                Evidence(found, target, [target], split))  # fmt: skip
    return peaks


def accelerated() -> None:
    """Import what a training imports late: it is no memory of the images."""
    import lightning_fabric  # noqa: F401


if __name__ == "__main__":
    sys.stdout.write(json.dumps(stages(int(sys.argv[1]), Path(sys.argv[2]))))
