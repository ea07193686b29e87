"""The networks of the papers: published sizes and layers, starting weights in other people's names, and taps that still learn."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from frostglass.core.errors import CheckpointError, ConfigError, ModelError
from frostglass.models.architectures._ir import FACE_EVOLVE
from frostglass.models.base import Preprocess, models
from frostglass.models.build import _builder, build
from frostglass.models.checkpoint import load_body, read_body
from frostglass.models.taps import find_head, find_taps, live_taps

FACES = (3, 64, 64)


def unfilled(name, side, *, classes=1000, channels=3, **options):
    """The network without memory for its weights, to count them in no time."""
    with torch.device("meta"):
        return _builder(name)(classes=classes, image_shape=(channels, side, side), **options)


def millions(module, *, learning=False):
    return round(
        sum(
            weight.numel() for weight in module.parameters() if weight.requires_grad or not learning
        )
        / 1e6,
        2,
    )


def small(name, side=64, *, seed=0, classes=7, **options):
    return build(name, classes=classes, image_shape=(3, side, side), seed=seed, width=4, **options)


def copied(module):
    return {name: value.clone() for name, value in module.state_dict().items()}


# --- sizes ------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "side", "options", "published"),
    [
        ("ir152", 64, {}, 62.60),
        ("ir152", 112, {}, 71.25),
        ("facenet", 64, {}, 35.44),
        ("facenet", 112, {}, 44.09),
        ("resnet34", 64, {}, 21.36),
        ("timm:resnet18", 224, {}, 11.69),
        ("timm:resnet34", 224, {}, 21.80),
        ("timm:resnet50", 224, {}, 25.56),
        ("timm:resnet152", 224, {}, 60.19),
        ("timm:resnest101e", 224, {}, 48.28),
        ("timm:maxvit_tiny_tf_224", 224, {}, 30.92),
        ("timm:vit_base_patch16_224", 224, {}, 86.57),
        ("timm:swinv2_tiny_window8_256", 224, {"window_size": 7}, 28.35),
    ],
)
def test_networks_have_their_published_size(name, side, options, published):
    assert millions(unfilled(name, side, **options)) == published


def test_vgg16_has_its_published_size_without_the_shift_that_never_learns():
    module = unfilled("vgg16", 64)
    assert millions(module, learning=True) == 16.77
    assert [name for name, weight in module.named_parameters() if not weight.requires_grad] == [
        "norm.bias"
    ]


def test_digit_networks_have_the_size_of_their_plan():
    mcnn = (49 + 1 + 2) * 64 + (25 * 64 + 3) * 128 + (25 * 128 + 3) * 256 + 257 * 10
    scnn = (
        (49 + 3) * 32
        + (25 * 32 + 3) * 64
        + (25 * 64 + 3) * 128
        + (9 * 128 + 3) * 256
        + (9 * 256 + 3) * 512
        + 513 * 10
    )
    for name, weights in (("mcnn", mcnn), ("scnn", scnn)):
        assert (
            sum(
                weight.numel() for weight in unfilled(name, 32, classes=10, channels=1).parameters()
            )
            == weights
        )


FIRST_CONVOLUTIONS = {7: 15.04, 8: 13.86, 9: 11.49, 10: 9.13, 11: 6.77, 12: 4.41, 13: 2.05}


@pytest.mark.parametrize(("frozen", "learning"), FIRST_CONVOLUTIONS.items())
def test_vgg16_with_its_first_convolutions_frozen(frozen, learning):
    module = unfilled("vgg16", 64)
    convolutions = [layer for layer in module.features if isinstance(layer, nn.Conv2d)]
    norms = [layer for layer in module.features if isinstance(layer, nn.BatchNorm2d)]
    for layer in (*convolutions[:frozen], *norms[:frozen]):
        layer.requires_grad_(False)
    assert millions(module, learning=True) == pytest.approx(
        learning, abs=0.0051
    )  # published figures are cut off or rounded


@pytest.mark.parametrize(
    ("name", "units", "frozen", "learning"), [("ir152", 50, 47, 17.83), ("facenet", 24, 6, 34.39)]
)
def test_ir_with_its_first_units_frozen(name, units, frozen, learning):
    module = unfilled(name, 64)
    assert len(module.units) == units
    module.units[:frozen].requires_grad_(False)
    assert millions(module, learning=True) == learning


# --- shapes -----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "shape", "options", "features"),
    [
        ("vgg16", (3, 64, 64), {}, 2048),
        ("vgg16", (3, 32, 32), {}, 512),
        ("vgg16", (1, 64, 96), {"feature_norm": False}, 3072),
        ("ir152", (3, 64, 64), {}, 512),
        ("facenet", (1, 48, 112), {}, 512),
        ("mcnn", (1, 32, 32), {}, 256),
        ("scnn", (1, 32, 32), {}, 512),
        ("resnet34", (3, 64, 64), {}, 50),
    ],
)
def test_the_head_reads_the_published_feature(name, shape, options, features):
    with torch.device("meta"):
        module = models.get(name)(classes=9, image_shape=shape, **options).eval()
        assert module(torch.zeros(2, *shape)).shape == (2, 9)
    assert (module.head.in_features, module.head.out_features) == (features, 9)


def test_vgg16_is_torchvisions_but_for_its_head():
    from torchvision.models import vgg16_bn

    theirs = vgg16_bn(weights=None).features.eval()
    ours = build("vgg16", classes=5, image_shape=FACES, seed=0).eval()
    ours.features.load_state_dict(theirs.state_dict())
    images = torch.rand(2, *FACES, generator=torch.Generator().manual_seed(3))
    feature = theirs(images).flatten(1)
    by_hand = (feature - ours.norm.running_mean) / (ours.norm.running_var + ours.norm.eps).sqrt()
    assert feature.shape == (2, 2048)
    assert torch.allclose(ours(images), by_hand @ ours.head.weight.T + ours.head.bias, atol=1e-5)


def test_mids_vgg16_has_nothing_between_flatten_and_head():
    assert [name for name, _ in small("vgg16", feature_norm=False).named_children()] == [
        "features",
        "flatten",
        "head",
    ]


def test_an_ir_unit_without_its_residual_keeps_every_second_pixel():
    units = small("facenet", 32).units.eval()
    maps = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(1))
    for unit, wanted in ((units[0], maps[:, :, ::2, ::2]), (units[1], maps)):
        nn.init.zeros_(unit.residual[4].weight)
        assert torch.equal(unit(maps), wanted)


def test_ir_maps_halve_four_times():
    module = small("ir152")
    sides = [
        module.units[:end](module.stem(torch.zeros(2, *FACES))).shape[1:] for end in (1, 4, 12, 50)
    ]
    assert sides == [(4, 32, 32), (8, 16, 16), (16, 8, 8), (32, 4, 4)]


def test_resnet34_is_torchvisions_up_to_its_pooled_feature():
    from torchvision.models import resnet34

    theirs, ours = (
        resnet34(weights=None).eval(),
        build("resnet34", classes=5, image_shape=FACES, seed=0).eval(),
    )
    state = [value for name, value in theirs.state_dict().items() if not name.startswith("fc.")]
    body = ours[:7]
    body.load_state_dict(dict(zip(body.state_dict(), state, strict=True)))
    images = torch.rand(2, *FACES, generator=torch.Generator().manual_seed(3))
    assert torch.allclose(
        body(images), nn.Sequential(*list(theirs.children())[:-1])(images).flatten(1), atol=1e-5
    )
    assert ours.stem(images).shape == (2, 64, 16, 16)
    assert ours[:6](images).shape == (2, 512, 1, 1)


@pytest.mark.parametrize(
    ("name", "shape", "options", "message"),
    [
        (
            "vgg16",
            (3, 16, 64),
            {},
            r"vgg16 halves the picture five times and needs 32x32 pixels or more, got 16x64: resize",
        ),
        (
            "mcnn",
            (1, 28, 28),
            {},
            r"mcnn is made for 32x32 pixels and takes no fewer, got 28x28: resize or pad",
        ),
        (
            "scnn",
            (1, 28, 28),
            {},
            r"scnn is made for 32x32 pixels and takes no fewer, got 28x28: resize or pad",
        ),
        (
            "vgg16",
            FACES,
            {"feature_norm": "no"},
            r"vgg16: feature_norm must be true or false, got 'no'",
        ),
        ("vgg16", FACES, {"width": 0}, r"vgg16: width must be a whole number of at least 1, got 0"),
        ("ir152", FACES, {"width": 0}, r"ir152: width must be a whole number of at least 1, got 0"),
        (
            "facenet",
            FACES,
            {"width": 1.5},
            r"facenet: width must be a whole number of at least 1, got 1.5",
        ),
        (
            "resnet34",
            FACES,
            {"width": 0},
            r"resnet34: width must be a whole number of at least 1, got 0",
        ),
    ],
)
def test_pictures_and_options_they_cannot_take_are_refused(name, shape, options, message):
    with pytest.raises((ConfigError, ModelError), match=message):
        build(name, classes=5, image_shape=shape, seed=0, **options)


# --- taps -------------------------------------------------------------------------------------------------------------------------------

BLOCKS = ("features.6", "features.13", "features.23", "features.33")


@pytest.mark.parametrize(
    ("name", "options", "taps", "sizes"),
    [
        (
            "vgg16",
            {"width": 4},
            (*BLOCKS, "norm"),
            [(4, 32, 32), (8, 16, 16), (16, 8, 8), (32, 4, 4), (128,)],
        ),
        (
            "vgg16",
            {"width": 4, "feature_norm": False},
            (*BLOCKS, "features.43"),
            [(4, 32, 32), (8, 16, 16), (16, 8, 8), (32, 4, 4), (32, 2, 2)],
        ),
        (
            "resnet34",
            {"width": 4},
            ("stem", "stage1", "stage2", "stage3", "stage4", "embedding", "embedding_norm"),
            [(4, 16, 16), (4, 16, 16), (8, 8, 8), (16, 4, 4), (32, 2, 2), (50,), (50,)],
        ),
        ("mcnn", {}, ("stage1", "stage2", "stage3"), [(64, 30, 30), (128, 13, 13), (256, 9, 9)]),
    ],
)
def test_taps_are_the_published_ones_unless_a_number_is_asked_for(name, options, taps, sizes):
    plain, whole = (
        build(name, classes=5, image_shape=FACES, seed=0, **options, **given)
        for given in ({}, {"mean": [0.5] * 3, "std": [0.5] * 3})
    )
    shapes = []
    for tap in taps:
        plain.get_submodule(tap).register_forward_hook(
            lambda layer, args, output: shapes.append(tuple(output.shape[1:]))
        )
    plain(torch.rand(2, *FACES))
    assert shapes == sizes
    assert find_taps(plain, FACES) == taps
    assert find_taps(whole, FACES) == tuple(f"net.{tap}" for tap in taps)
    assert len(find_taps(plain, FACES, 2)) == 2


@pytest.mark.parametrize(
    ("name", "taps"),
    [("ir152", ("units.15", "units.33", "units")), ("facenet", ("units.7", "units.15", "units"))],
)
def test_ir_networks_are_read_at_thirds(name, taps):
    assert find_taps(small(name, 32), (3, 32, 32)) == taps


def test_any_network_may_carry_published_taps():
    module = nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.ReLU(), nn.Linear(4, 3))
    module.published_taps = ("1",)
    assert find_taps(module, (3, 2, 2)) == ("1",)
    assert find_taps(module, (3, 2, 2), 3) == ("2",)


@pytest.mark.parametrize(
    ("taps", "message"),
    [
        (("stage1",), r"Sequential has no layer named 'stage1'"),
        (["1"], r"published_taps of Sequential must be a tuple of layer names, got \['1'\]"),
        ((1,), r"published_taps of Sequential must be a tuple of layer names, got \(1,\)"),
    ],
)
def test_published_taps_that_cannot_be_read_are_refused(taps, message):
    module = nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
    module.published_taps = taps
    with pytest.raises(ModelError, match=message):
        find_taps(module, (3, 2, 2))


def test_a_slice_of_a_tapped_network_is_a_plain_one():
    module = build("mcnn", classes=5, image_shape=(1, 32, 32), seed=0)
    assert module[:2].published_taps == ()
    assert module[:2](torch.zeros(2, 1, 32, 32)).shape == (2, 128, 5, 5)


def test_taps_behind_the_boundary_are_live():
    """The published boundary of the first seven convolutions leaves block 4 and the final feature to read."""
    module = small("vgg16", mean=[0.5] * 3, std=[0.5] * 3)
    module.net.features[:24].requires_grad_(False)
    taps = find_taps(module, FACES)
    assert live_taps(module, FACES, taps) == ("net.features.33", "net.norm")
    module.net.features[24].bias.requires_grad_(False)
    module.net.features[24].weight.requires_grad_(False)
    assert live_taps(module, FACES, taps) == (
        "net.features.33",
        "net.norm",
    )  # its batch norm still learns
    module.net.features.requires_grad_(False)
    assert live_taps(module, FACES, taps) == ("net.norm",)
    assert live_taps(module, FACES, ()) == ()


class Adds(nn.Module):
    """Adds what a learning layer says to a fixed one's output, in place; counts its runs; may fail."""

    def __init__(self):
        super().__init__()
        self.fixed, self.learns, self.last = (
            nn.Conv2d(3, 3, 1),
            nn.Conv2d(3, 3, 1),
            nn.Linear(12, 2),
        )
        self.noise = nn.Dropout(0.5)
        self.fixed.requires_grad_(False)
        self.register_buffer("runs", torch.zeros(()))
        self.fails = "never"

    def forward(self, images):
        self.runs += 1
        if self.fails == "always" or (self.fails == "with gradients" and torch.is_grad_enabled()):
            raise RuntimeError("out of order\nwith a second line")
        maps = self.noise(self.fixed(images))
        maps += self.learns(images) + torch.randn(1)
        return self.last(maps.flatten(1))


