"""Datasets from folders of image files, and their attribute tables."""

import logging
import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from frostglass.core.errors import ConfigError, DataError
from frostglass.data._attributes import Attributes
from frostglass.data._splits import make_split
from frostglass.data.folder import Folder


def draw(path, number=0, size=(24, 24), mode="RGB"):
    path.parent.mkdir(parents=True, exist_ok=True)
    values = np.random.default_rng(number).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(values).convert(mode).save(path)


@pytest.fixture
def album(tmp_path):
    """Two private and one public person, with the clutter real folders have."""
    for number, name in enumerate(
        (
            "private/bea/2.png",
            "private/bea/1.JPG",
            "private/bea/3.png",
            "private/abe/x.bmp",
            "private/abe/deep/y.png",
        )
    ):
        draw(tmp_path / name, number, size=(20 + 3 * number, 30))
    draw(tmp_path / "public/Zoe/a.png", 10, mode="L")
    draw(tmp_path / "public/Zoe/b.gif", 11)
    return tmp_path


def folder(root, **values):
    return Folder(**{"private": root / "private", "public": root / "public", "size": 16, **values})


def test_folder_tables(album):
    private, public = folder(album).tables()
    assert private.names == ("abe", "bea")
    assert private.labels.tolist() == [0, 0, 1, 1, 1]
    assert private.sources == ("abe/deep/y.png", "abe/x.bmp", "bea/1.JPG", "bea/2.png", "bea/3.png")
    assert public.names == ("Zoe",)
    assert public.labels.tolist() == [0, 0]
    assert private.shape == public.shape == (3, 16, 16)
    again, _ = folder(album).tables()
    assert torch.equal(again.pixels[:], private.pixels[:])
    assert folder(album, channels=1).tables()[0].shape == (1, 16, 16)
    assert not torch.equal(folder(album, crop="none").tables()[0].pixels[:], private.pixels[:])


def test_hidden_and_other_files_are_skipped_and_counted(album, caplog):
    before, _ = folder(album).tables()
    assert not caplog.records
    for name in (
        "private/.DS_Store",
        "private/bea/.hidden.png",
        "private/.cache/a.png",
        "private/bea/.thumbs/a.png",
    ):
        (album / name).parent.mkdir(exist_ok=True)
        (album / name).write_text("clutter")
    for name in ("private/readme.txt", "private/bea/notes.txt", "private/bea/photo.heic"):
        (album / name).write_text("clutter")
    with caplog.at_level(logging.WARNING):
        after, _ = folder(album).tables()
    assert after.sources == before.sources
    (record,) = caplog.records
    assert "skipped 3 files without an image suffix" in record.getMessage()
    assert "photo.heic" in record.getMessage()


def test_flat_public_folder_has_no_identities(album):
    for number in range(3):
        draw(album / f"loose/{number}.png", number + 20)
    _, public = folder(album, public=album / "loose").tables()
    assert public.names == ()
    assert public.labels.tolist() == [-1, -1, -1]
    assert public.sources == ("0.png", "1.png", "2.png")


def test_flat_private_folder_is_refused(album):
    draw(album / "loose/0.png")
    with pytest.raises(
        DataError, match="loose images: private images need one sub-folder per identity"
    ):
        folder(album, private=album / "loose").tables()


@pytest.mark.parametrize("side", ["private", "public"])
def test_loose_images_beside_sub_folders_are_refused(album, side):
    draw(album / side / "stray.png")
    with pytest.raises(
        DataError,
        match=rf"{side} holds 1 loose images beside its sub-folders: .*stray\.png\. Move them",
    ):
        folder(album).tables()


def test_missing_folder(album):
    with pytest.raises(
        DataError,
        match=r"no folder at .*nowhere: expected one with a sub-folder per identity",
    ):
        folder(album, public=album / "nowhere").tables()
    (album / "file").touch()
    with pytest.raises(DataError, match=r"no folder at .*file: expected"):
        folder(album, private=album / "file").tables()


