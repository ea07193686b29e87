"""Pipes, sockets and devices among a user's files are refused by name, and at once."""

import os
import signal
import socket

import numpy as np
import onnx
import pytest
from PIL import Image

from frostglass.core.errors import DataError
from frostglass.data._attributes import Attributes
from frostglass.data._catalogue import image_files
from frostglass.data._images import read_images
from frostglass.data.folder import Folder
from frostglass.models.foreign import files_of, load_network
from generators import Dcgan, onnx_model

KINDS = {"pipe": "a named pipe", "socket": "a socket", "device": "a device"}


@pytest.fixture(autouse=True)
def limit():
    """A hang fails the test."""

    def fail(*_):
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def special(path, kind):
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        here = os.getcwd()
        os.chdir(path.parent)  # the path of a socket is short
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path.name)
        os.chdir(here)
    return path


def draw(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.zeros((12, 12, 3), np.uint8)).save(path)


@pytest.mark.parametrize("kind", KINDS)
def test_an_image_that_is_no_file(tmp_path, kind):
    for person in ("abe", "bea"):
        draw(tmp_path / "private" / person / "1.png")
    draw(tmp_path / "public" / "1.png")
    data = Folder(private=tmp_path / "private", public=tmp_path / "public", size=16)
    assert len(data.files()) == 3
    path = special(tmp_path / "private" / "abe" / "deep" / "2.png", kind)
    with pytest.raises(DataError, match=rf"2\.png is {KINDS[kind]} and not a file: remove it"):
        data.files()
    path.rename(tmp_path / "public" / "2.png")
    with pytest.raises(DataError, match=rf"2\.png is {KINDS[kind]} and not a file: remove it"):
        image_files(tmp_path / "public")
    with pytest.raises(DataError, match=r"1 of 1 images cannot be used: .*2\.png \(a pipe, dev"):
        read_images([tmp_path / "public" / "2.png"], size=16, channels=3, crop="centre")


@pytest.mark.parametrize("kind", KINDS)
def test_other_entries_of_a_folder_are_never_opened(tmp_path, kind):
    draw(tmp_path / "1.png")
    special(tmp_path / "notes", kind)
    (tmp_path / "gone.png").symlink_to(tmp_path / "nowhere")
    (tmp_path / "loop.png").symlink_to(tmp_path / "loop.png")
    assert [file.name for file in image_files(tmp_path)] == ["1.png", "gone.png", "loop.png"]


@pytest.mark.parametrize("kind", KINDS)
def test_an_attribute_table_that_is_no_file(tmp_path, kind):
    with pytest.raises(DataError, match=rf"table\.csv is {KINDS[kind]} and not a file"):
        Attributes(special(tmp_path / "table.csv", kind))


@pytest.mark.parametrize("where", ["weights", "a node"])
@pytest.mark.parametrize("kind", KINDS)
def test_external_data_of_onnx_that_is_no_file(tmp_path, kind, where):
    path = tmp_path / "gen.onnx"
    model = onnx_model(Dcgan())
    if where == "a node":  # a constant's tensor may be outside too
        weights = model.graph.initializer[0]
        constant = onnx.helper.make_node("Constant", [], [weights.name], value=weights)
        model.graph.node.insert(0, constant)
        model.graph.initializer.remove(weights)
    onnx.save(
        model, path, save_as_external_data=True, location="w.bin", size_threshold=0,
        convert_attribute=where == "a node",
    )  # fmt: skip
    assert files_of(f"onnx:{path}", None) == [path, tmp_path / "w.bin"]
    if where == "weights":  # onnx2torch takes no constant as the weights of a convolution
        assert load_network(f"onnx:{path}") is not None
    (tmp_path / "w.bin").unlink()
    special(tmp_path / "w.bin", kind)
    for read in (load_network, files_of):
        with pytest.raises(DataError, match=rf"w\.bin is {KINDS[kind]} and not a file"):
            read(f"onnx:{path}", None)
