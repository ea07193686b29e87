"""The procedural faces cannot be solved by pixels alone; docs/faces.md has the printed figures."""

import pytest
import torch
from torch import nn

from frostglass.data._splits import make_split
from frostglass.data.faces import Faces
from frostglass.metrics.base import outputs
from frostglass.training.loop import train_target
from frostglass.training.settings import Training

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def split():
    return make_split(
        Faces(identities=50, images=60, public_identities=2, public_images=1),
        test_fraction=0.2,
        validation_fraction=0.1,
        seed=0,
    )


def linear(*, classes, image_shape):
    """Build one linear layer on standardised pixels."""
    features = image_shape[0] * image_shape[1] * image_shape[2]
    return nn.Sequential(
        nn.Flatten(), nn.BatchNorm1d(features, affine=False), nn.Linear(features, classes)
    )


def separation(features, labels):
    """Return how often a pair of one person is closer than a pair of two people."""
    distance = torch.cdist(features, features)
    same = labels[:, None] == labels[None]
    own = distance[same & ~torch.eye(len(labels), dtype=torch.bool)]
    other = distance[~same]
    rng = torch.Generator().manual_seed(0)
    own, other = (
        values[torch.randint(len(values), (200_000,), generator=rng)] for values in (own, other)
    )
    return (own < other).float().mean().item()


def test_pixels_alone_do_not_solve_it(split, capsys):
    deep = Training(model="cnn", options={"width": 16}, epochs=24, lr=2e-3, weight_decay=1e-3)
    flat = Training(model=f"{__name__}:linear", epochs=40, lr=1e-3, weight_decay=1e-2, flip=False)
    cnn = train_target(deep, split)
    accuracy = {
        "cnn": cnn.info["accuracy"]["test"],
        "linear": train_target(flat, split).info["accuracy"]["test"],
    }
    pixels = split.test.floats().flatten(1)
    nearest = torch.cdist(pixels, split.train.floats().flatten(1)).argmin(1)
    accuracy["nearest neighbour on pixels"] = (
        (split.train.labels[nearest] == split.test.labels).float().mean().item()
    )
    apart = {
        "pixels": separation(pixels, split.test.labels),
        "cnn features": separation(outputs(cnn, split.test)[1], split.test.labels),
    }
    with capsys.disabled():
        print("\nheld-out accuracy, 50 people:", accuracy)
        print("same person closer than another:", apart)
    assert accuracy["cnn"] > 0.9
    assert accuracy["linear"] < accuracy["cnn"] - 0.08
    assert accuracy["nearest neighbour on pixels"] < 0.6
    assert apart["pixels"] < 0.8
    assert apart["cnn features"] > 0.95