@pytest.mark.parametrize(
    ("fails", "message"),
    [
        ("never", ""),
        ("always", r"Adds cannot take 3x2x2 images: out of order$"),
        ("with gradients", r"Adds cannot be run with gradients: out of order$"),
    ],
)
def test_asking_which_taps_are_live_leaves_no_trace(fails, message):
    module = Adds()
    module.last.weight.grad = torch.ones(2, 12)
    module.fails = fails
    module.noise.eval()
    state, rng = copied(module), torch.get_rng_state()
    with torch.no_grad():
        if fails == "never":
            assert live_taps(module, (3, 2, 2), ("fixed", "noise", "learns")) == ("learns",)
        else:
            with pytest.raises(ModelError, match=message):
                live_taps(module, (3, 2, 2), ("fixed", "noise", "learns"))
    assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), rng)
    assert [name for name, weight in module.named_parameters() if not weight.requires_grad] == [
        "fixed.weight",
        "fixed.bias",
    ]
    assert [name for name, weight in module.named_parameters() if weight.grad is not None] == [
        "last.weight"
    ]
    assert [name for name, part in module.named_modules() if not part.training] == ["noise"]
    assert [name for name, part in module.named_modules() if part._forward_hooks] == []


def test_a_layer_that_is_not_there_cannot_be_live():
    with pytest.raises(ModelError, match=r"Adds has no layer named 'fxed': did you mean 'fixed'"):
        live_taps(Adds(), (3, 2, 2), ("fxed",))


