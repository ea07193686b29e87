"""Augmentations: against torchvision one image at a time, and what each of them may and may not change."""

import math

import pytest
import torch
from torch import Tensor, nn
from torchvision.transforms.v2 import functional as tv

from frostglass.data._augment import (
    CROP_DRAWS,
    DRAWS,
    augment,
    brightened,
    contrasted,
    covered,
    cropped,
    grey,
    hue_turned,
    resized_crop,
    saturated,
    turned_crop,
    viewed,
)

OFF = {"flip": False, "shift": 0, "crop": 1.0, "jitter": (0, 0, 0, 0), "cutout": 0.0}
ON = {"flip": True, "shift": 2, "crop": 0.5, "jitter": (0.2, 0.2, 0.1, 0.1), "cutout": 0.5}


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def images() -> Tensor:
    """Noise, with the corners of the colour cube, grey pixels and two channels alike among it."""
    noise = torch.rand(6, 3, 12, 12, generator=rng(7))
    noise[:, :, 0, :8] = torch.cartesian_prod(*[torch.tensor([0.0, 1.0])] * 3).T
    noise[:, :, 1, :4] = torch.tensor([0.0, 0.25, 0.5, 1.0])
    noise[:, 1, 2] = noise[:, 2, 2]
    return noise


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
    # torchvision floors hues into six sectors; a colour on their border comes out the same from either side.
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
    """On boxes of whole pixels; on the rim of a box torchvision repeats the box's border where we see the pixel beside it."""
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
    """On a picture of its own coordinates a crop shows where it was taken from."""
    line = (torch.arange(32) + 0.5) / 32
    picture = torch.stack([line.expand(32, 32), line[:, None].expand(32, 32)])[None].expand(
        4000, -1, -1, -1
    )
    crops = augment(picture, rng(), crop=0.25)
    step = crops[..., 16, 17] - crops[..., 16, 16]
    side, down = (step[:, 0] * 32, (crops[:, 1, 17, 16] - crops[:, 1, 16, 16]) * 32)
    torch.testing.assert_close(side, down, atol=1e-3, rtol=0)
    area = side**2
    assert 0.25 - 1e-3 <= area.min() < 0.26
    assert 0.99 < area.max() <= 1 + 1e-3
    assert abs(area.mean() - 0.625) < 0.01
    middle = crops[:, :, 15:17, 15:17].mean((2, 3))  # of the crop, in shares of the picture
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
    # A centre in 0..7 and a square from 2 before to 1 after it: cut to 2 and 3 pixels, whole, and cut to 3 at the far side.
    for lengths in (rows, columns):
        share = lengths.bincount(minlength=5) / 3000
        torch.testing.assert_close(
            share, torch.tensor([0, 0, 1 / 8, 2 / 8, 5 / 8]), atol=0.03, rtol=0
        )


def test_cutout_at_known_places():
    made = covered(torch.ones(2, 1, 5, 5), torch.tensor([2, 0]), torch.tensor([2, 4]), 3)
    assert made[0, 0].tolist() == [
        [1] * 5,
        [1, 0, 0, 0, 1],
        [1, 0, 0, 0, 1],
        [1, 0, 0, 0, 1],
        [1] * 5,
    ]
    assert made[1, 0].tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 0, 0], [1] * 5, [1] * 5, [1] * 5]


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
    pictures = torch.rand(9, 3, 10, 14, generator=rng(1))
    ours, theirs = rng(5), rng(5)
    assert torch.equal(
        augment(pictures, ours, flip=flip, shift=shift), first_form(pictures, flip, shift, theirs)
    )
    assert torch.equal(ours.get_state(), theirs.get_state())  # neither drew more than the other


def test_nothing_is_drawn_for_what_is_off(images):
    generator = rng(2)
    before = generator.get_state()
    assert augment(images, generator, **OFF) is images
    augment(
        images[:, :1], generator, jitter=(0, 0, 0.5, 0.5)
    )  # grey images have neither saturation nor hue
    assert torch.equal(generator.get_state(), before)


