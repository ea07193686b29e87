"""The networks of the papers have their published sizes and layers."""

import pytest
import torch
from torch import nn

from frostglass.core.errors import ConfigError, ModelError
from frostglass.models.base import models
from frostglass.models.build import _builder, build

FACES = (3, 64, 64)


def without_memory(name, side, *, classes=1000, channels=3, **options):
    """The network without memory for its weights, to count them quickly."""
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


# Sizes


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
    assert millions(without_memory(name, side, **options)) == published


def test_vgg16_has_its_published_size_without_the_shift_that_never_learns():
    module = without_memory("vgg16", 64)
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
                weight.numel()
                for weight in without_memory(name, 32, classes=10, channels=1).parameters()
            )
            == weights
        )


FIRST_CONVOLUTIONS = {7: 15.04, 8: 13.86, 9: 11.49, 10: 9.13, 11: 6.77, 12: 4.41, 13: 2.05}


@pytest.mark.parametrize(("frozen", "learning"), FIRST_CONVOLUTIONS.items())
def test_vgg16_with_its_first_convolutions_frozen(frozen, learning):
    module = without_memory("vgg16", 64)
    convolutions = [layer for layer in module.features if isinstance(layer, nn.Conv2d)]
    norms = [layer for layer in module.features if isinstance(layer, nn.BatchNorm2d)]
    for layer in (*convolutions[:frozen], *norms[:frozen]):
        layer.requires_grad_(False)
    # Published figures are truncated or rounded.
    assert millions(module, learning=True) == pytest.approx(learning, abs=0.0051)


@pytest.mark.parametrize(
    ("name", "units", "frozen", "learning"), [("ir152", 50, 47, 17.83), ("facenet", 24, 6, 34.39)]
)
def test_ir_with_its_first_units_frozen(name, units, frozen, learning):
    module = without_memory(name, 64)
    assert len(module.units) == units
    module.units[:frozen].requires_grad_(False)
    assert millions(module, learning=True) == learning


# Shapes


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
    for unit, expected in ((units[0], maps[:, :, ::2, ::2]), (units[1], maps)):
        nn.init.zeros_(unit.residual[4].weight)
        assert torch.equal(unit(maps), expected)


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
            r"vgg16 needs images of at least 32x32 pixels, got 16x64: resize",
        ),
        (
            "mcnn",
            (1, 28, 28),
            {},
            r"mcnn needs images of at least 32x32 pixels, got 28x28: resize or pad",
        ),
        (
            "scnn",
            (1, 28, 28),
            {},
            r"scnn needs images of at least 32x32 pixels, got 28x28: resize or pad",
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
def test_sizes_and_options_they_cannot_take_are_refused(name, shape, options, message):
    with pytest.raises((ConfigError, ModelError), match=message):
        build(name, classes=5, image_shape=shape, seed=0, **options)


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
        for name, value in without_memory("vgg16", 64).state_dict().items()
        if name.startswith("features.")
    } == theirs
