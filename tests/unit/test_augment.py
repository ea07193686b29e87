"""Augmentations: against torchvision, and what each of them may and may not change."""

import pytest
import torch
from torch import Tensor, nn
from torchvision.transforms.v2 import functional as tv

from frostglass.data._augment import (
    brightened,
    contrasted,
    covered,
    draw_changes,
    grey,
    hue_turned,
    resized_crop,
    saturated,
)
from worlds import colour_images, rng

OFF = {"flip": False, "shift": 0, "crop": 1.0, "jitter": (0, 0, 0, 0), "cutout": 0.0}
ON = {"flip": True, "shift": 2, "crop": 0.5, "jitter": (0.2, 0.2, 0.1, 0.1), "cutout": 0.5}


images = pytest.fixture(colour_images)


def augment(images: Tensor, generator: torch.Generator, **settings) -> Tensor:
    return draw_changes(len(images), images.shape[1:], generator, **settings).apply(images)


def one_by_one(function, images: Tensor, factors: Tensor) -> Tensor:
    return torch.stack(
        [
            function(image, float(factor))
            for image, factor in zip(images, factors.flatten(), strict=True)
        ]
    )


FACTORS = torch.tensor([0.0, 0.3, 0.9, 1.0, 1.2, 3.0]).view(-1, 1, 1, 1)
TURNS = torch.tensor([-0.5, -0.31, -0.1, 0.0, 0.1, 0.5]).view(-1, 1, 1)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (brightened, tv.adjust_brightness),
        (contrasted, tv.adjust_contrast),
        (saturated, tv.adjust_saturation),
    ],
)
def test_factors_agree_with_torchvision(images, ours, theirs):
    torch.testing.assert_close(
        ours(images, FACTORS), one_by_one(theirs, images, FACTORS), atol=2e-6, rtol=0
    )


def test_grey_contrast_agrees_with_torchvision(images):
    plain = images[:, :1]
    torch.testing.assert_close(
        contrasted(plain, FACTORS),
        one_by_one(tv.adjust_contrast, plain, FACTORS),
        atol=2e-6,
        rtol=0,
    )
    torch.testing.assert_close(grey(images), tv.rgb_to_grayscale(images), atol=2e-6, rtol=0)


def test_hue_agrees_with_torchvision(images):
    # torchvision floors hues into six sectors; on a border both give the same colour.
    torch.testing.assert_close(
        hue_turned(images, TURNS), one_by_one(tv.adjust_hue, images, TURNS), atol=5e-6, rtol=0
    )


def test_hue_turns_primaries_into_each_other():
    red = torch.tensor([0.8, 0.2, 0.2]).view(1, 3, 1, 1)
    for turn, expected in (
        (1 / 3, [0.2, 0.8, 0.2]),
        (-1 / 3, [0.2, 0.2, 0.8]),
        (0.5, [0.2, 0.8, 0.8]),
        (1 / 12, [0.8, 0.5, 0.2]),
    ):
        found = hue_turned(red, torch.full((1, 1, 1), turn)).flatten()
        torch.testing.assert_close(found, torch.tensor(expected), atol=2e-6, rtol=0)


def test_resized_crop_agrees_with_torchvision_inside(images):
    """On boxes of whole pixels.

    On the rim of a box torchvision repeats the box's border, where we see the pixel beside it.
    """
    for image, (top, left, size) in zip(
        images, [(0, 0, 12), (0, 0, 9), (3, 3, 9), (2, 5, 6), (1, 0, 10), (4, 4, 8)], strict=True
    ):
        side = torch.tensor([size / 12])
        centre = torch.tensor([[2 * (left + size / 2) / 12 - 1], [2 * (top + size / 2) / 12 - 1]])
        expected = tv.resized_crop(image[None], top, left, size, size, [12, 12], antialias=False)
        torch.testing.assert_close(
            resized_crop(image[None], side, centre)[..., 1:-1, 1:-1],
            expected[..., 1:-1, 1:-1],
            atol=1e-5,
            rtol=0,
        )


def test_whole_crop_is_the_image(images):
    torch.testing.assert_close(
        resized_crop(images, torch.ones(6), torch.zeros(2, 6)), images, atol=1e-5, rtol=0
    )


def test_crop_draws_area_and_place_evenly():
    """On an image of its own coordinates a crop shows where it was taken from."""
    line = (torch.arange(32) + 0.5) / 32
    image = torch.stack([line.expand(32, 32), line[:, None].expand(32, 32)])[None].expand(
        4000, -1, -1, -1
    )
    crops = augment(image, rng(), crop=0.25)
    step = crops[..., 16, 17] - crops[..., 16, 16]
    side, down = (step[:, 0] * 32, (crops[:, 1, 17, 16] - crops[:, 1, 16, 16]) * 32)
    torch.testing.assert_close(side, down, atol=1e-3, rtol=0)
    area = side**2
    assert 0.25 - 1e-3 <= area.min() < 0.26
    assert 0.99 < area.max() <= 1 + 1e-3
    assert abs(area.mean() - 0.625) < 0.01
    middle = crops[:, :, 15:17, 15:17].mean((2, 3))  # of the crop, in shares of the image
    reach = ((middle - 0.5) / ((1 - side)[:, None] / 2))[
        side < 0.98
    ]  # uniform in [-1, 1] where the crop is anywhere inside
    assert reach.abs().max() <= 1 + 1e-2
    assert reach.mean(0).abs().max() < 0.03
    assert (reach.abs().mean(0) - 0.5).abs().max() < 0.02
    assert abs(torch.corrcoef(reach.T)[0, 1]) < 0.05


