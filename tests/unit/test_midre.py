"""MIDRE: how much of each image is erased, where, and with which colour."""

from dataclasses import replace

import pytest
import torch

from frostglass.core.errors import ConfigError
from frostglass.data._augment import IMAGENET_MEAN
from frostglass.defenses.base import TrainingSize
from frostglass.defenses.training.midre import Midre
from frostglass.training.loop import train_target
from frostglass.training.settings import Training
from worlds import NoWork, rng, split, target

SIZE = TrainingSize(48, 16, 2)
SHAPE = (3, 32, 32)


def erased(defense, count=2000, shape=SHAPE):
    """Return what is missing of white images, (N, H, W)."""
    changed = defense.changes(count, shape, rng()).apply(torch.ones(count, *shape))
    return (changed < 1).all(1), changed


def test_the_published_setting_is_the_default():
    assert (Midre().low, Midre().high, Midre().fill) == (0.1, 0.4, ())
    assert IMAGENET_MEAN == (0.485, 0.456, 0.406)


def test_every_image_loses_one_box_of_the_asked_area():
    missing, changed = erased(Midre(low=0.1, high=0.4))
    rows, columns = missing.any(2).sum(1), missing.any(1).sum(1)
    assert torch.equal(missing.sum((1, 2)), rows * columns)  # one box
    assert torch.equal(rows, columns)
    share = missing.float().mean((1, 2))
    # Sides are rounded to whole pixels: half a pixel of 32 changes the share by about 0.02.
    assert share.min() > 0.08
    assert share.max() < 0.42
    assert share.mean() == pytest.approx(0.25, abs=0.01)
    colours = changed[0, :, missing[0]]
    torch.testing.assert_close(colours, torch.tensor(IMAGENET_MEAN)[:, None].expand_as(colours))


def test_boxes_lie_anywhere_inside():
    missing, _ = erased(Midre(low=0.25, high=0.25))
    assert (missing.sum((1, 2)) == 16 * 16).all()  # never cut off by the border
    tops = missing.any(2).int().argmax(1)
    lefts = missing.any(1).int().argmax(1)
    for places in (tops, lefts):
        share = places.bincount(minlength=17) / len(places)
        torch.testing.assert_close(share, torch.full((17,), 1 / 17), atol=0.03, rtol=0)
    assert abs(torch.corrcoef(torch.stack([tops, lefts]).float())[0, 1]) < 0.1


def test_a_box_has_the_proportions_of_the_image_and_leaves_some_of_it():
    missing, _ = erased(Midre(low=0.5, high=0.5), 50, (3, 40, 20))
    assert (missing.any(2).sum(1) == 28).all()
    assert (missing.any(1).sum(1) == 14).all()
    missing, _ = erased(Midre(low=0.99, high=0.999), 50, (3, 8, 8))
    assert (missing.sum((1, 2)) == 49).all()


def test_the_colour_is_that_of_the_parameter_or_grey_for_grey_images():
    _, changed = erased(Midre(fill=(0.0, 0.5, 0.25)), 1)
    assert sorted(changed[0].flatten(1).min(1).values.tolist()) == [0.0, 0.25, 0.5]
    _, grey = erased(Midre(), 1, (1, 32, 32))
    assert grey.min().item() == pytest.approx(0.2989 * 0.485 + 0.587 * 0.456 + 0.114 * 0.406)


def test_the_network_is_trained_on_what_is_left(monkeypatch):
    """The images of every step lack a box; validation and the trained network see whole ones."""
    seen = []
    losses = Midre.losses

    def spy(self, batch):
        seen.append(batch.images)
        return losses(self, batch)

    monkeypatch.setattr(Midre, "losses", spy)
    config = Training(model="cnn", options={"width": 4}, epochs=1, batch=16, flip=False)
    train_target(config, split(), [Midre(low=0.3, high=0.3, fill=(1, 0, 1))], seed=0, work=NoWork())
    images = torch.cat(seen)
    box = (images == torch.tensor([1.0, 0, 1]).view(3, 1, 1)).all(1).sum((1, 2))
    assert len(images) == len(split().train)
    assert (box >= 9 * 9).all()


def test_disabled_parameters_draw_nothing():
    generator = rng()
    assert Midre(**Midre.disabled).changes(4, SHAPE, generator) is None
    assert torch.equal(generator.get_state(), rng().get_state())


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"high": 1.0}, "high: expected less than 1, got 1.0; the default is 0.4"),
        ({"low": 0.5, "high": 0.3}, "low must be at most high, got 0.5 and 0.3: exchange them"),
        ({"fill": (2.0,)}, "fill.0: expected at most 1, got 2.0"),
    ],
)
def test_bad_parameters_are_refused(bad, message):
    with pytest.raises(ConfigError, match=message):
        Midre(**bad)


def test_a_colour_must_fit_the_images():
    (problem,) = Midre(fill=(0.5,)).problems(target(), SIZE)
    assert problem.startswith("fill needs a number for each of 3 channels, got 1: give as many")
    assert Midre(fill=(0.5,)).problems(target(shape=(1, 16, 16)), SIZE) == []
    assert replace(Midre(fill=(0.5,)), low=0.0, high=0.0).problems(target(), SIZE) == []
