import json
from collections import OrderedDict

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from frostglass.core.errors import CheckpointError
from frostglass.core.types import Target
from frostglass.models.build import build
from frostglass.models.checkpoint import (
    body,
    load_body,
    load_target,
    load_weights,
    read_body,
    save_target,
    save_weights,
)
from frostglass.models.wrap import wrap

SHAPE = (3, 16, 16)


def net(classes=5, seed=0, **options):
    return build("cnn", classes=classes, image_shape=SHAPE, seed=seed, width=4, **options)


def same(one, other):
    return all(
        torch.equal(value, other.state_dict()[name]) for name, value in one.state_dict().items()
    )


# --- writing ----------------------------------------------------------------------------------------------------------------------------


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


# --- reading ----------------------------------------------------------------------------------------------------------------------------


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
        match=r"w.pt holds more than tensors or is damaged; unpickling could run any code: re-save .* safetensors",
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
        (b"\x10\x00\x00\x00\x00\x00\x00\x00{", "w is damaged or cut short"),
        (b"PK\x03\x04 but no archive", "w is damaged, cut short or no state dict"),
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


# --- matching ---------------------------------------------------------------------------------------------------------------------------


def refused(tmp_path, state, module, message):
    save_file({name: value.clone() for name, value in state.items()}, tmp_path / "w.safetensors")
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(CheckpointError, match=message) as caught:
        load_weights(module, tmp_path / "w.safetensors")
    assert "\n" not in str(caught.value)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items()), (
        "a refused checkpoint changed the module"
    )


def test_another_number_of_classes_is_said_plainly(tmp_path):
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
    message = r"w.safetensors does not fit Sequential: 1 missing \(head.weight\), 2 unexpected \((more, header.weight|header.weight, more)\)$"
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


# --- starting weights -------------------------------------------------------------------------------------------------------------------

NORMALISED = {"mean": [0.5] * 3, "std": [0.5] * 3}


def unchanged(module, call, message):
    """The call is refused in one line, and the module is what it was."""
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(CheckpointError, match=message) as caught:
        call(module)
    assert "\n" not in str(caught.value)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items()), (
        "a refused start changed the module"
    )


@pytest.mark.parametrize(("options", "head"), [({}, "head"), (NORMALISED, "net.head")])
def test_a_start_leaves_the_head_alone(tmp_path, options, head):
    trained, module = net(classes=9, seed=1), net(seed=2, **options)
    save_weights(trained, tmp_path / "w.safetensors")
    tensors = read_body(module, head, tmp_path / "w.safetensors")
    assert set(tensors) == {name for name in trained.state_dict() if not name.startswith("head.")}
    load_body(module, head, tensors)
    inside = module.net if options else module
    assert same(trained[:-1], inside[:-1])
    assert same(net(seed=2).head, inside.head)


def test_what_a_network_gives_away_is_a_copy():
    module = net()
    for value in body(module, "head").values():
        value.zero_()
    assert same(module, net())
    assert set(body(net(**NORMALISED), "net.head", ("stage2",))) == {
        name for name in net().state_dict() if name.startswith("stage2.")
    }


def test_other_precisions_are_converted_and_frozen_weights_stay_frozen(tmp_path):
    trained, module = net(seed=1).double(), net(seed=2)
    module.stage1.requires_grad_(False)
    save_weights(trained, tmp_path / "w.safetensors")
    load_body(module, "head", read_body(module, "head", tmp_path / "w.safetensors"))
    assert same(module[:-1], trained.float()[:-1])
    assert [name for name, weight in module.named_parameters() if not weight.requires_grad] == [
        "stage1.0.weight",
        "stage1.1.weight",
        "stage1.1.bias",
    ]


