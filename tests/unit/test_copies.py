"""Near copies of private images among public ones: what is found, and that nothing else is."""

import pytest
import torch

from frostglass.data import _duplicates, _neighbours
from frostglass.data._duplicates import Pair, near_copies, similar_pairs
from frostglass.data._neighbours import Neighbours, descriptors
from frostglass.data.digits import Digits
from frostglass.data.faces import PUBLIC_START, photograph
from image_copies import copies

COUNT = 100


def people(first, count, size=32, photo=0):
    numbers = torch.arange(first, first + count)
    return photograph(0, numbers, torch.full_like(numbers, photo), size)[0]


OURS = people(0, COUNT)
OTHERS = people(PUBLIC_START, 400)


def found(private, made, others):
    """Return how many copies are found, and how many images are taken for a copy of another."""
    pairs = near_copies(private, torch.cat([others, made]))
    right = sum(match == row + len(others) for row, match in pairs)
    return right, len(pairs) - right


@pytest.mark.parametrize(
    ("kind", "least"),
    [
        ("mirrored", 99),
        ("cropped by 5 %", 97),
        ("cropped by 10 %", 75),
        ("grey", 99),
        ("brightness x 1.3", 96),
        ("brightness x 0.75", 99),
        ("JPEG of quality 75", 96),
        ("resized to half and back", 95),
        ("resized to 4 x, JPEG, and back", 97),
        ("rotated by 3 degrees", 97),
        ("shifted by 2 pixels", 40),
        ("mirrored and cropped by 5 %", 97),
        ("mirrored, cropped by 5 %, brighter, grey, JPEG", 85),
    ],
)
def test_recall_of_each_kind_of_copy(kind, least):
    right, wrong = found(OURS, copies(OURS, kind), OTHERS)
    assert right >= least
    assert wrong == 0


@pytest.mark.parametrize("kind", ["mirrored", "cropped by 5 %", "brightness x 1.3"])
@pytest.mark.parametrize(
    ("channels", "size", "least"), [(1, 32, 27), (3, 16, 27), (1, 16, 26), (3, 64, 28)]
)
def test_grey_images_and_other_sizes(kind, channels, size, least):
    ours, others = people(0, 30, size), people(PUBLIC_START, 50, size)
    if channels == 1:
        ours, others = (images.float().mean(1, keepdim=True).byte() for images in (ours, others))
    right, wrong = found(ours, copies(ours, kind), others)
    assert right >= least
    assert wrong == 0


def test_the_copy_may_be_the_private_image():
    right, wrong = found(copies(OURS, "cropped by 5 %"), OURS, OTHERS)
    assert right >= 96
    assert wrong == 0


def test_different_people_and_different_photos_are_no_copies():
    assert near_copies(OURS, OTHERS) == []
    assert near_copies(OURS, people(0, COUNT, photo=1)) == []


def test_different_digits_are_no_copies():
    private, public = Digits(size=16).tables()
    assert near_copies(private.pixels[::8], public.pixels) == []


def scene(count, size, seed):
    """Face-like images: a shaded ground, an oval, two eyes and a mouth, placed at random."""
    generator = torch.Generator().manual_seed(seed)

    def some(low, high):
        return torch.empty(count, 1, 1).uniform_(low, high, generator=generator)

    y, x = torch.meshgrid(torch.linspace(-1, 1, size), torch.linspace(-1, 1, size), indexing="ij")
    image = some(60, 180) + some(-50, 50) * x + some(-50, 50) * y
    for left, top, width, height in (
        (0, 0, 0.6, 0.8),
        (-0.25, -0.2, 0.12, 0.08),
        (0.25, -0.2, 0.12, 0.08),
        (0, 0.4, 0.3, 0.08),
    ):
        distance = ((x - left - some(-0.1, 0.1)) / (width * some(0.7, 1.3))) ** 2 + (
            (y - top - some(-0.1, 0.1)) / (height * some(0.7, 1.3))
        ) ** 2
        image = image + some(-90, 90) * torch.sigmoid(8 * (1 - distance))
    return image.clamp(0, 255).round().byte()[:, None]