def test_folder_without_images(album):
    (album / "none" / "ann").mkdir(parents=True)
    with pytest.raises(
        DataError,
        match=r"no images in .*none \(0 other files\): expected files ending in \.bmp, ",
    ):
        folder(album, public=album / "none").tables()
    (album / "none" / "ann" / "a.heic").touch()
    with pytest.raises(DataError, match=r"no images in .*none \(1 other files\)"):
        folder(album, public=album / "none").tables()


def test_identity_without_images(album):
    (album / "public" / "Ann").mkdir()
    (album / "public" / "Ben").mkdir()
    with pytest.raises(
        DataError,
        match=r"2 sub-folders of .*public hold no images: Ann, Ben\. Fill or remove them",
    ):
        folder(album).tables()


def test_bad_files_of_both_sides_are_named_together(album):
    (album / "private" / "bea" / "2.png").write_text("corrupt")
    (album / "public" / "Zoe" / "empty.png").touch()
    with pytest.raises(
        DataError,
        match=r"^2 of 8 images cannot be used: .*2\.png \(not.*empty\.png \(empty, 0 bytes\)[^(]*$",
    ):
        make_split(folder(album), seed=0)


def test_broken_link_is_a_bad_file(album):
    (album / "public" / "Zoe" / "gone.png").symlink_to(album / "nowhere.png")
    with pytest.raises(DataError, match=r"gone\.png \(.*No such file"):
        folder(album).tables()[1].floats()


@pytest.mark.parametrize("place", ["public", "public/Zoe"])
def test_folder_that_cannot_be_listed(album, monkeypatch, place):
    scandir, listdir = os.scandir, os.listdir

    def guarded(original):
        def look(path):
            if Path(path) == album / place:
                raise PermissionError(13, "Permission denied", str(path))
            return original(path)

        return look

    monkeypatch.setattr(os, "scandir", guarded(scandir))
    monkeypatch.setattr(os, "listdir", guarded(listdir))
    with pytest.raises(
        DataError,
        match=rf"cannot list .*{place} \(Permission denied\): the folder of every identity must be",
    ):
        folder(album).tables()


def test_names_that_are_not_text_are_refused(album):
    place = bytes(album / "public") + b"/\xff\xfe"
    try:
        Path(place.decode(errors="surrogateescape")).mkdir()
    except OSError:
        pytest.skip("this file system takes UTF-8 names only")
    draw(Path(place.decode(errors="surrogateescape")) / "a.png")
    with pytest.raises(DataError, match=r"1 sub-folders of .*public have names that are not UTF-8"):
        folder(album).tables()


def test_bad_folder_parameters_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="channels: expected 1 or 3, got 2"):
        folder(tmp_path, channels=2)
    with pytest.raises(
        ConfigError, match=r"crop: expected .centre., .* share of the shorter side .* got 'center'"
    ):
        folder(tmp_path, crop="center")
    with pytest.raises(ConfigError, match="public: required, and not given"):
        Folder(private=tmp_path)


TABLE = "image,glasses,hat\n"


def test_folder_attributes_by_path_and_by_name(album):
    private, public = album / "private", album / "public"
    names = [
        source
        for table in Folder(private=private, public=public, size=16).tables()
        for source in table.sources
    ]
    (album / "table.csv").write_text(
        TABLE
        + "".join(f"{name},{place % 2},{int(place % 3 == 0)}\n" for place, name in enumerate(names))
    )
    ours, theirs = Folder(
        private=private, public=public, size=16, attributes=album / "table.csv"
    ).tables()
    assert ours.attribute_names == theirs.attribute_names == ("glasses", "hat")
    expected = {name: [place % 2 == 1, place % 3 == 0] for place, name in enumerate(names)}
    for table in (ours, theirs):
        assert table.attributes.tolist() == [expected[source] for source in table.sources]


def test_celebas_own_layout(tmp_path):
    (tmp_path / "list_attr_celeba.txt").write_text(
        "2\nEyeglasses Smiling\n000001.jpg  1 -1\n000002.jpg -1  1\n"
    )
    table = Attributes(tmp_path / "list_attr_celeba.txt")
    assert table.names == ("Eyeglasses", "Smiling")
    ours, theirs = table.of(["7/000002.jpg"], ["9/000001.jpg"])
    assert (ours.tolist(), theirs.tolist()) == ([[False, True]], [[True, False]])