def test_augment_draws_factors_in_order(images):
    """The same generator, asked by hand for what the docstring says, gives the same images."""
    made = augment(images, rng(3), jitter=(0.2, 0.3, 0.4, 0.1))
    by_hand, generator = images, rng(3)
    for change, strength in ((brightened, 0.2), (contrasted, 0.3), (saturated, 0.4)):
        by_hand = change(
            by_hand, 1 - strength + 2 * strength * torch.rand(6, 1, 1, 1, generator=generator)
        )
    by_hand = hue_turned(by_hand, -0.1 + 0.2 * torch.rand(6, 1, 1, generator=generator))
    torch.testing.assert_close(made, by_hand, atol=1e-6, rtol=0)


def test_strong_brightness_never_turns_negative():
    flat = torch.full((2000, 1, 1, 1), 0.25)
    factors = (
        augment(flat, rng(), jitter=(2.0, 0, 0, 0)) / 0.25
    )  # uniform in [0, 3], not in [-1, 3]
    assert (factors == 0).sum() <= 1
    assert abs(factors.mean() - 1.5) < 0.1


def test_cutout_blackens_one_square_clipped_at_the_border():
    white = torch.ones(3000, 2, 8, 8)
    made = augment(white, rng(), cutout=0.5)
    assert ((made == 0) | (made == 1)).all()
    assert torch.equal(made[:, 0], made[:, 1])
    missing = made[:, 0] == 0
    rows, columns = missing.any(2).sum(1), missing.any(1).sum(1)
    assert torch.equal(missing.sum((1, 2)), rows * columns)  # a rectangle
    # A centre in 0..7 and a square from 2 before to 1 after it: cut to 2 and 3 pixels, whole, and
    # cut to 3 at the far side.
    for lengths in (rows, columns):
        share = lengths.bincount(minlength=5) / 3000
        torch.testing.assert_close(
            share, torch.tensor([0, 0, 1 / 8, 2 / 8, 5 / 8]), atol=0.03, rtol=0
        )


def test_cutout_at_known_places():
    boxes = torch.tensor([[1, 1, 3, 3], [-1, 3, 3, 3]])
    made = covered(torch.ones(2, 1, 5, 5), boxes, (0.0,))
    assert made[0, 0].tolist() == [
        [1] * 5,
        [1, 0, 0, 0, 1],
        [1, 0, 0, 0, 1],
        [1, 0, 0, 0, 1],
        [1] * 5,
    ]
    assert made[1, 0].tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 0, 0], [1] * 5, [1] * 5, [1] * 5]


def test_a_box_is_filled_with_a_colour_for_each_channel():
    made = covered(torch.ones(1, 3, 2, 3), torch.tensor([[0, 1, 1, 2]]), (0.2, 0.4, 0.6))
    assert made[0, :, 0].T.tolist()[0] == [1, 1, 1]
    torch.testing.assert_close(
        made[0, :, 0, 1:], torch.tensor([0.2, 0.4, 0.6])[:, None].repeat(1, 2)
    )
    assert (made[0, :, 1] == 1).all()


def first_form(images: Tensor, flip: bool, shift: int, generator: torch.Generator) -> Tensor:
    """Flip and shift, one image at a time, from the draws as they have always been made."""
    if flip:
        mirrored = torch.rand(len(images), 1, 1, 1, generator=generator).flatten() < 0.5
        images = torch.stack(
            [image.flip(2) if turn else image for image, turn in zip(images, mirrored, strict=True)]
        )
    if shift:
        offsets = torch.randint(2 * shift + 1, (2, len(images)), generator=generator).T.tolist()
        padded = nn.functional.pad(images, (shift,) * 4, mode="replicate")
        height, width = images.shape[2:]
        images = torch.stack(
            [p[:, y : y + height, x : x + width] for p, (y, x) in zip(padded, offsets, strict=True)]
        )
    return images


@pytest.mark.parametrize(("flip", "shift"), [(False, 0), (True, 0), (False, 3), (True, 2)])
def test_flip_and_shift_draw_what_they_always_drew(flip, shift):
    images = torch.rand(9, 3, 10, 14, generator=rng(1))
    ours, theirs = rng(5), rng(5)
    assert torch.equal(
        augment(images, ours, flip=flip, shift=shift), first_form(images, flip, shift, theirs)
    )
    assert torch.equal(ours.get_state(), theirs.get_state())  # neither drew more than the other


def test_nothing_is_drawn_for_disabled_augmentations(images):
    generator = rng(2)
    before = generator.get_state()
    assert augment(images, generator, **OFF) is images
    augment(
        images[:, :1], generator, jitter=(0, 0, 0.5, 0.5)
    )  # grey images have neither saturation nor hue
    assert torch.equal(generator.get_state(), before)


@pytest.mark.parametrize("name", list(ON))
def test_every_part_changes_images_and_each_in_its_own_way(name):
    image = torch.rand(1, 3, 16, 16, generator=rng(4)).expand(32, -1, -1, -1)
    made = augment(image, rng(), **{name: ON[name]})
    assert made.shape == image.shape
    kinds = len(torch.unique(made, dim=0))
    assert kinds == 2 if name == "flip" else kinds > 15


@pytest.mark.parametrize("channels", [1, 3])
def test_same_seed_same_images_within_bounds(channels):
    images = torch.rand(64, channels, 20, 20, generator=rng(6)).round(decimals=1)
    original = images.clone()
    strong = ON | {"jitter": (1.5, 1.5, 1.5, 0.5), "crop": 0.08}
    first, again, other = (augment(images, rng(seed), **strong) for seed in (8, 8, 9))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.min() >= 0
    assert first.max() <= 1
    assert torch.equal(images, original)  # the caller's images stay as they are
