"""Hugging Face datasets on disk: Arrow of `save_to_disk`, Parquet, and folders of images."""

import io
import json

import numpy as np
import pytest
import torch
from PIL import Image

import data_layouts as layouts
from frostglass.core.errors import ConfigError, DataError
from frostglass.data import HuggingFace, make_split

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

NAMES = ["Ann", "Bo", "Cy"]


def image_of(number):
    """Return random pixels (3, 24, 24) and their PNG file."""
    pixels = np.random.default_rng(number).integers(0, 256, (24, 24, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return torch.from_numpy(pixels).permute(2, 0, 1), file.getvalue()


def table(first=0, people=(0, 1, 2), each=4, names=NAMES):
    rows = [who for _ in range(each) for who in people]
    files = [image_of(first + row)[1] for row in range(len(rows))]
    images = pyarrow.array([{"bytes": file, "path": None} for file in files])
    features = {"image": {"_type": "Image"}, "label": {"_type": "ClassLabel", "names": names}}
    text = json.dumps({"info": {"features": features}})
    content = pyarrow.table({"image": images, "label": pyarrow.array(rows)})
    return content.replace_schema_metadata({"huggingface": text})


def save(folder, *tables):
    """Write tables as `Dataset.save_to_disk` does, one file each."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [f"data-{number:05}-of-{len(tables):05}.arrow" for number in range(len(tables))]
    for file, content in zip(files, tables, strict=True):
        sink = str(folder / file)
        with pyarrow.OSFile(sink, "wb") as out, pyarrow.ipc.new_stream(out, content.schema) as part:
            part.write_table(content, max_chunksize=5)
    state = {"_data_files": [{"filename": file} for file in files], "_indices_data_files": None}
    (folder / "state.json").write_text(json.dumps(state))
    return folder


@pytest.fixture
def saved(tmp_path):
    save(tmp_path / "train", table(), table(100))
    save(tmp_path / "test", table(200, people=(0,), names=["Zoe"]))
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    return tmp_path


def test_a_saved_dataset(saved):
    data = HuggingFace(root=saved, public="test", size=24)
    private, public = data.tables()
    assert (private.names, public.names) == (tuple(NAMES), ("Zoe",))
    assert private.labels.tolist() == [0, 1, 2] * 8
    rows = torch.tensor([23, 0, 13])
    expected = torch.stack([image_of(number)[0] for number in (111, 0, 101)])
    assert torch.equal(private.pixels[rows], expected)
    assert private.sources[13] == "data-00001-of-00002.arrow 1"
    assert data.counts() == (3, 24, 4)
    assert [file.name for file in data.files()][:2] == [
        "data-00000-of-00002.arrow",
        "data-00001-of-00002.arrow",
    ]
    assert len(make_split(data, seed=0).test) == 6


def test_classes_of_one_split_on_both_sides(saved):
    private, public = HuggingFace(root=saved, identities=2, size=16).tables()
    assert (private.names, public.names) == (("Ann", "Bo"), ("Cy",))
    with pytest.raises(DataError, match=r"all 3 classes are private"):
        HuggingFace(root=saved, identities=3).counts()
    with pytest.raises(ConfigError, match=r"public: expected a split such as"):
        HuggingFace(root=saved)


def test_parquet_files_of_the_hub(tmp_path):
    (tmp_path / "data").mkdir()
    path = tmp_path / "data" / "train-00000-of-00001.parquet"
    parquet.write_table(table(), path, row_group_size=5)
    private, public = HuggingFace(root=tmp_path, identities=2, size=24).tables()
    assert private.labels.tolist() == [0, 1] * 4
    assert torch.equal(private.pixels[torch.tensor([5, 0])][0], image_of(7)[0])
    assert torch.equal(public.pixels[0], image_of(2)[0])
    with pytest.raises(DataError, match=r"no Parquet file of .* split named 'test'"):
        HuggingFace(root=tmp_path, public="test").counts()


def test_a_folder_of_images_needs_no_column(tmp_path):
    layouts.folders(tmp_path / "train", ["Ann", "Bo"])
    layouts.folders(tmp_path / "test", ["Cy"], first=1000)
    assert HuggingFace(root=tmp_path, public="test").counts() == (2, 8, 4)


def test_text_labels_and_images_without_labels(tmp_path):
    named = table().set_column(1, "who", pyarrow.array(["b", "a", "c"] * 4))
    save(tmp_path / "train", named)
    save(tmp_path / "test", table(50).drop_columns(["label"]))
    (tmp_path / "dataset_dict.json").write_text("{}")
    private, public = HuggingFace(root=tmp_path, public="test", label="who", size=16).tables()
    assert private.names == ("a", "b", "c")
    assert private.labels.tolist() == [1, 0, 2] * 4
    assert (public.names, set(public.labels.tolist())) == ((), {-1})


def test_what_is_wrong_is_said_in_one_line(saved, tmp_path):
    for parameters, message in (
        ({"root": tmp_path / "none"}, r"no folder at .*nothing is downloaded"),
        ({"split": "valid"}, r"no split named 'valid', it has test, train"),
        ({"image": "photo"}, r"no column 'photo', it has image, label: set data.image"),
        ({"label": "who"}, r"no column 'who', so that nobody is named"),
    ):
        with pytest.raises(DataError, match=message):
            HuggingFace(**({"root": saved, "public": "test"} | parameters)).counts()
    file = saved / "train" / "data-00000-of-00002.arrow"
    file.write_bytes(b"no arrow")
    with pytest.raises(DataError, match=r"data-00000-of-00002.arrow cannot be read"):
        HuggingFace(root=saved, public="test").counts()
    state = saved / "train" / "state.json"
    state.write_text(json.dumps({"_data_files": [{"filename": "../x.arrow"}]}))
    with pytest.raises(DataError, match=r"names a file outside of its folder"):
        HuggingFace(root=saved, public="test").counts()
    rows = {"_data_files": [], "_indices_data_files": [{"filename": "indices.arrow"}]}
    state.write_text(json.dumps(rows))
    with pytest.raises(DataError, match=r"call flatten_indices"):
        HuggingFace(root=saved, public="test").counts()


def test_damaged_images_are_named(tmp_path):
    damaged = [{"bytes": b"no image", "path": None}, {"bytes": None, "path": "x.png"}] * 6
    save(tmp_path, table().set_column(0, "image", pyarrow.array(damaged)))
    private, _ = HuggingFace(root=tmp_path, identities=2).tables()
    with pytest.raises(DataError, match=r"row 0 \(not a PNG.*row 1 \(no bytes of an image"):
        private.pixels[torch.tensor([0, 1])]


def test_the_missing_extra_is_named(saved, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"install it with `pip install 'frostglass\[hf\]'`"):
        HuggingFace(root=saved, public="test").counts()


def test_a_dataset_that_the_package_saved(tmp_path):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=NAMES)}
    )
    images = [Image.open(io.BytesIO(image_of(number)[1])) for number in range(9)]
    content = datasets.Dataset.from_dict(
        {"image": images, "label": [0, 1, 2] * 3}, features=features
    )
    datasets.DatasetDict({"train": content}).save_to_disk(tmp_path / "saved")
    content.to_parquet(tmp_path / "hub" / "train-00000-of-00001.parquet")
    for folder in ("saved", "hub"):
        private, public = HuggingFace(root=tmp_path / folder, identities=2, size=24).tables()
        assert (private.names, public.names) == (("Ann", "Bo"), ("Cy",))
        assert torch.equal(private.pixels[1], image_of(1)[0])
