"""Half of the people of a dataset."""

import pytest
import torch

from frostglass.core.errors import ConfigError, DataError
from frostglass.data import Faces, Half
from frostglass.data._splits import make_split
from frostglass.store.keys import digest, fingerprint, plain

FACES = {"name": "faces", "size": 16, "identities": 5, "images": 4, "public_identities": 6}
WHOLE = Faces(**{key: value for key, value in FACES.items() if key != "name"})
FIRST, SECOND = Half(of=FACES, which="first"), Half(of=FACES, which="second")


def test_the_halves_are_all_people_and_share_nobody():
    first, second = FIRST.tables()[0], SECOND.tables()[0]
    assert first.names + second.names == WHOLE.tables()[0].names
    assert (len(first.names), len(second.names)) == (2, 3)
    pixels = torch.cat([first.pixels[:], second.pixels[:]])
    assert torch.equal(pixels, WHOLE.tables()[0].pixels)


@pytest.mark.parametrize("half", [FIRST, SECOND])
def test_each_image_keeps_its_person(half):
    own, whole = half.tables()[0], WHOLE.tables()[0]
    of = dict(zip(whole.sources, (whole.names[label] for label in whole.labels), strict=True))
    assert [of[source] for source in own.sources] == [own.names[label] for label in own.labels]
    assert own.labels.unique().tolist() == list(range(len(own.names)))


@pytest.mark.parametrize("half", [FIRST, SECOND])
def test_counts_are_those_of_the_tables(half):
    private, public = half.tables()
    assert half.counts() == (len(private.names), len(private), len(public))
    assert half.image_shape == private.shape
    assert half.public_people() == WHOLE.public_people()


def test_public_images_are_all_there():
    assert torch.equal(FIRST.tables()[1].pixels, WHOLE.tables()[1].pixels)


def test_a_person_is_divided_as_in_the_whole():
    split, whole = make_split(SECOND, seed=0), make_split(WHOLE, seed=0)
    assert set(split.test.sources) <= set(whole.test.sources)
    assert set(split.train.sources) <= set(whole.train.sources)


def test_halves_have_keys_of_their_own():
    keys = {digest({"data": plain(each, "data", False)}) for each in (FIRST, SECOND, WHOLE)}
    assert len(keys) == 3


def test_known_people_and_files_are_those_of_the_dataset(tmp_path):
    from PIL import Image

    for side, people in {"private": "abcd", "public": "xy"}.items():
        for person in people:
            (tmp_path / side / person).mkdir(parents=True)
            for number in range(3 + (person == "d")):
                colour = (ord(person), 60 * number, 0)
                image = Image.new("RGB", (16, 16), colour)
                image.save(tmp_path / side / person / f"{number}.png")
    paths = {side: str(tmp_path / side) for side in ("private", "public")}
    half = Half(of={"name": "folder", "size": 16, **paths}, which="second")
    assert half.people()[0] == {"c": 3, "d": 4}
    assert half.counts()[:2] == (2, 7)
    assert half.tables()[0].names == ("c", "d")
    assert fingerprint(half) == fingerprint(half.whole)


@pytest.mark.parametrize("of", [{}, {"name": "half"}, {"size": 16}])
def test_a_dataset_that_is_none(of):
    with pytest.raises(
        ConfigError, match=r"of: expected a table with a name, one of .*digits, faces"
    ):
        Half(of=of)


def test_a_problem_of_the_dataset_is_named():
    with pytest.raises(ConfigError, match=r"of: .*size: expected at least 16, got 8"):
        Half(of={"name": "faces", "size": 8})
    with pytest.raises(ConfigError, match=r"no dataset named 'face'"):
        Half(of={"name": "face"})


def test_too_few_people_to_divide():
    with pytest.raises(DataError, match=r"half of 3 private people cannot be told apart"):
        Half(of=FACES | {"identities": 3}).tables()