# --- starting weights of others ---------------------------------------------------------------------------------------------------------

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
    wanted = {
        **trained.state_dict(),
        "head.weight": before["head.weight"],
        "head.bias": before["head.bias"],
    }
    assert [
        key for key, value in fresh.net.state_dict().items() if not torch.equal(value, wanted[key])
    ] == []


def test_of_a_face_evolve_file_for_larger_pictures_the_parts_that_fit_are_read(tmp_path):
    large, fresh = small("facenet", 112, seed=1), small("facenet", 64, seed=2)
    save_file(theirs(large), tmp_path / "ir50.safetensors")
    message = (
        r"ir50.safetensors does not fit IR apart from its head: 1 of another shape \(embedding.weight \(32, 1568\) for \(32, 512\)\); "
        r"name the parts that fit with start_parts \(stem, units, norm, embedding_norm\)$"
    )
    with pytest.raises(CheckpointError, match=message):
        read_body(fresh, "head", tmp_path / "ir50.safetensors")
    tensors = read_body(fresh, "head", tmp_path / "ir50.safetensors", ("stem", "units"))
    assert set(tensors) == {
        key for key in fresh.state_dict() if key.startswith(("stem.", "units."))
    }
    wanted = {
        **copied(fresh),
        **{key: value for key, value in large.state_dict().items() if key in tensors},
    }
    load_body(fresh, "head", tensors, ("stem", "units"))
    assert [
        key for key, value in fresh.state_dict().items() if not torch.equal(value, wanted[key])
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
def test_a_file_of_face_evolve_that_is_not_whole_is_refused(tmp_path, change, message):
    file = theirs(small("facenet", 32))
    change(file)
    save_file(file, tmp_path / "w.safetensors")
    with pytest.raises(CheckpointError, match=message):
        read_body(small("facenet", 32), "head", tmp_path / "w.safetensors")


def test_another_network_does_not_know_face_evolves_names(tmp_path):
    save_file(theirs(small("facenet", 32)), tmp_path / "w.safetensors")
    with pytest.raises(
        CheckpointError,
        match=r"not fit ResNet34 apart from its head: .* missing .* unexpected \(body.0.res_layer.*; no part of it fits: take another file$",
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
        match=r"1 unexpected \(classifier.0.weight\); name the parts that fit with start_parts \(features\)$",
    ):
        read_body(fresh, "head", tmp_path / "vgg16_bn.safetensors")


def test_torchvisions_names_are_ours():
    from torchvision.models import vgg16_bn

    with torch.device("meta"):
        theirs = {
            name: value.shape
            for name, value in vgg16_bn(weights=None).state_dict().items()
            if name.startswith("features.")
        }
    assert {
        name: value.shape
        for name, value in unfilled("vgg16", 64).state_dict().items()
        if name.startswith("features.")
    } == theirs
