"""Saving and loading of splits."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from frostglass.core.errors import StoreError
from frostglass.core.types import Split
from frostglass.data._splits import PARTS, load_split, make_split, save_split
from tables import fixed

FILES = ["pixels.safetensors", "split.json", "split.safetensors"]


@pytest.fixture
def saved(tmp_path):
    split = make_split(fixed(attributes=True), seed=0)
    save_split(split, tmp_path)
    return split, tmp_path


def test_round_trip(saved):
    split, folder = saved
    loaded = load_split(folder)
    assert loaded.manifest == split.manifest
    assert loaded.key == ""
    for name in PARTS:
        ours, theirs = getattr(split, name), getattr(loaded, name)
        assert torch.equal(ours.pixels[:], theirs.pixels[:])
        assert torch.equal(ours.labels, theirs.labels)
        assert torch.equal(ours.attributes, theirs.attributes)
        assert (ours.names, ours.sources, ours.attribute_names) == (
            theirs.names,
            theirs.sources,
            theirs.attribute_names,
        )
    assert sorted(path.name for path in folder.iterdir()) == FILES


def test_same_split_same_bytes(saved, tmp_path_factory):
    _, folder = saved
    other = tmp_path_factory.mktemp("other")
    save_split(make_split(fixed(attributes=True), seed=0), other)
    for name in FILES:
        assert (folder / name).read_bytes() == (other / name).read_bytes()


def test_splits_made_by_hand_are_saved_with_their_facts(tmp_path):
    split = make_split(fixed(), seed=0)
    by_hand = Split(split.train, split.validation, split.test, split.public)
    save_split(by_hand, tmp_path)
    assert load_split(tmp_path).manifest["parts"] == split.manifest["parts"]


def rewrite(folder, change, name="split.safetensors"):
    path = folder / name
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path)


def test_changed_files_are_refused(saved):
    _, folder = saved
    rewrite(folder, lambda tensors: tensors["pixels"][0].add_(1), "pixels.safetensors")
    with pytest.raises(
        StoreError,
        match=r"does not match its manifest \(pixels\): its files changed, make it again",
    ):
        load_split(folder)


def test_rows_of_other_images_are_refused(saved):
    _, folder = saved
    rewrite(folder, lambda tensors: tensors["test.rows"][:2].copy_(tensors["train.rows"][:2]))
    with pytest.raises(StoreError, match=r"does not match its manifest \(test\)"):
        load_split(folder)
    rewrite(folder, lambda tensors: tensors["test.rows"].fill_(10**6))
    with pytest.raises(StoreError, match=r"no usable split in .*out of bounds"):
        load_split(folder)


def test_swapped_labels_are_refused(saved):
    _, folder = saved
    rewrite(
        folder,
        lambda tensors: tensors.update(
            {"train.labels": tensors["train.labels"].flip(0).contiguous()}
        ),
    )
    with pytest.raises(StoreError, match=r"manifest \(train\)"):
        load_split(folder)


def test_missing_and_unknown_tensors_are_refused(saved):
    _, folder = saved
    rewrite(folder, lambda tensors: tensors.update({"extra.rows": torch.zeros(1)}))
    with pytest.raises(StoreError, match=r"manifest \(extra\.rows\)"):
        load_split(folder)
    rewrite(folder, lambda tensors: [tensors.pop("extra.rows"), tensors.pop("public.attributes")])
    with pytest.raises(StoreError, match=r"manifest \(public\)"):
        load_split(folder)
    rewrite(folder, lambda tensors: tensors.pop("public.rows"))
    with pytest.raises(
        StoreError, match=r"no usable split in .* \('public\.rows'\): make it again"
    ):
        load_split(folder)


@pytest.mark.parametrize("name", FILES)
def test_missing_and_truncated_files_are_refused(saved, name):
    _, folder = saved
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[: len(data) // 2])
    with pytest.raises(StoreError, match="no usable split in"):
        load_split(folder)
    (folder / name).unlink()
    with pytest.raises(StoreError, match=r"no usable split in .*No such file"):
        load_split(folder)