@pytest.mark.parametrize("name", list(ON))
def test_every_part_changes_images_and_each_in_its_own_way(name):
    picture = torch.rand(1, 3, 16, 16, generator=rng(4)).expand(32, -1, -1, -1)
    made = augment(picture, rng(), **{name: ON[name]})
    assert made.shape == picture.shape
    kinds = len(torch.unique(made, dim=0))
    assert kinds == 2 if name == "flip" else kinds > 15


@pytest.mark.parametrize("channels", [1, 3])
def test_same_seed_same_images_within_bounds(channels):
    pictures = torch.rand(64, channels, 20, 20, generator=rng(6)).round(decimals=1)
    original = pictures.clone()
    strong = ON | {"jitter": (1.5, 1.5, 1.5, 0.5), "crop": 0.08}
    first, again, other = (augment(pictures, rng(seed), **strong) for seed in (8, 8, 9))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.min() >= 0
    assert first.max() <= 1
    assert torch.equal(pictures, original)  # the caller's images stay as they are


# The same pictures seen differently, from numbers that come from elsewhere

STILL = {"crop": (1.0, 1.0), "jitter": (0.0, 0.0), "flip": False, "rotation": 0.0}
AREA, ACROSS, DOWN, MIRROR, TURNED, ANGLE, COLOURED, BRIGHT, CONTRAST = range(DRAWS)


def draws(count: int = 1, **columns: float) -> Tensor:
    """Draws from the middle of their range, with some columns set."""
    made = torch.full((count, DRAWS), 0.5)
    for name, value in columns.items():
        made[:, globals()[name.upper()]] = value
    return made


def smooth(channels: int = 3, height: int = 24, width: int = 24) -> Tensor:
    """A picture without edges, so that resampling it twice is nearly resampling it once."""
    rows, columns = torch.arange(height)[:, None] / height, torch.arange(width) / width
    waves = [
        0.5 + 0.2 * (3 * rows + k).sin() + 0.2 * (4 * columns - k).cos() for k in range(channels)
    ]
    return torch.stack(waves)[None]


def test_nothing_changes_when_all_is_off(images):
    assert viewed(images, torch.rand(6, DRAWS, generator=rng()), **STILL) is images
    shares = {"jitter_share": 0.0, "rotation_share": 0.0, "crop": (1.0, 1.0), "flip": False}
    torch.testing.assert_close(
        viewed(images, torch.rand(6, DRAWS, generator=rng()), **shares), images, atol=1e-5, rtol=0
    )


