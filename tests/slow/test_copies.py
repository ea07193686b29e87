"""The figures on near copies that docs/audit-a-model.md states."""

from pathlib import Path

import pytest
import torch

from frostglass.data._duplicates import near_copies
from frostglass.data.digits import Digits
from frostglass.data.faces import EMBEDDER_WORLD, Faces
from frostglass.data.mnist import Mnist
from image_copies import KINDS, copies

pytestmark = pytest.mark.slow
MNIST = Path(__file__).parents[3] / "shared" / "data" / "mnist"
LESS = {
    "cropped by 10 %": 75,
    "cropped by 20 %": 0,
    "shifted by 2 pixels": 40,
    "mirrored, cropped by 5 %, brighter, grey, JPEG": 85,
}


@pytest.fixture(scope="module")
def faces():
    return tuple(table.pixels for table in Faces(images=60).tables())


@pytest.mark.parametrize("kind", KINDS)
def test_recall_among_thousands(faces, kind):
    private, public = faces
    some = private[::24]
    found = near_copies(some, torch.cat([public, copies(some, kind)]))
    right = sum(match == row + len(public) for row, match in found)
    assert right >= LESS.get(kind, 95)
    assert all(match >= len(public) for _, match in found)


@pytest.mark.parametrize(
    "dataset",
    [
        Faces(),
        Faces(world=EMBEDDER_WORLD, public_identities=2500, public_images=10),
        Digits(),
        Digits(size=16),
    ],
    ids=["faces", "faces of the embedder", "digits", "small digits"],
)
def test_no_false_alarm(dataset):
    private, public = dataset.tables()
    assert near_copies(private.pixels, public.pixels) == []


@pytest.mark.skipif(
    not MNIST.is_dir(), reason="MNIST's files are not at ../shared/data/mnist beside the repository"
)
def test_no_false_alarm_among_mnist():
    private, public = Mnist(root=MNIST).tables()
    assert near_copies(private.pixels, public.pixels) == []