AMBIGUOUS = "the line of 'x.png' could be about 2 images, {}. Name each by its path, such as {}"


@pytest.mark.parametrize(
    ("private", "public", "files", "path"),
    [
        (["a/x.png", "b/x.png"], ["c/y.png"], "a/x.png, b/x.png", "a/x.png"),
        (["a/x.png"], ["c/x.png"], "a/x.png, c/x.png", "a/x.png"),
        (
            ["a/x.png"],
            ["x.png"],
            "a/x.png, x.png",
            "a/x.png",
        ),  # loose: its name is its path
    ],
)
def test_a_bare_name_must_be_the_only_one_on_both_sides(tmp_path, private, public, files, path):
    (tmp_path / "table.csv").write_text(TABLE + "x.png,1,0\ny.png,0,1\n")
    with pytest.raises(DataError, match=re.escape(AMBIGUOUS.format(files, path))):
        Attributes(tmp_path / "table.csv").of(private, public)


def test_paths_distinguish_images_of_one_name(tmp_path):
    (tmp_path / "table.csv").write_text(TABLE + "x.png,1,0\na/x.png,0,1\n")
    ours, theirs = Attributes(tmp_path / "table.csv").of(["a/x.png"], ["x.png"])
    assert (ours.tolist(), theirs.tolist()) == ([[False, True]], [[True, False]])


def test_public_images_need_lines_all_or_none(album):
    lines = [
        f"{name},{place % 2},1\n" for place, name in enumerate(folder(album).tables()[0].sources)
    ]
    (album / "table.csv").write_text(TABLE + "".join(lines))
    ours, theirs = folder(album, attributes=album / "table.csv").tables()
    assert ours.attributes[:, 0].tolist() == [False, True, False, True, False]
    assert theirs.attributes is None
    assert (ours.attribute_names, theirs.attribute_names) == (("glasses", "hat"), ())
    (album / "table.csv").write_text(TABLE + "".join(lines) + "a.png,1,0\n")
    message = (
        "has no line for 1 of 2 public images: Zoe/b.gif. Add a line for each, or remove the lines "
        'of all public ones, which only target.start = "public" needs.'
    )
    with pytest.raises(DataError, match=re.escape(message)):
        folder(album, attributes=album / "table.csv").attribute_names()


def test_constant_attributes_are_found(album):
    lines = [
        f"{name},{place % 2},1\n" for place, name in enumerate(folder(album).tables()[0].sources)
    ]
    (album / "table.csv").write_text(TABLE + "".join(lines))
    assert folder(album, attributes=album / "table.csv").constant_attributes() == ("hat",)
    (album / "table.csv").write_text(TABLE + "".join(lines).replace(",1\n", ",0\n"))
    assert folder(album, attributes=album / "table.csv").constant_attributes() == ("hat",)
    assert folder(album).constant_attributes() == ()


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (TABLE, "holds no table"),
        ("image,hat,hat\na.png,1,0\n", "names each attribute once"),
        (
            TABLE + "a.png,1,2\n",
            "line 2: expected an image and 2 values of 1 or 0 .or -1., got '2'",
        ),
        (TABLE + "a.png,1,0\nb.png,1\n", "line 3: .* got 1 value. Correct that line"),
        (TABLE + "a.png\n", "line 2: .* got 0 values. Correct that line"),
        (
            TABLE + "other.png,1,0\n",
            "has no line for 1 of 1 private images: a.png. Add a line for each",
        ),
    ],
)
def test_tables_of_attributes_that_cannot_be_used(tmp_path, text, match):
    (tmp_path / "table.csv").write_text(text)
    with pytest.raises(DataError, match=match):
        Attributes(tmp_path / "table.csv").of(["a.png"], [])


def test_a_table_of_attributes_that_is_not_there(tmp_path):
    with pytest.raises(DataError, match="cannot read the attributes in"):
        Attributes(tmp_path / "table.csv")
