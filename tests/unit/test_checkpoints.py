"""Checkpoints: written as safetensors, read strictly, refused unless every tensor fits."""

from collections import OrderedDict

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from frostglass.core.errors import CheckpointError
from frostglass.models.build import build
from frostglass.models.checkpoint import (
    load_weights,
    save_weights,
)
from frostglass.models.weight_files import usable

SHAPE = (3, 16, 16)


def net(classes=5, seed=0, **options):
    return build("cnn", classes=classes, image_shape=SHAPE, seed=seed, width=4, **options)


def same(one, other):
    return all(
        torch.equal(value, other.state_dict()[name]) for name, value in one.state_dict().items()
    )


# Writing


def test_the_same_weights_give_the_same_bytes(tmp_path):
    for name in ("a", "b"):
        save_weights(net(), tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_normalised_network_is_stored_under_its_inner_names(tmp_path):
    whole = net(mean=[0.5] * 3, std=[0.5] * 3)
    save_weights(whole, tmp_path / "w.safetensors")
    assert set(load_file(tmp_path / "w.safetensors")) == set(net().state_dict())
    plain = net(seed=1)
    load_weights(plain, tmp_path / "w.safetensors")
    assert same(plain, whole.net)


def test_channels_last_weights_survive(tmp_path):
    module = net().to(memory_format=torch.channels_last)
    save_weights(module, tmp_path / "w.safetensors")
    other = net(seed=1)
    load_weights(other, tmp_path / "w.safetensors")
    assert same(module, other)


def tied():
    module = nn.Sequential(OrderedDict(one=nn.Linear(4, 4), two=nn.Linear(4, 4)))
    module.two.weight = module.one.weight
    return module


def test_tied_tensors_are_written_under_each_name_and_stay_tied(tmp_path):
    module, other = tied(), tied()
    save_weights(module, tmp_path / "w.safetensors")
    load_weights(other, tmp_path / "w.safetensors")
    assert same(module, other)
    assert other.one.weight is other.two.weight


def test_tensors_without_content_are_not_taken_for_tied():
    """In a dry run all have the same address."""
    layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    with torch.device("meta"):
        empty = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    state = layers.state_dict()
    assert usable(empty.state_dict(), state, "w").keys() == state.keys()


def test_tied_tensors_that_differ_in_the_checkpoint_are_refused(tmp_path):
    state = {name: value.clone() for name, value in tied().state_dict().items()}
    state["two.weight"] += 1
    save_file(state, tmp_path / "w.safetensors")
    with pytest.raises(
        CheckpointError, match=r"one.weight and two.weight are one tensor in the model and differ"
    ):
        load_weights(tied(), tmp_path / "w.safetensors")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_neither_written_nor_read(tmp_path, value):
    module = net()
    with torch.no_grad():
        module.head.bias[2] = value
    with pytest.raises(
        CheckpointError,
        match=r"Sequential cannot be saved: 1 of its tensors hold NaN or infinity \(head.bias\)",
    ):
        save_weights(module, tmp_path / "w.safetensors")
    assert not (tmp_path / "w.safetensors").exists()
    save_file(module.state_dict(), tmp_path / "w.safetensors")
    with pytest.raises(CheckpointError, match=r"w.safetensors cannot be used: .* \(head.bias\)"):
        load_weights(net(), tmp_path / "w.safetensors")


def test_values_too_large_for_the_model_are_refused(tmp_path):
    state = {
        name: value.double() if value.is_floating_point() else value
        for name, value in net().state_dict().items()
    }
    state["head.bias"][0] = 1e300
    save_file(state, tmp_path / "w.safetensors")
    with pytest.raises(CheckpointError, match=r"hold NaN or infinity \(head.bias\)"):
        load_weights(net(), tmp_path / "w.safetensors")


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="there is no folder"):
        save_weights(net(), tmp_path / "none" / "w.safetensors")


# Reading


@pytest.mark.parametrize("nest", [None, "state_dict", "model", "model_state_dict"])
@pytest.mark.parametrize("prefix", ["", "module."])
def test_files_of_torch_save_are_read(tmp_path, nest, prefix):
    module, other = net(), net(seed=1)
    state = {prefix + name: value for name, value in module.state_dict().items()}
    torch.save(state if nest is None else {nest: state, "epoch": 3}, tmp_path / "w.pth")
    load_weights(other, tmp_path / "w.pth")
    assert same(module, other)


def test_the_older_format_of_torch_save_is_read(tmp_path):
    module, other = net(), net(seed=1)
    torch.save(module.state_dict(), tmp_path / "w.pt", _use_new_zipfile_serialization=False)
    load_weights(other, tmp_path / "w.pt")
    assert same(module, other)


@pytest.mark.parametrize(
    ("written", "named"), [("safetensors", "w.pt"), ("torch", "w.safetensors")]
)
def test_the_content_decides_and_not_the_suffix(tmp_path, written, named):
    module, other = net(), net(seed=1)
    if written == "torch":
        torch.save(module.state_dict(), tmp_path / named)
    else:
        save_file(module.state_dict(), tmp_path / named)
    load_weights(other, tmp_path / named)
    assert same(module, other)