def test_a_part_is_not_its_namesake():
    """Nor is "stage1" a part of "stage10", and a bare tensor is a part by its own name."""
    module = nn.Sequential(
        OrderedDict(stage1=nn.Linear(2, 2), stage10=nn.Linear(2, 2), head=nn.Linear(2, 2))
    )
    module.shift = nn.Parameter(torch.zeros(2))
    assert set(body(module, "head", ("stage1", "shift"))) == {
        "stage1.weight",
        "stage1.bias",
        "shift",
    }
    assert set(body(module, "head")) == {
        "stage1.weight",
        "stage1.bias",
        "stage10.weight",
        "stage10.bias",
        "shift",
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda state: state.pop("stage3.0.weight"),
            r"w.safetensors does not fit Sequential apart from its head: 1 missing \(stage3.0.weight\); "
            r"name the parts that fit with start_parts \(stage1, stage2, stage4\)$",
        ),
        (
            lambda state: state.pop("stage3.1.num_batches_tracked"),
            r"1 missing \(stage3.1.num_batches_tracked\)",
        ),
        (
            lambda state: state.update(more=torch.zeros(2)),
            r"1 unexpected \(more\); .*\(stage1, stage2, stage3, stage4\)$",
        ),
        (
            lambda state: state.update({"header.bias": torch.zeros(2)}),
            r"1 unexpected \(header.bias\)",
        ),
        (
            lambda state: state.update({"stage1.1.bias": torch.zeros(5)}),
            r"1 of another shape \(stage1.1.bias \(5,\) for \(4,\)\); .*\(stage2, stage3, stage4\)$",
        ),
        (
            lambda state: state.update({"stage1.1.bias": torch.zeros(4).long()}),
            r"1 of another kind \(stage1.1.bias torch.int64 for torch.float32\)",
        ),
        (
            lambda state: state.update({"stage1.1.bias": torch.full((4,), torch.inf)}),
            r"w.safetensors cannot be used: .* infinity \(stage1.1.bias\)$",
        ),
        (
            lambda state: state.update(
                {"stage1.1.bias": torch.full((4,), 1e300, dtype=torch.float64)}
            ),
            r"w.safetensors cannot be used: .* infinity",
        ),
    ],
)
def test_a_file_without_the_whole_body_is_refused(tmp_path, change, message):
    state = {name: value.clone() for name, value in net(seed=1).state_dict().items()}
    change(state)
    save_file(state, tmp_path / "w.safetensors")
    unchanged(net(), lambda module: read_body(module, "head", tmp_path / "w.safetensors"), message)
    tensors = {name: value for name, value in state.items() if not name.startswith("head.")}
    of_tensors = message.replace(
        "w.safetensors does not fit", "the starting weights do not fit"
    ).replace("w.safetensors", "starting weights")
    unchanged(net(), lambda module: load_body(module, "head", tensors), of_tensors)


def test_a_file_without_batch_counters_starts_them_at_zero(tmp_path):
    trained, module = net(seed=1), net(seed=2)
    trained.train()(torch.rand(2, *SHAPE))
    save_file(
        {name: value for name, value in trained.state_dict().items() if "num_batches" not in name},
        tmp_path / "w.safetensors",
    )
    load_body(module, "head", read_body(module, "head", tmp_path / "w.safetensors"))
    assert torch.equal(module.stage1[1].running_mean, trained.stage1[1].running_mean)
    assert (trained.stage1[1].num_batches_tracked, module.stage1[1].num_batches_tracked) == (1, 0)


def test_tensors_of_the_head_are_no_start():
    state = dict(net(seed=1).state_dict())
    unchanged(
        net(),
        lambda module: load_body(module, "head", state),
        r"2 unexpected \(head.weight, head.bias\)",
    )
    unchanged(
        net(),
        lambda module: load_body(module, "head", body(net(), "head"), ("stage1",)),
        r"18 unexpected \(stage2.0.weight, ",
    )


def test_tied_tensors_that_differ_are_no_start():
    module = nn.Sequential(OrderedDict(tied=tied(), head=nn.Linear(4, 3)))
    tensors = body(module, "head")
    tensors["tied.two.weight"] += 1
    unchanged(
        module,
        lambda module: load_body(module, "head", tensors),
        r"tied.one.weight and tied.two.weight are one tensor in the model and differ",
    )


