"""The contract of datasets, and the digit datasets."""

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from frostglass.core.errors import ConfigError, DataError
from frostglass.core.parameters import parameters
from frostglass.data.base import Dataset, datasets
from frostglass.data.digits import Digits
from frostglass.data.folder import Folder
from frostglass.data.mnist import Mnist, read_idx

MNIST = Path(__file__).parents[3] / "shared" / "data" / "mnist"


def test_datasets_are_found_by_file_name():
    assert {"digits", "mnist", "folder"} <= set(datasets.names())
    assert datasets.get("digits") is Digits
    assert Folder.name == "folder"
    assert not {"base", "images", "splits"} & set(datasets.names())


def test_a_dataset_without_the_contract_is_refused():
    @parameters
    class Nothing(Dataset):
        pass

    with pytest.raises(TypeError, match="abstract"):
        Nothing()
    with pytest.raises(ConfigError, match="lacks counts, image_shape, public_people, tables"):
        datasets.register(Nothing)


def test_the_optional_parts_of_the_contract_have_defaults():
    data = Digits(private_classes=(1, 2, 3))
    assert data.most_of_one() == 180
    assert data.attribute_names() == data.constant_attributes() == ()
    assert data.describes_public()
    assert data.files() == []
    assert (data.name, data.title) == ("digits", "scikit-learn digits")


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
        match=r"3, 4 in both private_classes and public_classes: an identity is either",
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
    images = np.random.default_rng(0).integers(0, 256, (count, 28, 28))
    images[:, 0, 0] = labels
    for name, values in (
        ("train-images-idx3-ubyte", images),
        ("train-labels-idx1-ubyte", labels),
    ):
        data = idx(values)
        (folder / (name + ".gz" * pack)).write_bytes(gzip.compress(data) if pack else data)
    return images


@pytest.mark.parametrize("pack", [False, True], ids=["plain", "gzip"])
@pytest.mark.parametrize("layout", [".", "MNIST/raw"])
def test_mnist_layouts(tmp_path, layout, pack):
    images = write_mnist(tmp_path / layout, pack=pack)
    private, public = Mnist(root=tmp_path, size=28).tables()
    assert private.names[3] == "digit 3"
    assert public.names[3] == "digit 8"
    assert private.labels.tolist() == [label for label in range(5) for _ in range(6)]
    assert public.pixels[:, 0, 0, 0].tolist() == [digit for digit in range(5, 10) for _ in range(6)]
    assert private.sources[1] == "mnist train 10"
    assert torch.equal(private.pixels[1, 0].int(), torch.from_numpy(images[10]).int())


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
        match=r"no train-images-idx3-ubyte or .*-ubyte\.gz in .*: put MNIST's files there",
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
        DataError, match="got 59 labels and 60 images: the two files do not belong together"
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
        DataError, match=r"bytes, which do not match its dimensions .*: download it again"
    ):
        read_idx(tmp_path / "a", dims=3)


def test_idx_that_holds_nothing(tmp_path):
    (tmp_path / "a").write_bytes(idx(np.ones((0, 5, 6))))
    with pytest.raises(DataError, match="do not match its dimensions"):
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
        with pytest.raises(DataError, match=r"a\.gz cannot be read \(.*\): download it again"):
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
