import gzip
import logging
import os
import re
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from frostglass.core.errors import ConfigError, DataError
from frostglass.data._attributes import Attributes
from frostglass.data.base import datasets
from frostglass.data.digits import Digits
from frostglass.data.folder import Folder
from frostglass.data.mnist import Mnist, read_idx

MNIST = Path(__file__).parents[3] / "shared" / "data" / "mnist"


def test_datasets_are_found_by_file_name():
    assert {"digits", "mnist", "folder"} <= set(datasets.names())
    assert datasets.get("digits") is Digits
    assert Folder.name == "folder"
    assert not {"base", "images", "splits"} & set(datasets.names())


# digits


def test_digits_tables():
    private, public = Digits().tables()
    assert private.shape == public.shape == (1, 32, 32)
    assert len(private) + len(public) == 1797
    assert private.names == ("digit 0", "digit 1", "digit 2", "digit 3", "digit 4")
    assert public.names == ("digit 5", "digit 6", "digit 7", "digit 8", "digit 9")
    assert torch.bincount(private.labels).tolist() == [178, 182, 177, 183, 181]
    assert private.pixels.min() == 0
    assert private.pixels.max() > 250
    assert len(set(private.sources) | set(public.sources)) == 1797
    again, _ = Digits().tables()
    assert torch.equal(again.pixels, private.pixels)


def test_digits_follow_the_order_and_size_asked_for():
    private, public = Digits(size=16, private_classes=[7, 2], public_classes=[0]).tables()
    assert private.names == ("digit 7", "digit 2")
    assert public.names == ("digit 0",)
    assert private.shape == (1, 16, 16)
    zero = public.pixels.float().mean(0)[0]
    assert zero[8, 8] < 60 < zero[8, 4]  # a hole in the middle, ink beside it


@pytest.mark.parametrize(
    "make", [Digits, lambda **values: Mnist(root="anywhere", **values)], ids=["digits", "mnist"]
)
def test_bad_classes_are_refused(make):
    with pytest.raises(
        ConfigError,
        match=r"3, 4 in both private_classes and public_classes: an identity is either private or public",
    ):
        make(private_classes=(2, 3, 4), public_classes=(4, 3))
    with pytest.raises(ConfigError, match=r"2 given twice in private_classes"):
        make(private_classes=(2, 2, 3))
    with pytest.raises(ConfigError, match=r"private_classes\.1: expected at most 9, got 10"):
        make(private_classes=(0, 10))
    with pytest.raises(ConfigError, match=r"public_classes\.0: expected at least 0, got -1"):
        make(public_classes=(-1,))
    with pytest.raises(ConfigError, match=r"public_classes: .* at least 1 item"):
        make(public_classes=())
    with pytest.raises(ConfigError, match=r"size: expected at least 16, got 8"):
        make(size=8)


# mnist


def idx(values: np.ndarray) -> bytes:
    return (
        bytes([0, 0, 8, values.ndim])
        + struct.pack(f">{values.ndim}I", *values.shape)
        + values.astype(np.uint8).tobytes()
    )


def write_mnist(folder, count=60, pack=False):
    folder.mkdir(parents=True, exist_ok=True)
    labels = np.arange(count) % 10
    pictures = np.random.default_rng(0).integers(0, 256, (count, 28, 28))
    pictures[:, 0, 0] = labels
    for name, values in (
        ("train-images-idx3-ubyte", pictures),
        ("train-labels-idx1-ubyte", labels),
    ):
        data = idx(values)
        (folder / (name + ".gz" * pack)).write_bytes(gzip.compress(data) if pack else data)
    return pictures


@pytest.mark.parametrize("pack", [False, True], ids=["plain", "gzip"])
@pytest.mark.parametrize("layout", [".", "MNIST/raw"])
def test_mnist_layouts(tmp_path, layout, pack):
    pictures = write_mnist(tmp_path / layout, pack=pack)
    private, public = Mnist(root=tmp_path, size=28).tables()
    assert private.names[3] == "digit 3"
    assert public.names[3] == "digit 8"
    assert private.labels.tolist() == [label for label in range(5) for _ in range(6)]
    assert public.pixels[:, 0, 0, 0].tolist() == [digit for digit in range(5, 10) for _ in range(6)]
    assert private.sources[1] == "mnist train 10"
    assert torch.equal(private.pixels[1, 0].int(), torch.from_numpy(pictures[10]).int())


def test_mnist_limit_and_size(tmp_path):
    write_mnist(tmp_path)
    private, public = Mnist(
        root=tmp_path, size=20, images_per_class=4, public_classes=(9,)
    ).tables()
    assert private.shape == (1, 20, 20)
    assert torch.bincount(private.labels).tolist() == [4] * 5
    assert public.sources == ("mnist train 9", "mnist train 19", "mnist train 29", "mnist train 39")
    with pytest.raises(ConfigError, match=r"images_per_class: expected at least 3, got 2"):
        Mnist(root=tmp_path, images_per_class=2)


