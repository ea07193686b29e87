"""Train a network on patterns instead of faces: a start for configs/faces/far-domain.toml.

Transfer learning as a defense freezes layers that were learned elsewhere. Here elsewhere is far
from faces: 32 classes of coloured stripes, rings, dots and polygons. Takes about two minutes on one
core; writes far-domain.safetensors into the current folder, or where the argument says.
"""

import math
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from frostglass.models.build import build
from frostglass.models.checkpoint import save_weights

KINDS, SCALES, SIZE = 8, 4, 32
CLASSES = KINDS * SCALES
STEPS, BATCH = 1000, 64


def patterns(labels: Tensor, rng: torch.Generator) -> Tensor:
    """Draw a pattern of each class, (N, 3, 32, 32) in [0, 1], anywhere, turned, in any colours."""
    count = len(labels)

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(count, *(shape or (1, 1)), generator=rng)

    axis = (torch.arange(SIZE) + 0.5) / SIZE * 2 - 1
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    x, y, angle = x - uniform(-0.4, 0.4), y - uniform(-0.4, 0.4), uniform(0, math.tau)
    u, v = angle.cos() * x + angle.sin() * y, angle.cos() * y - angle.sin() * x
    radius, turn = (u**2 + v**2).sqrt(), torch.atan2(v, u)
    scale = (labels % SCALES)[:, None, None]
    f, sides = 5.0 + 3 * scale, 3.0 + scale
    corner = torch.cos(math.pi / sides) / torch.cos(turn % (math.tau / sides) - math.pi / sides)
    fields = torch.stack([
        torch.sin(f * u),
        torch.sin(f * u) * torch.sin(f * v) * 1.5,
        torch.sin(f * radius),
        torch.sin((sides + 2) * turn),
        torch.cos(f * u) + torch.cos(f * v) - 0.7,
        torch.sin(f * (u + 0.25 * torch.asin(torch.sin(6 * v)))),
        4 * (0.6 * corner - radius),
        torch.sin(f * u + 2 * torch.sin(f * v)),
    ])  # fmt: skip
    cover = torch.sigmoid(6 * fields[labels // SCALES, torch.arange(count)])[:, None]
    dark, light = uniform(0, 0.6, 3, 1, 1), uniform(0.4, 1, 3, 1, 1)
    image = dark + (light - dark) * cover
    return (image + 0.05 * torch.randn(image.shape, generator=rng)).clamp(0, 1)


def main(path: str = "far-domain.safetensors") -> float:
    """Train, write the weights and return the accuracy on new patterns."""
    rng = torch.Generator().manual_seed(0)
    network = build("cnn", classes=CLASSES, image_shape=(3, SIZE, SIZE), seed=0, width=32)
    optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3, weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for _ in range(STEPS):
        labels = torch.randint(CLASSES, (BATCH,), generator=rng)
        loss = F.cross_entropy(network(patterns(labels, rng)), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    labels = torch.arange(CLASSES).repeat(32)
    with torch.no_grad():
        named = network.eval()(patterns(labels, rng)).argmax(1)
    save_weights(network, Path(path))
    return (named == labels).double().mean().item()


if __name__ == "__main__":
    print(f"accuracy on new patterns: {main(*sys.argv[1:]):.1%}")
