"""FID and nearest neighbours of 50,000 × 2,048 features: CPU time against others, and memory.

Each runs in a process of its own. torchmetrics is only compared with where it is installed.
"""

import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.measured import Measured

if TYPE_CHECKING:
    from torch import Tensor

IMAGES, WIDTH = 50_000, 2048
MOST, LIMIT = 4096, 1.0  # MiB, and our time over the other's
ROOT = Path(__file__).parents[1]
QUERIES = IMAGES // 10
PAIRS = {
    "FID": ("fid", "torchmetrics"),
    f"nearest neighbours of {QUERIES:,}": ("nearest", "cdist"),
}


def measure() -> Iterator[Measured]:
    for title, (ours, other) in PAIRS.items():
        seconds, mib, value = _child(ours)
        yield Measured(f"{title} of {IMAGES:,} × {WIDTH:,} features, MiB", mib, most=MOST)
        if other == "torchmetrics" and find_spec(other) is None:
            note = f"{seconds:.1f} CPU s; torchmetrics is not installed"
            yield Measured(f"{title}, not compared", math.nan, note)
            continue
        theirs, their_mib, their_value = _child(other)
        note = (
            f"{seconds:.1f} against {theirs:.1f} CPU s and {their_mib:,.0f} MiB; values "
            f"{value:.6g} and {their_value:.6g}"
        )
        yield Measured(f"{title}, CPU time over {other}", seconds / theirs, note, most=LIMIT)


def _child(kind: str) -> tuple[float, float, float]:
    command = [sys.executable, "-m", "benchmarks.feature_sets", kind, str(IMAGES), str(WIDTH)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True)
    seconds, mib, value = json.loads(done.stdout)
    return seconds, mib, value


def _one(kind: str, images: int, width: int) -> tuple[float, float, float]:
    """Return CPU seconds, which other work on the machine does not change, peak MiB and value."""
    import torch

    from frostglass.runtime.memory import most_resident

    rng = torch.Generator().manual_seed(0)
    mix = torch.randn(width, width, generator=rng) / width**0.5
    first, second = (torch.randn(images, width, generator=rng) @ mix for _ in range(2))
    second += 0.1
    functions = {"fid": _fid, "torchmetrics": _torchmetrics, "nearest": _nearest, "cdist": _cdist}
    work: Callable[[Tensor, Tensor], float] = functions[kind]
    work(first[:64, :8], second[:64, :8])  # imports take their time
    if kind in ("nearest", "cdist"):
        first = first[:QUERIES]
    began = time.process_time()
    value = work(first, second)
    return time.process_time() - began, most_resident() / 2**20, value


def _fid(first: "Tensor", second: "Tensor") -> float:
    from frostglass.metrics._frechet import frechet_distance

    return frechet_distance(first, second)


def _torchmetrics(first: "Tensor", second: "Tensor") -> float:
    import torch
    from torchmetrics.image.fid import FrechetInceptionDistance

    class Features(torch.nn.Module):
        """Takes features for images: torchmetrics only takes images."""

        num_features = first.shape[1]

        def forward(self, images: "Tensor") -> "Tensor":
            return images.flatten(1)

    fid = FrechetInceptionDistance(
        Features(), normalize=True, input_img_size=(1, 1, first.shape[1])
    )
    for features, real in ((first, True), (second, False)):
        for part in features[:, None, None].split(4096):
            fid.update(part, real=real)
    return float(fid.compute())


def _nearest(queries: "Tensor", references: "Tensor") -> float:
    from frostglass.metrics._neighbours import nearest

    return nearest(queries, references).mean().item()


def _cdist(queries: "Tensor", references: "Tensor") -> float:
    import torch

    parts = [torch.cdist(part, references).amin(1) for part in queries.split(1024)]
    return torch.cat(parts).mean().item()


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_one(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