def test_missing_mnist_file(tmp_path):
    with pytest.raises(
        DataError,
        match=r"no train-images-idx3-ubyte or train-images-idx3-ubyte\.gz in .*: put MNIST's files there or correct root",
    ):
        Mnist(root=tmp_path).tables()
    write_mnist(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte").unlink()
    with pytest.raises(DataError, match="no train-labels-idx1-ubyte or"):
        Mnist(root=tmp_path).tables()


def test_mnist_files_that_do_not_belong_together(tmp_path):
    write_mnist(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(np.zeros(59)))
    with pytest.raises(
        DataError, match="60 MNIST pictures and 59 labels: the two files do not belong together"
    ):
        Mnist(root=tmp_path).tables()
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(np.full(60, 10)))
    with pytest.raises(DataError, match="MNIST label 10: expected 0 to 9"):
        Mnist(root=tmp_path).tables()


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data[:-1],
        lambda data: data + b"x",
        lambda data: data[:10],
        lambda data: data[:4],
    ],
)
def test_idx_of_the_wrong_length(tmp_path, change):
    (tmp_path / "a").write_bytes(change(idx(np.ones((4, 5, 6)))))
    with pytest.raises(
        DataError, match=r"bytes, which its dimensions .* do not account for: fetch it again"
    ):
        read_idx(tmp_path / "a", dims=3)


def test_idx_that_holds_nothing(tmp_path):
    (tmp_path / "a").write_bytes(idx(np.ones((0, 5, 6))))
    with pytest.raises(DataError, match="do not account for"):
        read_idx(tmp_path / "a", dims=3)


@pytest.mark.parametrize(
    ("data", "start"),
    [
        (b"", "nothing"),
        (b"\x00\x00\x0d\x03" + bytes(20), "00000d03"),
        (idx(np.ones(4)), "00000801"),
        (b"<html>", "3c68746d"),
    ],
    ids=["empty", "floats", "one dimension", "web page"],
)
def test_idx_with_the_wrong_magic(tmp_path, data, start):
    (tmp_path / "a").write_bytes(data)
    with pytest.raises(
        DataError, match=rf"starts with {start}, expected 00000803 \(idx, bytes, 3 dimensions\)"
    ):
        read_idx(tmp_path / "a", dims=3)


def test_idx_with_a_broken_archive(tmp_path):
    packed = gzip.compress(idx(np.random.default_rng(0).integers(0, 256, (4, 28, 28))))
    for data in (
        packed[: len(packed) // 2],
        b"not gzip",
        packed[:-20] + bytes(20),
        packed[:10] + b"\xff" * 40,
    ):
        (tmp_path / "a.gz").write_bytes(data)
        with pytest.raises(DataError, match=r"a\.gz cannot be read \(.*\): fetch it again"):
            read_idx(tmp_path / "a.gz", dims=3)


def test_idx_is_read_exactly(tmp_path):
    values = np.arange(120).reshape(4, 5, 6)
    (tmp_path / "a").write_bytes(idx(values))
    assert torch.equal(read_idx(tmp_path / "a", dims=3).int(), torch.from_numpy(values).int())


@pytest.mark.slow
@pytest.mark.skipif(
    not MNIST.is_dir(), reason="MNIST's files are not at ../shared/data/mnist beside the repository"
)
def test_the_published_mnist_files():
    private, public = Mnist(root=MNIST).tables()
    assert torch.bincount(private.labels).tolist() == [5923, 6742, 5958, 6131, 5842]
    assert torch.bincount(public.labels).tolist() == [5421, 5918, 6265, 5851, 5949]
    assert private.shape == (1, 32, 32)


# folder


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
    assert torch.equal(again.pixels, private.pixels)
    assert folder(album, channels=1).tables()[0].shape == (1, 16, 16)
    assert not torch.equal(folder(album, crop="none").tables()[0].pixels, private.pixels)


def test_hidden_and_other_files_are_passed_over_and_counted(album, caplog):
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
    assert "passed over 3 files without an image suffix" in record.getMessage()
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
        DataError, match="loose pictures: private pictures need one sub-folder per identity"
    ):
        folder(album, private=album / "loose").tables()


@pytest.mark.parametrize("side", ["private", "public"])
def test_loose_pictures_beside_sub_folders_are_refused(album, side):
    draw(album / side / "stray.png")
    with pytest.raises(
        DataError,
        match=rf"{side} holds 1 loose pictures beside its sub-folders: .*stray\.png; move them",
    ):
        folder(album).tables()


def test_missing_folder(album):
    with pytest.raises(
        DataError,
        match=r"no folder at .*nowhere: expected one with a sub-folder of pictures per identity",
    ):
        folder(album, public=album / "nowhere").tables()
    (album / "file").touch()
    with pytest.raises(DataError, match=r"no folder at .*file: expected"):
        folder(album, private=album / "file").tables()


