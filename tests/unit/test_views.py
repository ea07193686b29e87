"""Differentiable views and crops of images, from given draws."""

import math

import pytest
import torch
from torch import Tensor
from torchvision.transforms.v2 import functional as tv

from frostglass.data._augment import CROP_DRAWS, DRAWS, cropped, resized_crop, turned_crop, viewed
from worlds import colour_images, rng

images = pytest.fixture(colour_images)
STILL = {"crop": (1.0, 1.0), "jitter": (0.0, 0.0), "flip": False, "rotation": 0.0}
AREA, ACROSS, DOWN, MIRROR, TURNED, ANGLE, COLOURED, BRIGHT, CONTRAST = range(DRAWS)


def draws(count: int = 1, **columns: float) -> Tensor:
    """Draws from the middle of their range, with some columns set."""
    made = torch.full((count, DRAWS), 0.5)
    for name, value in columns.items():
        made[:, globals()[name.upper()]] = value
    return made


def smooth(channels: int = 3, height: int = 24, width: int = 24) -> Tensor:
    """An image without edges, so that resampling it twice is nearly resampling it once."""
    rows, columns = torch.arange(height)[:, None] / height, torch.arange(width) / width
    waves = [
        0.5 + 0.2 * (3 * rows + k).sin() + 0.2 * (4 * columns - k).cos() for k in range(channels)
    ]
    return torch.stack(waves)[None]


def test_nothing_changes_when_all_is_disabled(images):
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
    image, angle = smooth(height=24, width=30), -40 + 80 * draw
    seen = viewed(image, draws(turned=0.3, angle=draw), **STILL | {"rotation": 40.0})
    expected = tv.rotate(image, angle, tv.InterpolationMode.BILINEAR, fill=-9.0)
    inside = tv.rotate(torch.ones_like(image), angle, tv.InterpolationMode.BILINEAR, fill=0.0) == 1
    assert inside.float().mean() > 0.6
    torch.testing.assert_close(seen[inside], expected[inside], atol=1e-5, rtol=0)
    assert seen.min() >= image.min() - 1e-6  # the border is repeated, not black
    setting = STILL | {"rotation": 40.0}
    unturned = viewed(image, draws(turned=0.5, angle=draw), **setting)
    assert torch.equal(unturned[0, 0, 3], viewed(image, draws(), **setting)[0, 0, 3])


@pytest.mark.parametrize(
    ("area", "across", "down"),
    [(0.0, 0.0, 0.0), (0.5, 0.999999, 0.0), (0.25, 0.3, 0.8), (0.999999, 0.5, 0.5)],
)
def test_views_crop_where_the_draws_say(area, across, down):
    image = smooth()
    seen = viewed(
        image, draws(area=area, across=across, down=down), **STILL | {"crop": (0.25, 1.0)}
    )
    size = 24 * math.sqrt(0.25 + 0.75 * area)
    left, top = across * (24 - size), down * (24 - size)
    places = [(torch.arange(24) + 0.5) * size / 24 + start - 0.5 for start in (top, left)]
    slow = torch.empty_like(image)
    for i, y in enumerate(places[0].clamp(0, 23).tolist()):
        for j, x in enumerate(places[1].clamp(0, 23).tolist()):
            y0, x0 = min(int(y), 22), min(int(x), 22)
            upper, lower = (
                image[0, :, row, x0] * (1 - x + x0) + image[0, :, row, x0 + 1] * (x - x0)
                for row in (y0, y0 + 1)
            )
            slow[0, :, i, j] = upper * (1 - y + y0) + lower * (y - y0)
    torch.testing.assert_close(seen, slow, atol=2e-5, rtol=0)


def test_one_sampling_is_crop_then_mirror_then_turn():
    image, side, angle = smooth(height=48, width=40), torch.tensor([0.8]), torch.tensor([0.3])
    centre = torch.tensor([[0.15], [-0.1]])
    at_once = turned_crop(image, side, centre, angle, torch.tensor([True]))
    in_turn = tv.rotate(
        resized_crop(image, side, centre).flip(3),
        math.degrees(0.3),
        tv.InterpolationMode.BILINEAR,
    )
    inside = (
        tv.rotate(torch.ones_like(image), math.degrees(0.3), tv.InterpolationMode.BILINEAR) == 1
    )
    torch.testing.assert_close(at_once[inside], in_turn[inside], atol=2e-3, rtol=0)
    assert (at_once - turned_crop(image, side, centre, -angle, torch.tensor([True])))[
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
    images = (
        0.35 + 0.25 * torch.rand(2, 3, 6, 5, generator=rng(3), dtype=torch.double)
    ).requires_grad_()
    given = torch.rand(2, DRAWS, generator=rng(4))
    given[:, [TURNED, MIRROR]] = torch.tensor([[0.1, 0.9], [0.2, 0.1]])
    assert torch.autograd.gradcheck(lambda x: viewed(x, given, rotation=20.0), images)
    seen = viewed(images, given, rotation=20.0)
    assert seen.dtype == torch.double


def test_a_view_depends_on_its_own_row_only():
    images, given = (
        torch.rand(32, 3, 16, 16, generator=rng()),
        torch.rand(32, DRAWS, generator=rng(1)),
    )
    original = images.clone()
    seen = viewed(images, given)
    order = torch.randperm(32, generator=rng(2))
    assert torch.equal(viewed(images[order], given[order]), seen[order])
    assert torch.equal(viewed(images[order[:16]], given[order[:16]]), seen[order[:16]])
    assert torch.equal(images, original)
    assert (seen - images).abs().amax((1, 2, 3)).min() > 0.05  # every row was changed
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
    image = torch.rand(1, 3, 16, 16, generator=rng(4))
    on = {"crop": (0.5, 1.0), "jitter": (0.2, 0.2), "flip": True, "rotation": 10.0}
    setting = STILL | {name: on[name]} | ({"jitter_share": 0.5} if name == "jitter" else {})
    base = draws(coloured=0.1, bright=0.3, contrast=0.3, turned=0.1, angle=0.9, mirror=0.9)
    changes = set()
    for column in range(DRAWS):
        other = base.clone()
        other[:, column] = 1 - base[:, column] if column not in (AREA, ACROSS, DOWN) else 0.1
        if (viewed(image, other, **setting) - viewed(image, base, **setting)).abs().max() > 1e-3:
            changes.add(column)
    assert changes == uses[name]


def test_cropped_against_a_slow_reference():
    """Bilinear sampling of a part of given width, height and centre, mirrored by the last draw."""
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


def test_cropped_leaves_values_and_whole_images_alone():
    images = torch.rand(3, 2, 6, 8, generator=rng()) * 3 - 1
    torch.testing.assert_close(
        cropped(images, torch.rand(3, CROP_DRAWS, generator=rng()), area=(1.0, 1.0)),
        images,
        atol=1e-5,
        rtol=0,
    )