def test_views_are_mirrored_below_a_half(images):
    seen = viewed(
        images, torch.cat([draws(3, mirror=0.499), draws(3, mirror=0.5)]), **STILL | {"flip": True}
    )
    torch.testing.assert_close(seen, torch.cat([images[:3].flip(3), images[3:]]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("draw", [0.0, 0.2, 0.5, 0.9, 0.999])
def test_views_turn_as_torchvision_does(draw):
    picture, angle = smooth(height=24, width=30), -40 + 80 * draw
    seen = viewed(picture, draws(turned=0.3, angle=draw), **STILL | {"rotation": 40.0})
    expected = tv.rotate(picture, angle, tv.InterpolationMode.BILINEAR, fill=-9.0)
    inside = (
        tv.rotate(torch.ones_like(picture), angle, tv.InterpolationMode.BILINEAR, fill=0.0) == 1
    )
    assert inside.float().mean() > 0.6
    torch.testing.assert_close(seen[inside], expected[inside], atol=1e-5, rtol=0)
    assert seen.min() >= picture.min() - 1e-6  # the border is repeated, not black
    assert torch.equal(viewed(picture, draws(turned=0.5, angle=draw), **STILL | {"rotation": 40.0})[0, 0, 3], viewed(picture, draws(), **STILL | {"rotation": 40.0})[0, 0, 3])  # fmt: skip


@pytest.mark.parametrize(
    ("area", "across", "down"),
    [(0.0, 0.0, 0.0), (0.5, 0.999999, 0.0), (0.25, 0.3, 0.8), (0.999999, 0.5, 0.5)],
)
def test_views_crop_where_the_draws_say(area, across, down):
    picture = smooth()
    seen = viewed(
        picture, draws(area=area, across=across, down=down), **STILL | {"crop": (0.25, 1.0)}
    )
    size = 24 * math.sqrt(0.25 + 0.75 * area)
    left, top = across * (24 - size), down * (24 - size)
    places = [(torch.arange(24) + 0.5) * size / 24 + start - 0.5 for start in (top, left)]
    slow = torch.empty_like(picture)
    for i, y in enumerate(places[0].clamp(0, 23).tolist()):
        for j, x in enumerate(places[1].clamp(0, 23).tolist()):
            y0, x0 = min(int(y), 22), min(int(x), 22)
            upper, lower = (
                picture[0, :, row, x0] * (1 - x + x0) + picture[0, :, row, x0 + 1] * (x - x0)
                for row in (y0, y0 + 1)
            )
            slow[0, :, i, j] = upper * (1 - y + y0) + lower * (y - y0)
    torch.testing.assert_close(seen, slow, atol=2e-5, rtol=0)


def test_one_sampling_is_crop_then_mirror_then_turn():
    picture, side, angle = smooth(height=48, width=40), torch.tensor([0.8]), torch.tensor([0.3])
    centre = torch.tensor([[0.15], [-0.1]])
    at_once = turned_crop(picture, side, centre, angle, torch.tensor([True]))
    in_turn = tv.rotate(
        resized_crop(picture, side, centre).flip(3),
        math.degrees(0.3),
        tv.InterpolationMode.BILINEAR,
    )
    inside = (
        tv.rotate(torch.ones_like(picture), math.degrees(0.3), tv.InterpolationMode.BILINEAR) == 1
    )
    torch.testing.assert_close(at_once[inside], in_turn[inside], atol=2e-3, rtol=0)
    assert (at_once - turned_crop(picture, side, centre, -angle, torch.tensor([True])))[
        inside
    ].abs().max() > 0.05


def test_views_recolour_as_torchvision_does(images):
    given = torch.cat(
        [
            draws(3, coloured=0.4, bright=0.9, contrast=0.1),
            draws(3, coloured=0.5, bright=0.9, contrast=0.1),
        ]
    )
    seen = viewed(images, given, **STILL | {"jitter": (0.2, 0.3)}, jitter_share=0.5)
    expected = tv.adjust_contrast(
        tv.adjust_brightness(images[:3], 0.8 + 0.4 * 0.9), 0.7 + 0.6 * 0.1
    )
    torch.testing.assert_close(seen[:3], expected, atol=5e-6, rtol=0)
    assert torch.equal(seen[3:], images[3:])  # not in the share
    always = viewed(images, given, **STILL | {"jitter": (0.2, 0.3)})
    assert (always[3:] - images[3:]).abs().max() > 0.1


def test_views_have_gradients():
    pictures = (
        0.35 + 0.25 * torch.rand(2, 3, 6, 5, generator=rng(3), dtype=torch.double)
    ).requires_grad_()
    given = torch.rand(2, DRAWS, generator=rng(4))
    given[:, [TURNED, MIRROR]] = torch.tensor([[0.1, 0.9], [0.2, 0.1]])
    assert torch.autograd.gradcheck(lambda x: viewed(x, given, rotation=20.0), pictures)
    seen = viewed(pictures, given, rotation=20.0)
    assert seen.dtype == torch.double


def test_a_view_depends_on_its_own_row_only():
    pictures, given = (
        torch.rand(32, 3, 16, 16, generator=rng()),
        torch.rand(32, DRAWS, generator=rng(1)),
    )
    original = pictures.clone()
    seen = viewed(pictures, given)
    order = torch.randperm(32, generator=rng(2))
    assert torch.equal(viewed(pictures[order], given[order]), seen[order])
    assert torch.equal(viewed(pictures[order[:16]], given[order[:16]]), seen[order[:16]])
    assert torch.equal(pictures, original)
    assert (seen - pictures).abs().amax((1, 2, 3)).min() > 0.05  # every row was changed
    assert seen.min() >= 0
    assert seen.max() <= 1


@pytest.mark.parametrize("name", ["crop", "jitter", "flip", "rotation"])
def test_each_kind_of_view_uses_columns_of_its_own(name):
    uses = {
        "crop": {AREA, ACROSS, DOWN},
        "jitter": {COLOURED, BRIGHT, CONTRAST},
        "flip": {MIRROR},
        "rotation": {TURNED, ANGLE},
    }
    picture = torch.rand(1, 3, 16, 16, generator=rng(4))
    on = {"crop": (0.5, 1.0), "jitter": (0.2, 0.2), "flip": True, "rotation": 10.0}
    setting = STILL | {name: on[name]} | ({"jitter_share": 0.5} if name == "jitter" else {})
    base = draws(coloured=0.1, bright=0.3, contrast=0.3, turned=0.1, angle=0.9, mirror=0.9)
    changes = set()
    for column in range(DRAWS):
        other = base.clone()
        other[:, column] = 1 - base[:, column] if column not in (AREA, ACROSS, DOWN) else 0.1
        if (
            viewed(picture, other, **setting) - viewed(picture, base, **setting)
        ).abs().max() > 1e-3:
            changes.add(column)
    assert changes == uses[name]


def test_cropped_against_a_slow_reference():
    """Bilinear reading of a part of given width, height and middle, mirrored where the last draw says so."""
    images = torch.rand(3, 2, 6, 8, generator=rng()).double() * 3 - 1
    numbers = torch.rand(3, CROP_DRAWS, generator=rng()).double()
    numbers[:, 4] = torch.tensor([0.2, 0.6, 0.4])
    seen = cropped(images, numbers, area=(0.3, 0.8), ratio=(0.8, 1.25), mirror=0.5)
    for n in range(3):
        share, stretch, across, down, mirrored = numbers[n].tolist()
        area, ratio = 0.3 + 0.5 * share, math.exp(math.log(0.8) + stretch * math.log(1.25 / 0.8))
        wide, high = min(1.0, math.sqrt(area * ratio)), min(1.0, math.sqrt(area / ratio))
        for row in range(6):
            for column in range(8):
                x, y = (2 * column + 1) / 8 - 1, (2 * row + 1) / 6 - 1
                x = (2 * across - 1) * (1 - wide) + (-wide if mirrored < 0.5 else wide) * x
                y = (2 * down - 1) * (1 - high) + high * y
                x, y = min(max((x + 1) * 4 - 0.5, 0), 7), min(max((y + 1) * 3 - 0.5, 0), 5)
                left, top = min(int(x), 6), min(int(y), 4)
                right_part, lower = x - left, y - top
                corners = images[n, :, top : top + 2, left : left + 2]
                expected = (
                    corners
                    * torch.tensor(
                        [
                            [(1 - lower) * (1 - right_part), (1 - lower) * right_part],
                            [lower * (1 - right_part), lower * right_part],
                        ]
                    )
                ).sum((1, 2))
                assert torch.allclose(seen[n, :, row, column], expected, atol=1e-9)


def test_cropped_leaves_values_and_whole_pictures_alone():
    images = torch.rand(3, 2, 6, 8, generator=rng()) * 3 - 1
    torch.testing.assert_close(
        cropped(images, torch.rand(3, CROP_DRAWS, generator=rng()), area=(1.0, 1.0)),
        images,
        atol=1e-5,
        rtol=0,
    )