def test_a_pickled_network_is_refused(tmp_path):
    torch.save(net(), tmp_path / "w.pt")
    with pytest.raises(
        CheckpointError,
        match=r"w.pt holds more than tensors or is damaged; unpickling .* re-save .* safetensors",
    ):
        load_weights(net(), tmp_path / "w.pt")


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def test_nothing_in_a_file_is_run(tmp_path):
    torch.save(
        {"state_dict": net().state_dict(), "extra": Bomb(tmp_path / "fallen")}, tmp_path / "w.pt"
    )
    with pytest.raises(CheckpointError, match="unpickling could run any code"):
        load_weights(net(), tmp_path / "w.pt")
    assert not (tmp_path / "fallen").exists()


def cut(path, kind):
    """A checkpoint of one kind, cut to half its length."""
    if kind == "safetensors":
        save_file(net().state_dict(), path)
    else:
        torch.save(net().state_dict(), path, _use_new_zipfile_serialization=kind == "zip")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("kind", ["safetensors", "zip", "older"])
def test_a_file_cut_short_is_refused(tmp_path, kind):
    cut(tmp_path / "w", kind)
    with pytest.raises(CheckpointError, match="w is damaged"):
        load_weights(net(), tmp_path / "w")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "w is empty"),
        (b"\x89PNG and so on", "w is neither safetensors nor a file of torch.save"),
        (b"abc", "w is neither safetensors nor a file of torch.save"),
        (b"\x10\x00\x00\x00\x00\x00\x00\x00{", "w is damaged: "),
        (b"PK\x03\x04 but no archive", "w is damaged or not a state dict"),
    ],
)
def test_a_file_that_is_no_checkpoint_is_refused(tmp_path, content, message):
    (tmp_path / "w").write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_weights(net(), tmp_path / "w")
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"no checkpoint file at .*nowhere.safetensors"):
        load_weights(net(), tmp_path / "nowhere.safetensors")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([torch.zeros(1)], "holds a list and no state dict"),
        ({}, "holds a dict and no state dict"),
        (
            {"state_dict": {"a": torch.zeros(1)}, "model": {"a": torch.zeros(1)}},
            r"several state dicts \(state_dict, model\)",
        ),
        ({"a": torch.zeros(1), "epoch": 3}, r"something else than named tensors \(epoch\)"),
        ({7: torch.zeros(1)}, r"something else than named tensors \(7\)"),
    ],
)
def test_contents_that_are_no_state_dict_are_refused(tmp_path, content, message):
    torch.save(content, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match=message):
        load_weights(net(), tmp_path / "w.pt")


# Matching


def refused(tmp_path, state, module, message):
    save_file({name: value.clone() for name, value in state.items()}, tmp_path / "w.safetensors")
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(CheckpointError, match=message) as caught:
        load_weights(module, tmp_path / "w.safetensors")
    assert "\n" not in str(caught.value)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items()), (
        "a refused checkpoint changed the module"
    )


def test_another_number_of_classes_is_reported(tmp_path):
    refused(
        tmp_path,
        net(classes=53, seed=1).state_dict(),
        net(classes=100),
        "the checkpoint has 53 classes, the model 100$",
    )


def test_missing_and_unexpected_names_are_counted(tmp_path):
    state = net(seed=1).state_dict()
    state["header.weight"] = state.pop("head.weight")
    state["more"] = torch.zeros(2)
    message = (
        r"w.safetensors does not fit Sequential: 1 missing \(head.weight\), "
        r"2 unexpected \((more, header.weight|header.weight, more)\)$"
    )
    refused(tmp_path, state, net(), message)


def test_many_names_are_cut_to_a_few(tmp_path):
    refused(
        tmp_path,
        {},
        net(),
        r"26 missing \(stage1.0.weight, stage1.1.weight, stage1.1.bias, \.\.\.\)$",
    )


def test_wrong_shapes_are_shown(tmp_path):
    state = net(seed=1).state_dict()
    state["stage2.0.weight"] = torch.zeros(8, 4, 5, 5)
    refused(
        tmp_path,
        state,
        net(),
        r"1 of another shape \(stage2.0.weight \(8, 4, 5, 5\) for \(8, 4, 3, 3\)\)$",
    )


def test_two_layers_of_other_sizes_are_not_taken_for_the_classes(tmp_path):
    module = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 5))
    state = {
        name: value[:3] if name.endswith("bias") else value
        for name, value in module.state_dict().items()
    }
    refused(
        tmp_path,
        state,
        module,
        r"2 of another shape \(0.bias \(3,\) for \(5,\), 1.bias \(3,\) for \(5,\)\)$",
    )


def test_another_number_of_classes_does_not_hide_other_problems(tmp_path):
    state = net(classes=53, seed=1).state_dict()
    del state["stage1.0.weight"]
    refused(
        tmp_path, state, net(), r"1 missing \(stage1.0.weight\), 2 of another shape \(head.weight"
    )


def test_whole_numbers_are_not_taken_for_weights(tmp_path):
    state = net(seed=1).state_dict()
    state["head.bias"] = state["head.bias"].long()
    refused(
        tmp_path, state, net(), r"1 of another kind \(head.bias torch.int64 for torch.float32\)$"
    )


def test_a_prefix_that_only_some_names_have_is_not_dropped(tmp_path):
    state = {
        ("module." if name.startswith("stage") else "") + name: value
        for name, value in net(seed=1).state_dict().items()
    }
    refused(tmp_path, state, net(), r"24 missing .*24 unexpected")


def test_a_prefix_that_the_model_has_too_is_kept(tmp_path):
    module, other = (nn.Sequential(OrderedDict(module=net(seed=seed))) for seed in (0, 1))
    save_weights(module, tmp_path / "w.safetensors")
    load_weights(other, tmp_path / "w.safetensors")
    assert same(module, other)
