"""LFW from a folder in its layout; the people in it are drawn."""

import logging
import re
from pathlib import Path

import pytest
import torch
from PIL import Image

from frostglass.auditing.config_file import read_config
from frostglass.auditing.experiment import experiments
from frostglass.core.errors import ConfigError, DataError
from frostglass.data._images import read_image
from frostglass.data.faces import photograph
from frostglass.data.lfw import Lfw
from frostglass.plan.problems import problems

PEOPLE = {"Ann_Lee": 5, "Bo_Ek": 4, "Cy_Oz": 4, "Di_Wu": 2, "Ed_Ng": 1}


def write(root: Path, people: dict[str, int]) -> Path:
    for number, (name, count) in enumerate(people.items()):
        pixels, _ = photograph(0, torch.full((count,), 600 + number), torch.arange(count), 100)
        (root / name).mkdir(parents=True)
        for shot, image in enumerate(pixels, 1):
            whole = Image.new("RGB", (250, 250), "white")  # an image of LFW is wider than the face
            whole.paste(
                Image.fromarray(image.permute(1, 2, 0).numpy()).resize((128, 128)), (61, 61)
            )
            whole.save(root / name / f"{name}_{shot:04}.jpg", quality=95)
    return root


@pytest.fixture
def lfw(tmp_path):
    return write(tmp_path / "lfw", PEOPLE)


def test_people_with_the_most_images_are_private_and_the_rest_public(lfw):
    data = Lfw(root=lfw, size=32, min_images=4)
    private, public = data.tables()
    assert private.names == ("Ann_Lee", "Bo_Ek", "Cy_Oz")
    assert private.labels.bincount().tolist() == [5, 4, 4]
    assert private.sources[0] == "Ann_Lee/Ann_Lee_0001.jpg"
    assert public.names == ("Di_Wu", "Ed_Ng")
    assert public.labels.tolist() == [0, 0, 1]
    assert data.counts() == (3, 13, 3)
    assert data.people() == ({"Ann_Lee": 5, "Bo_Ek": 4, "Cy_Oz": 4}, {"Di_Wu": 2, "Ed_Ng": 1})
    assert data.public_people() == [2, 1]
    assert data.most_of_one() == 5
    assert len(data.files()) == 16
    assert Lfw(root=lfw, size=32, identities=2, min_images=3).tables()[0].names == (
        "Ann_Lee",
        "Bo_Ek",
    )


def test_images_of_a_private_person_can_be_limited(lfw):
    private, public = Lfw(root=lfw, min_images=3, max_images=3).tables()
    assert private.labels.bincount().tolist() == [3, 3, 3]
    assert private.sources[2] == "Ann_Lee/Ann_Lee_0003.jpg"
    assert public.labels.bincount().tolist() == [2, 1]  # left-out images are nobody's


def test_the_face_is_in_the_middle(lfw):
    """The crop holds the drawn face, and nothing of the white around it."""
    file = lfw / "Ann_Lee" / "Ann_Lee_0001.jpg"
    data = Lfw(root=lfw, size=64, min_images=4)
    assert data.crop_mode() == "face"
    face = read_image(file, size=64, channels=3, crop="face").float()
    assert torch.equal(data.tables()[0].pixels[0].float(), face)
    drawn, _ = photograph(0, torch.tensor([600]), torch.tensor([0]), 64)
    assert (face - drawn[0]).abs().mean() < 6
    whole = Lfw(root=lfw, size=64, min_images=4, crop="centre").tables()[0].pixels[0]
    assert whole[:, :10].float().mean() > 250


def test_text_files_beside_the_people_are_skipped_with_a_warning(lfw, caplog):
    (lfw / "pairs_01.txt").write_text("1\n")
    with caplog.at_level(logging.WARNING):
        Lfw(root=lfw, min_images=4).tables()
    assert "skipped 1 files without an image suffix" in caplog.text


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"min_images": 6}, "expected 2 people with at least 6 images .* got 0: lower"),
        ({"min_images": 4, "identities": 4}, "expected 4 people with at least 4 images .* got 3"),
    ],
)
def test_too_few_people_with_enough_images(lfw, values, problem):
    with pytest.raises(DataError, match=problem):
        Lfw(root=lfw, **values).counts()


def test_public_people_are_needed(tmp_path):
    root = write(tmp_path / "lfw", {"Ann_Lee": 3, "Bo_Ek": 3})
    with pytest.raises(DataError, match=r"all 2 people in .* are private, and public ones are"):
        Lfw(root=root, min_images=3).counts()


def test_errors_say_how_to_lay_out_the_data(tmp_path, lfw):
    with pytest.raises(DataError, match=r"no folder at .*. LFW: 1. get .*; 2. unpack"):
        Lfw(root=tmp_path / "none").counts()
    nested = f"holds one folder, lfw: .*Set data.root to {re.escape(str(lfw))}"
    with pytest.raises(DataError, match=nested):
        Lfw(root=tmp_path).counts()
    with pytest.raises(DataError, match=r"holds loose images: expected LFW"):
        Lfw(root=lfw / "Ann_Lee").counts()
    with pytest.raises(ConfigError, match=r"max_images \(5\) must be at least min_images \(10\)"):
        Lfw(root=lfw, max_images=5)


def test_the_example_config_has_no_problems_where_the_images_are(tmp_path):
    people = {"Ann_Lee": 20, "Bo_Ek": 20, **{f"P_{n}": 3 for n in range(8)}}
    config = read_config(Path(__file__).parents[2] / "configs" / "lfw" / "defenses.toml")
    config["data"]["root"] = str(write(tmp_path / "lfw", people))
    config["data"]["size"] = 32
    assert problems(experiments(config)[:1]) == []
