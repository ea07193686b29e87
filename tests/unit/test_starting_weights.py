"""Starting weights: a checkpoint for all of a network but its head, or for named parts."""

from collections import OrderedDict

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from frostglass.core.errors import CheckpointError
from frostglass.models.architectures._ir import FACE_EVOLVE
from frostglass.models.base import Preprocess
from frostglass.models.build import build
from frostglass.models.checkpoint import body, load_body, read_body, save_weights
from frostglass.models.taps import find_head

SHAPE = (3, 16, 16)


def net(classes=5, seed=0, **options):
    return build("cnn", classes=classes, image_shape=SHAPE, seed=seed, width=4, **options)


def small(name, side=64, *, seed=0, classes=7, **options):
    return build(name, classes=classes, image_shape=(3, side, side), seed=seed, width=4, **options)


def copied(module):
    return {name: value.clone() for name, value in module.state_dict().items()}


def same(one, other):
    return all(
        torch.equal(value, other.state_dict()[name]) for name, value in one.state_dict().items()
    )


def tied():
    module = nn.Sequential(OrderedDict(one=nn.Linear(4, 4), two=nn.Linear(4, 4)))
    module.two.weight = module.one.weight
    return module


# Of one network

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
            r"w.safetensors does not fit Sequential apart from its head: 1 missing "
            r"\(stage3.0.weight\); "
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
            r"1 of another shape \(stage1.1.bias \(5,\) for \(4,\)\); "
            r".*\(stage2, stage3, stage4\)$",
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
            r"Sequential has no head named 'classifier' with weights: pass the name that find_head",
        ),
        ("net.head", (), r"Sequential has no head named 'net.head' with weights"),
        (
            "head",
            ("stag2",),
            r"has no part named 'stag2' with weights besides its head: did you mean 'stage2'\?",
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


# Starting weights of others

MARK = {
    "stem.1.running_var": "input_layer.1.running_var",
    "units.0.residual.3.weight": "body.0.res_layer.3.weight",
    "units.3.shortcut.1.bias": "body.3.shortcut_layer.1.bias",
    "norm.weight": "output_layer.0.weight",
    "embedding.weight": "output_layer.3.weight",
    "embedding_norm.num_batches_tracked": "output_layer.4.num_batches_tracked",
}


def theirs(module):
    """The network's tensors as a file of face.evoLVe names them: no head."""
    state = {}
    for name, value in copied(module).items():
        for their, our in FACE_EVOLVE.items():
            if name.startswith(our) or our.startswith("."):
                name = name.replace(our, their, 1)
        state[name] = value
    return {name: value for name, value in state.items() if not name.startswith("head.")}


@pytest.mark.parametrize("name", ["ir152", "facenet"])
@pytest.mark.parametrize("prefix", ["", "module."])
def test_a_file_of_face_evolve_is_read(tmp_path, name, prefix):
    trained, fresh, head = (
        small(name, 32, seed=1),
        small(name, 32, classes=3, seed=2, mean=[0.5] * 3, std=[0.5] * 3),
        "net.head",
    )
    file = theirs(trained)
    assert {ours: file[their].shape for ours, their in MARK.items()} == {
        ours: trained.state_dict()[ours].shape for ours in MARK
    }
    assert {name.partition(".")[0] for name in file} == {"input_layer", "body", "output_layer"}
    save_file(
        {prefix + key: value for key, value in file.items()}, tmp_path / "backbone.safetensors"
    )
    before = copied(fresh.net)
    tensors = read_body(fresh, head, tmp_path / "backbone.safetensors")
    load_body(fresh, head, tensors)
    assert isinstance(fresh, Preprocess)
    assert find_head(fresh, (3, 32, 32)) == head
    expected = {
        **trained.state_dict(),
        "head.weight": before["head.weight"],
        "head.bias": before["head.bias"],
    }
    assert [
        key
        for key, value in fresh.net.state_dict().items()
        if not torch.equal(value, expected[key])
    ] == []


def test_parts_of_a_face_evolve_file_for_larger_images_are_read(tmp_path):
    large, fresh = small("facenet", 112, seed=1), small("facenet", 64, seed=2)
    save_file(theirs(large), tmp_path / "ir50.safetensors")
    message = (
        r"ir50.safetensors does not fit IR apart from its head: 1 of another shape "
        r"\(embedding.weight \(32, 1568\) for \(32, 512\)\); name the parts that fit with "
        r"start_parts \(stem, units, norm, embedding_norm\)$"
    )
    with pytest.raises(CheckpointError, match=message):
        read_body(fresh, "head", tmp_path / "ir50.safetensors")
    tensors = read_body(fresh, "head", tmp_path / "ir50.safetensors", ("stem", "units"))
    assert set(tensors) == {
        key for key in fresh.state_dict() if key.startswith(("stem.", "units."))
    }
    expected = {
        **copied(fresh),
        **{key: value for key, value in large.state_dict().items() if key in tensors},
    }
    load_body(fresh, "head", tensors, ("stem", "units"))
    assert [
        key for key, value in fresh.state_dict().items() if not torch.equal(value, expected[key])
    ] == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda file: file.pop("body.0.res_layer.0.weight"),
            r"1 missing \(units.0.residual.0.weight\); name the parts that fit with start_parts",
        ),
        (
            lambda file: file.update({"body.24.res_layer.0.weight": torch.ones(32)}),
            r"1 unexpected \(units.24.residual.0.weight\)",
        ),
        (
            lambda file: file.update({"stem.7.weight": torch.ones(4)}),
            r"1 unexpected \(stem.7.weight\)",
        ),
        (
            lambda file: file.update({"output_layer.3.bias": torch.full((32,), torch.nan)}),
            r"hold NaN or infinity \(embedding.bias\)",
        ),
    ],
)
def test_a_file_of_face_evolve_that_is_incomplete_is_refused(tmp_path, change, message):
    file = theirs(small("facenet", 32))
    change(file)
    save_file(file, tmp_path / "w.safetensors")
    with pytest.raises(CheckpointError, match=message):
        read_body(small("facenet", 32), "head", tmp_path / "w.safetensors")


