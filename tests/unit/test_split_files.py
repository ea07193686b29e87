"""Saving and loading of splits."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from frostglass.core.errors import StoreError
from frostglass.core.types import Split
from frostglass.data._splits import PARTS, load_split, make_split, save_split
from tables import fixed


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
        assert torch.equal(ours.pixels, theirs.pixels)
        assert torch.equal(ours.labels, theirs.labels)
        assert torch.equal(ours.attributes, theirs.attributes)
        assert (ours.names, ours.sources, ours.attribute_names) == (
            theirs.names,
            theirs.sources,
            theirs.attribute_names,
        )
    assert sorted(path.name for path in folder.iterdir()) == ["split.json", "split.safetensors"]


def test_same_split_same_bytes(saved, tmp_path_factory):
    _, folder = saved
    other = tmp_path_factory.mktemp("other")
    save_split(make_split(fixed(attributes=True), seed=0), other)
    for name in ("split.json", "split.safetensors"):
        assert (folder / name).read_bytes() == (other / name).read_bytes()


def test_splits_made_by_hand_are_saved_with_their_facts(tmp_path):
    split = make_split(fixed(), seed=0)
    by_hand = Split(split.train, split.validation, split.test, split.public)
    save_split(by_hand, tmp_path)
    assert load_split(tmp_path).manifest["parts"] == split.manifest["parts"]


def rewrite(folder, change):
    path = folder / "split.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path)


def test_changed_files_are_refused(saved):
    _, folder = saved
    rewrite(folder, lambda tensors: tensors["test.pixels"][0].add_(1))
    with pytest.raises(
        StoreError, match=r"does not match its manifest \(test\): its files changed, make it again"
    ):
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
    rewrite(folder, lambda tensors: tensors.update({"extra.pixels": torch.zeros(1)}))
    with pytest.raises(StoreError, match=r"manifest \(extra\.pixels\)"):
        load_split(folder)
    rewrite(folder, lambda tensors: [tensors.pop("extra.pixels"), tensors.pop("public.attributes")])
    with pytest.raises(StoreError, match=r"manifest \(public\)"):
        load_split(folder)
    rewrite(folder, lambda tensors: tensors.pop("public.pixels"))
    with pytest.raises(
        StoreError, match=r"no usable split in .* \('public\.pixels'\): make it again"
    ):
        load_split(folder)


@pytest.mark.parametrize("name", ["split.json", "split.safetensors"])
def test_missing_and_truncated_files_are_refused(saved, name):
    _, folder = saved
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[: len(data) // 2])
    with pytest.raises(StoreError, match="no usable split in"):
        load_split(folder)
    (folder / name).unlink()
    with pytest.raises(StoreError, match=r"no usable split in .*No such file"):
        load_split(folder)