def test_folder_without_pictures(album):
    (album / "none" / "ann").mkdir(parents=True)
    with pytest.raises(
        DataError,
        match=r"no pictures in .*none \(0 other files\): expected files ending in \.bmp, ",
    ):
        folder(album, public=album / "none").tables()
    (album / "none" / "ann" / "a.heic").touch()
    with pytest.raises(DataError, match=r"no pictures in .*none \(1 other files\)"):
        folder(album, public=album / "none").tables()


def test_identity_without_pictures(album):
    (album / "public" / "Ann").mkdir()
    (album / "public" / "Ben").mkdir()
    with pytest.raises(
        DataError,
        match=r"2 sub-folders of .*public hold no pictures: Ann, Ben; fill or remove them",
    ):
        folder(album).tables()


def test_bad_files_of_both_sides_are_named_together(album):
    (album / "private" / "bea" / "2.png").write_text("corrupt")
    (album / "public" / "Zoe" / "empty.png").touch()
    with pytest.raises(
        DataError,
        match=r"^2 of 8 pictures cannot be used: .*2\.png \(not a PNG.*empty\.png \(empty, 0 bytes\); mend or remove them$",
    ):
        folder(album).tables()


def test_broken_link_is_a_bad_file(album):
    (album / "public" / "Zoe" / "gone.png").symlink_to(album / "nowhere.png")
    with pytest.raises(DataError, match=r"gone\.png \(.*No such file"):
        folder(album).tables()


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
        match=rf"cannot list .*{place} \(Permission denied\): the folder of every identity must be readable",
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
    with pytest.raises(ConfigError, match="crop: expected 'centre' or 'none', got 'center'"):
        folder(tmp_path, crop="center")
    with pytest.raises(ConfigError, match="public: required, and not given"):
        Folder(private=tmp_path)


TABLE = "picture,glasses,hat\n"


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
    told = {name: [place % 2 == 1, place % 3 == 0] for place, name in enumerate(names)}
    for table in (ours, theirs):
        assert table.attributes.tolist() == [told[source] for source in table.sources]


def test_celebas_own_layout(tmp_path):
    (tmp_path / "list_attr_celeba.txt").write_text(
        "2\nEyeglasses Smiling\n000001.jpg  1 -1\n000002.jpg -1  1\n"
    )
    table = Attributes(tmp_path / "list_attr_celeba.txt")
    assert table.names == ("Eyeglasses", "Smiling")
    ours, theirs = table.of(["7/000002.jpg"], ["9/000001.jpg"])
    assert (ours.tolist(), theirs.tolist()) == ([[False, True]], [[True, False]])


AMBIGUOUS = "the line of 'x.png' could be about 2 pictures, {}: name each by its path, such as {}"


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
        ),  # the public one lies loose: its name is its path
    ],
)
def test_a_bare_name_must_be_the_only_one_on_both_sides(tmp_path, private, public, files, path):
    (tmp_path / "table.csv").write_text(TABLE + "x.png,1,0\ny.png,0,1\n")
    with pytest.raises(DataError, match=re.escape(AMBIGUOUS.format(files, path))):
        Attributes(tmp_path / "table.csv").of(private, public)


def test_paths_tell_pictures_of_one_name_apart(tmp_path):
    (tmp_path / "table.csv").write_text(TABLE + "x.png,1,0\na/x.png,0,1\n")
    ours, theirs = Attributes(tmp_path / "table.csv").of(["a/x.png"], ["x.png"])
    assert (ours.tolist(), theirs.tolist()) == ([[False, True]], [[True, False]])


def test_public_pictures_need_lines_all_or_none(album):
    lines = [
        f"{name},{place % 2},1\n" for place, name in enumerate(folder(album).tables()[0].sources)
    ]
    (album / "table.csv").write_text(TABLE + "".join(lines))
    ours, theirs = folder(album, attributes=album / "table.csv").tables()
    assert ours.attributes[:, 0].tolist() == [False, True, False, True, False]
    assert theirs.attributes is None
    assert (ours.attribute_names, theirs.attribute_names) == (("glasses", "hat"), ())
    (album / "table.csv").write_text(TABLE + "".join(lines) + "a.png,1,0\n")
    message = 'says nothing of 1 of 2 public pictures: Zoe/b.gif; add a line for each, or remove the lines of all public ones, which only target.start = "public" needs'
    with pytest.raises(DataError, match=re.escape(message)):
        folder(album, attributes=album / "table.csv").attribute_names()


def test_attributes_that_never_vary(album):
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
        ("picture,hat,hat\na.png,1,0\n", "names each attribute once"),
        (
            TABLE + "a.png,1,2\n",
            "line 2: expected a picture and 2 values of 1 or 0 .or -1., got '2'",
        ),
        (TABLE + "a.png,1,0\nb.png,1\n", "line 3: .* got 1 value: mend that line"),
        (TABLE + "a.png\n", "line 2: .* got 0 values: mend that line"),
        (
            TABLE + "other.png,1,0\n",
            "says nothing of 1 of 1 private pictures: a.png; add a line for each",
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