def test_another_network_does_not_know_face_evolves_names(tmp_path):
    save_file(theirs(small("facenet", 32)), tmp_path / "w.safetensors")
    with pytest.raises(
        CheckpointError,
        match=r"not fit ResNet34 apart from its head: .* missing .* unexpected \(body.0.res_.*; "
        r"no part of it fits: use another file$",
    ):
        read_body(small("resnet34", 32), "head", tmp_path / "w.safetensors")


def test_the_convolutions_of_a_torchvision_file_are_read(tmp_path):
    """Old files have no batch counters, and their classifier has other sizes."""
    trained, fresh = small("vgg16", seed=1), small("vgg16", seed=2)
    file = {
        name: value
        for name, value in copied(trained).items()
        if name.startswith("features.") and "num_batches" not in name
    }
    save_file({**file, "classifier.0.weight": torch.ones(2, 2)}, tmp_path / "vgg16_bn.safetensors")
    load_body(
        fresh,
        "head",
        read_body(fresh, "head", tmp_path / "vgg16_bn.safetensors", ("features",)),
        ("features",),
    )
    assert len(load_file(tmp_path / "vgg16_bn.safetensors")) == 13 * 6 + 1
    assert all(torch.equal(fresh.state_dict()[name], value) for name, value in file.items())
    assert fresh.features[1].num_batches_tracked == 0
    with pytest.raises(
        CheckpointError,
        match=r"1 unexpected \(classifier.0.weight\); name the parts .* start_parts \(features\)$",
    ):
        read_body(fresh, "head", tmp_path / "vgg16_bn.safetensors")
