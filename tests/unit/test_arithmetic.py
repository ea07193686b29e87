"""Numbers too small to be normal count as 0 where that saves time, and nowhere else."""

import math
from typing import ClassVar

import pytest
import torch
from torch import nn

from feature_worlds import blobs, run, view_of
from frostglass.attacks.features.hybrid import Hybrid
from frostglass.runtime.arithmetic import DENORMAL, denormals_flushed
from frostglass.training.loop import train_target
from frostglass.training.settings import Training
from worlds import NoWork, split

pytestmark = pytest.mark.skipif(
    not torch.set_flush_denormal(False), reason="this CPU cannot flush them"
)


def halved() -> float:
    return torch.full((4,), DENORMAL).mul(0.5).max().item()


def test_they_are_zero_inside_the_block():
    assert halved() > 0
    with denormals_flushed():
        assert halved() == 0
        assert torch.full((1,), 1e-37).mul(0.5).item() > 0
    assert halved() > 0


def test_an_error_ends_it_too():
    with pytest.raises(ZeroDivisionError), denormals_flushed():
        raise ZeroDivisionError
    assert halved() > 0


def test_blocks_nest():
    with denormals_flushed():
        with denormals_flushed():
            pass
        assert halved() == 0
    assert halved() > 0


class Recording(nn.Flatten):
    """Notes what a denormal number is worth while it runs."""

    seen: ClassVar[list[float]] = []

    def forward(self, images):
        self.seen.append(halved())
        return super().forward(images)


def test_a_search_of_features_flushes_them():
    encoder = Recording()
    view = view_of(encoder, blobs(2, 1), ["encoder"])
    encoder.seen.clear()
    run(Hybrid(start="noise", steps=3), view)
    assert encoder.seen.count(0) >= 3
    assert halved() > 0


def recording(*, classes, image_shape):
    return nn.Sequential(Recording(), nn.Linear(math.prod(image_shape), classes))


def test_a_training_flushes_them():
    Recording.seen.clear()
    train_target(Training(model=f"{__name__}:recording", epochs=1), split(), work=NoWork())
    assert Recording.seen.count(0) >= 1
    assert halved() > 0