def test_simple_shapes_that_look_alike_are_no_copies():
    pairs = list(similar_pairs(scene(250, 32, seed=2), scene(250, 32, seed=3)))
    assert max(pair.structure for pair in pairs) > 0.85  # similar enough to be a test at all
    assert not any(pair.copied for pair in pairs)


def test_images_without_content_match_nothing():
    ramp = torch.arange(0, 128, 4).byte().expand(3, 32, 32)
    plain = torch.stack(
        [
            torch.zeros(3, 32, 32, dtype=torch.uint8),
            torch.full((3, 32, 32), 255, dtype=torch.uint8),
            torch.full((3, 32, 32), 128, dtype=torch.uint8),
            ramp,
            ramp.mT,
            torch.randint(126, 130, (3, 32, 32), generator=torch.Generator().manual_seed(0)).byte(),
        ]
    )
    assert (descriptors(plain[:3]) == 0).all()
    assert near_copies(plain, torch.cat([OTHERS[:20], plain.roll(1, 0) + 1])) == []
    assert near_copies(OURS, plain) == []
    assert near_copies(plain, OURS) == []


@pytest.mark.parametrize(
    ("structure", "colour", "copied"),
    [(0.96, 0.9, True), (0.96, 0.8, False), (0.94, 0.99, False), (0.96, None, False), (1, None, 1)],
)
def test_where_an_image_is_grey_structure_must_be_closer(structure, colour, copied):
    assert Pair(0, 0, structure, colour).copied == copied


def test_any_chunk_size_gives_the_same(monkeypatch):
    made = torch.cat([OTHERS, copies(OURS, "cropped by 5 %")])
    expected = near_copies(OURS, made)
    monkeypatch.setattr(_duplicates, "PAIRS_AT_ONCE", 7)
    monkeypatch.setattr(_neighbours, "VALUES_AT_ONCE", 50_000)
    monkeypatch.setattr(_neighbours, "QUERIES_AT_ONCE", 13)
    assert near_copies(OURS, made) == expected


def test_large_images_are_read_in_chunks():
    big = people(0, 3, 128)
    assert near_copies(big, copies(big, "mirrored")) == [(0, 0), (1, 1), (2, 2)]


def test_one_public_image():
    assert near_copies(OURS[:5], OURS[3:4].flip(-1)) == [(3, 0)]


# the index


def test_cells_find_what_a_full_search_finds(monkeypatch):
    made = torch.cat([OTHERS, copies(OURS, "cropped by 5 %")])
    points, queries = descriptors(made), descriptors(OURS)
    values, rows = Neighbours(points).nearest(queries, 2)
    full = (queries @ points.T).topk(2)
    assert torch.equal(rows, full.indices)
    monkeypatch.setattr(_neighbours, "EXACT", 100)
    index = Neighbours(points)
    some_values, some_rows = index.nearest(queries, 2)
    assert len(index.cells) == 22
    assert sorted(torch.cat(index.cells).tolist()) == list(range(500))
    assert (some_rows[:, 0] == rows[:, 0]).float().mean() >= 0.95
    assert (some_values[:, 0] <= values[:, 0] + 1e-5).all()
    assert torch.equal(Neighbours(points).nearest(queries, 2)[1], some_rows)


def test_copies_are_found_through_cells(monkeypatch):
    monkeypatch.setattr(_neighbours, "EXACT", 100)
    right, wrong = found(OURS, copies(OURS, "mirrored and cropped by 5 %"), OTHERS)
    assert right >= 96
    assert wrong == 0


def test_cells_of_equal_points(monkeypatch):
    """Most cells are empty then."""
    monkeypatch.setattr(_neighbours, "EXACT", 10)
    points = torch.eye(4).repeat(16, 1)
    values, rows = Neighbours(points).nearest(torch.eye(4), 3)
    assert torch.allclose(values, torch.ones(4, 3))
    assert (rows % 4 == torch.arange(4)[:, None]).all()
