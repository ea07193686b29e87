"""The procedural people: deterministic, distinct, varied, and recognisable in every photo."""

import pytest
import torch

from frostglass.core.errors import ConfigError
from frostglass.data._looks import LOOKS
from frostglass.data._people import ATTRIBUTES, traits
from frostglass.data.faces import PUBLIC_START, Faces, photograph


def test_the_same_numbers_give_the_same_images_in_any_order_and_batch():
    who, shot = torch.tensor([3, 9, 3]), torch.tensor([0, 1, 2])
    pixels, marks = photograph(0, who, shot, 32)
    again, marks_again = photograph(0, who.flip(0), shot.flip(0), 32)
    assert torch.equal(pixels, again.flip(0))
    assert torch.equal(marks, marks_again.flip(0))
    assert not torch.equal(photograph(1, who, shot, 32)[0], pixels)


@pytest.mark.parametrize("size", [16, 32, 64, 128])
def test_any_size(size):
    pixels, _ = photograph(0, torch.arange(4), torch.zeros(4, dtype=torch.long), size)
    assert pixels.shape == (4, 3, size, size)
    assert pixels.float().std() > 20


def test_ten_thousand_people_are_distinct():
    """No two of 10,000 people share an image, nor all their traits."""
    who = torch.arange(10_000)
    pixels, _ = photograph(0, who, torch.zeros_like(who), 16)
    assert len(pixels.flatten(1).unique(dim=0)) == 10_000
    shape = torch.stack(
        [
            traits(0, who, LOOKS["same"])[name]
            for name in ("width", "height", "jaw", "eye_gap", "nose_width", "mouth_width")
        ],
        1,
    )
    assert len((shape * 1000).round().unique(dim=0)) == 10_000


def test_identity_traits_stay_and_moods_vary():
    who = torch.full((40,), 5)
    _, marks = photograph(0, who, torch.arange(40), 16)
    fixed = [
        ATTRIBUTES.index(name)
        for name in ("glasses", "beard", "bald", "long_hair", "dark_skin", "freckles")
    ]
    moving = [ATTRIBUTES.index(name) for name in ("smiling", "mouth_open")]
    assert (marks[:, fixed] == marks[0, fixed]).all()
    assert all(0 < marks[:, column].float().mean() < 1 for column in moving)


def test_every_attribute_varies_between_people():
    _, marks = photograph(0, torch.arange(2000), torch.zeros(2000, dtype=torch.long), 16)
    assert marks.shape == (2000, len(ATTRIBUTES))
    assert len(ATTRIBUTES) >= 12
    share = marks.float().mean(0)
    assert (share > 0.02).all(), dict(zip(ATTRIBUTES, share.tolist(), strict=True))
    assert (share < 0.8).all()


def test_attributes_show_in_the_image():
    """Sunglasses darken the eyes, blond hair brightens the crown, dark skin darkens the face."""
    pixels, marks = photograph(0, torch.arange(3000), torch.zeros(3000, dtype=torch.long), 32)
    grey = pixels.float().mean(1)

    def gap(name, rows, columns):
        has = marks[:, ATTRIBUTES.index(name)]
        patch = grey[:, rows, columns].mean((1, 2))
        return (patch[has].mean() - patch[~has].mean()).item()

    assert gap("sunglasses", slice(13, 18), slice(8, 24)) < -15
    assert gap("blond_hair", slice(5, 9), slice(11, 21)) > 15
    assert gap("dark_skin", slice(16, 24), slice(11, 21)) < -30


def test_private_and_public_people_never_overlap():
    private, public = Faces(identities=5, images=3, public_identities=7, public_images=1).tables()
    assert set(private.names).isdisjoint(public.names)
    assert private.names[0] == "person 0"
    assert public.names[0] == f"person {PUBLIC_START}"
    assert Faces(identities=5, images=3, public_identities=7).counts() == (5, 15, 14)


# Of the first photos of four private and four public people, before public people had a style.
MEANS = (113.19, 85.92, 138.5, 107.13, 123.69, 147.37, 170.5, 120.12)
SPREADS = (58.72, 48.8, 48.2, 33.78, 37.23, 47.14, 48.04, 45.6)


def test_by_default_public_people_are_drawn_as_private_ones_and_as_ever():
    people = {"identities": 4, "images": 3, "public_identities": 4, "public_images": 1}
    private, public = Faces(**people).tables()
    images = torch.cat([private.pixels[::3], public.pixels]).float().flatten(1)
    assert images.mean(1).tolist() == pytest.approx(MEANS, abs=0.02)
    assert images.std(1).tolist() == pytest.approx(SPREADS, abs=0.02)
    assert torch.equal(Faces(**people, public_style="same").tables()[1].pixels, public.pixels)


def test_another_style_changes_public_people_only():
    people = {"identities": 4, "images": 3, "public_identities": 1000, "public_images": 1}
    private, public = Faces(**people).tables()
    alike, other = Faces(**people, public_style="other").tables()
    assert torch.equal(alike.pixels, private.pixels)
    assert other.names == public.names
    assert set(other.sources).isdisjoint(public.sources)
    share, other_share = (table.attributes.float().mean(0) for table in (public, other))
    gap = dict(zip(ATTRIBUTES, (other_share - share).tolist(), strict=True))
    assert gap["blond_hair"] < -0.08
    assert gap["long_hair"] > 0.08
    assert gap["beard"] < -0.08
    # Warmer and darker towards the corners, and still faces: skin is in the middle.
    corner = other.pixels[..., :6, :6].float().mean((0, 2, 3))
    assert (corner < public.pixels[..., :6, :6].float().mean((0, 2, 3)) - 20).all()
    middle = other.pixels[..., 14:22, 12:20].float().mean((0, 2, 3))
    assert middle[0] > middle[1] > middle[2]


@pytest.mark.parametrize(
    "bad", [{"size": 8}, {"size": 256}, {"identities": 1}, {"images": 2}, {"public_style": "old"}]
)
def test_bad_parameters(bad):
    with pytest.raises(ConfigError, match=next(iter(bad))):
        Faces(**bad)