@pytest.mark.parametrize(
    ("head", "parts", "message"),
    [
        (
            "classifier",
            (),
            r"Sequential has no head named 'classifier' with weights: give the name that find_head finds",
        ),
        ("net.head", (), r"Sequential has no head named 'net.head' with weights"),
        (
            "head",
            ("stag2",),
            r"Sequential has no part named 'stag2' with weights besides its head: did you mean 'stage2'\? known: stage1, stage2, ",
        ),
        ("head", ("stage1", "head"), r"has no part named 'head' with weights besides its head"),
        ("head", ("flatten",), r"has no part named 'flatten' with weights besides its head"),
    ],
)
def test_a_head_or_part_that_is_not_there_is_named(tmp_path, head, parts, message):
    save_weights(net(), tmp_path / "w.safetensors")
    unchanged(
        net(), lambda module: read_body(module, head, tmp_path / "w.safetensors", parts), message
    )
    unchanged(net(), lambda module: load_body(module, head, {}, parts), message)
    unchanged(net(), lambda module: body(module, head, parts), message)


# --- targets ----------------------------------------------------------------------------------------------------------------------------


def target(**info):
    wrapped = wrap(net(mean=[0.5] * 3, std=[0.25] * 3), classes=list("vwxyz"), image_shape=SHAPE)
    recipe = {
        "name": "cnn",
        "options": {"width": 4},
        "mean": [0.5] * 3,
        "std": [0.25] * 3,
        "defenses": [],
    }
    return Target(
        wrapped.module,
        wrapped.classes,
        SHAPE,
        wrapped.head,
        wrapped.taps,
        {**wrapped.info, "build": recipe, **info},
    )


def rebuild(recipe):
    mean, std = recipe["mean"], recipe["std"]
    return build(
        recipe["name"],
        classes=recipe["classes"],
        image_shape=recipe["image_shape"],
        mean=mean,
        std=std,
        seed=9,
        **recipe["options"],
    )


def test_a_target_comes_back_whole(tmp_path):
    saved = target(accuracy=0.9)
    save_target(saved, tmp_path)
    loaded = load_target(tmp_path, rebuild)
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "target.json",
        "weights.safetensors",
    ]
    assert (loaded.classes, loaded.image_shape, loaded.head, loaded.taps, loaded.info) == (
        saved.classes,
        saved.image_shape,
        saved.head,
        saved.taps,
        saved.info,
    )
    assert not any(part.training for part in loaded.module.modules())
    images = torch.rand(2, *SHAPE, generator=torch.Generator().manual_seed(1))
    saved.module.eval()
    for ours, theirs in zip(loaded.outputs(images), saved.outputs(images), strict=True):
        assert torch.equal(ours, theirs)


def test_a_rebuilt_network_that_does_not_fit_is_refused(tmp_path):
    save_target(target(), tmp_path)
    with pytest.raises(CheckpointError, match="does not fit"):
        load_target(tmp_path, lambda recipe: build("lenet", classes=5, image_shape=SHAPE, seed=0))


def test_a_target_without_a_recipe_is_not_saved(tmp_path):
    plain = wrap(net(), classes=5, image_shape=SHAPE)
    with pytest.raises(CheckpointError, match=r'without a recipe in info\["build"\]'):
        save_target(plain, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", [torch.zeros(1), float("nan")])
def test_info_that_is_not_plain_is_not_saved(tmp_path, value):
    with pytest.raises(CheckpointError, match="info must be plain finite values"):
        save_target(target(loss=value), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_empty_folder_holds_no_target(tmp_path):
    with pytest.raises(CheckpointError, match=r"target.json is missing"):
        load_target(tmp_path, rebuild)


@pytest.mark.parametrize("damage", ["{", "[]", json.dumps({"classes": ["a"]})])
def test_a_damaged_description_is_refused(tmp_path, damage):
    save_target(target(), tmp_path)
    (tmp_path / "target.json").write_text(damage)
    with pytest.raises(CheckpointError, match=r"target.json .* is damaged"):
        load_target(tmp_path, rebuild)


def test_missing_weights_are_refused(tmp_path):
    save_target(target(), tmp_path)
    (tmp_path / "weights.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no checkpoint file"):
        load_target(tmp_path, rebuild)
