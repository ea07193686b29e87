"""Networks by name: built-ins, those of timm and torchvision, and a user's own."""

import sys

import pytest
import torch
from torch import nn

from frostglass.core.errors import ConfigError, ModelError
from frostglass.models.base import Preprocess
from frostglass.models.build import build
from frostglass.models.taps import find_head, find_taps

SHAPE = (3, 16, 16)


def make(name, shape=SHAPE, **options):
    return build(name, **{"classes": 5, "image_shape": shape, "seed": 0, **options})


# Built in


def test_lenet_has_the_published_number_of_weights():
    assert (
        sum(weight.numel() for weight in make("lenet", (1, 32, 32), classes=10).parameters())
        == 61_706
    )


def test_cnn_may_pool_before_its_relu():
    stage = make("cnn", (3, 16, 16))[0].train()
    convolution, norm, pool, relu = stage
    images = torch.rand(4, 3, 16, 16)
    results = []
    for layers in ((norm, pool, relu), (norm, relu, pool)):
        stage.zero_grad()
        output = nn.Sequential(convolution, *layers)(images)
        output.square().sum().backward()
        results.append((output, convolution.weight.grad.clone()))
    torch.testing.assert_close(*results)


def test_cnn_stops_halving_at_four_by_four():
    for side in (16, 32, 64):
        module = make("cnn", (3, side, side))
        stages = module[:4]
        assert stages(torch.zeros(2, 3, side, side)).shape == (2, 256, 4, 4)


def test_lenet_leaves_a_map_of_four_by_four_from_the_smallest_images():
    assert make("lenet")[:2](torch.zeros(2, *SHAPE)).shape == (2, 16, 4, 4)


def test_a_residual_block_without_its_branch_changes_nothing():
    block = make("resnet").stage1[0].eval()
    nn.init.zeros_(block.conv2.weight)
    maps = torch.randn(2, 16, 8, 8, generator=torch.Generator().manual_seed(2))
    assert torch.equal(block(maps), maps)


@pytest.mark.parametrize(
    ("name", "options"), [("cnn", {"width": 8}), ("resnet", {"width": 4}), ("resnet", {"depth": 1})]
)
def test_options_change_the_size(name, options):
    plain, changed = make(name), make(name, **options)
    assert sum(p.numel() for p in changed.parameters()) < sum(p.numel() for p in plain.parameters())


@pytest.mark.parametrize("width", [0, 2.5, True, "8"])
def test_a_width_that_is_no_whole_number_is_refused(width):
    with pytest.raises(ConfigError, match="cnn: width must be a whole number of at least 1"):
        make("cnn", width=width)


def test_images_need_not_be_square():
    assert make("cnn", (3, 16, 24))(torch.zeros(2, 3, 16, 24)).shape == (2, 5)


# By name


def test_timm_network_at_a_small_size():
    module = make("timm:resnet18", (1, 32, 32))
    assert module(torch.zeros(2, 1, 32, 32)).shape == (2, 5)
    assert find_head(module, (1, 32, 32)) == "fc"
    assert find_taps(module, (1, 32, 32)) == ("layer1", "layer3", "layer4")
    assert find_taps(module, (1, 32, 32), count=4) == ("layer1", "layer2", "layer3", "layer4")


def test_timm_transformer_is_built_for_the_image_size():
    module = make("timm:vit_tiny_patch16_224", (3, 32, 32), depth=3)
    assert module.pos_embed.shape[1] == 1 + 2 * 2
    assert find_head(module, (3, 32, 32)) == "head"
    assert find_taps(module, (3, 32, 32)) == ("blocks.0", "blocks.1", "blocks")


def test_torchvision_network():
    module = make("torchvision:vgg11_bn", (3, 64, 64))
    assert find_head(module, (3, 64, 64)) == "classifier.6"
    assert find_taps(module, (3, 64, 64)) == ("features.10", "features.24", "classifier.5")


def test_torchvision_networks_with_side_outputs_give_logits_alone_while_training():
    assert make("torchvision:googlenet", (3, 64, 64)).train()(torch.rand(2, 3, 64, 64)).shape == (
        2,
        5,
    )


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        (
            "timm:maxvit_tiny_tf_224",
            (3, 112, 112),
            r"cannot take 3x112x112 images: height \(28\) must be divisible.*use 64, 128 or 224",
        ),
        (
            "timm:swinv2_tiny_window8_256",
            (3, 112, 112),
            r"cannot be built for 3x112x112 images: .*set window_size=7",
        ),
        (
            "timm:swinv2_tiny_window8_256",
            (3, 32, 32),
            r"returns NaN or infinity for 3x32x32 images.*Swin needs 64 px",
        ),
        ("timm:inception_v3", (3, 32, 32), r"InceptionV3 cannot take 3x32x32 images: "),
        ("torchvision:resnet18", (1, 32, 32), r"takes 3 channels and not 1"),
        ("torchvision:vit_b_16", (3, 32, 48), r"takes square images and not 32x48"),
    ],
)
def test_sizes_a_network_cannot_take_are_refused(name, shape, message):
    with pytest.raises(ModelError, match=message) as caught:
        make(name, shape)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "resnte",
            r"no model named 'resnte': did you mean 'resnet'\? known: cnn, convmixer, facenet, ",
        ),
        ("resnet18", r"did you mean 'timm:resnet18'\?"),
        ("alexnet", r"did you mean 'torchvision:alexnet'\?"),
        ("timm:resnet81", r"timm has no model named 'resnet81': did you mean 'resnet18'"),
        ("timm:hf_hub:someone/something", r"timm has no model named 'hf_hub:someone/something'"),
        (
            "torchvision:rsnet18",
            r"torchvision has no classifier named 'rsnet18': did you mean 'resnet18'",
        ),
        ("torchvision:fcn_resnet50", r"torchvision has no classifier named 'fcn_resnet50'"),
        ("no_such_package:net", r"cannot import 'no_such_package'"),
        ("json:lods", r"no function 'lods' in 'json': did you mean 'loads'"),
    ],
)
def test_unknown_names_are_refused_with_the_nearest(name, message):
    with pytest.raises(ConfigError, match=message):
        make(name)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "timm:resnet18",
            {"wdith": 3},
            r"timm:resnet18 refuses an option: .*unexpected keyword argument 'wdith'",
        ),
        (
            "torchvision:resnet18",
            {"wdith": 3},
            r"torchvision:resnet18 refuses an option: .*unexpected keyword argument 'wdith'",
        ),
        (
            "timm:resnet18",
            {"pretrained": True},
            r"does not take 'pretrained' here: load weights with load_weights",
        ),
        ("timm:resnet18", {"checkpoint_path": "w.pth"}, r"does not take 'checkpoint_path' here"),
        ("torchvision:resnet18", {"weights": "DEFAULT"}, r"does not take 'weights' here"),
        ("cnn", {"mean": [0.5] * 3}, r"give both mean and std"),
        (
            "cnn",
            {"mean": [0.5], "std": [0.5]},
            r"3 channels need as many values, got 1 of mean and 1 of std",
        ),
        ("cnn", {"mean": [0.5] * 3, "std": [0.5, 0.0, 0.5]}, r"std must be above zero, got 0.0"),
        (
            "cnn",
            {"image_shape": (3, 16)},
            r"image_shape must be \(channels, height, width\), got \(3, 16\)",
        ),
        ("cnn", {"classes": 0}, r"classes must be a whole number of at least 1, got 0"),
    ],
)
def test_options_that_cannot_be_used_are_refused(name, options, message):
    with pytest.raises(ConfigError, match=message):
        make(name, **options)


def test_mean_and_std_are_applied_inside():
    plain = make("cnn").eval()
    whole = make("cnn", mean=[0.1, 0.2, 0.3], std=[0.5, 0.6, 0.7]).eval()
    images = torch.rand(2, *SHAPE, generator=torch.Generator().manual_seed(1))
    by_hand = (images - torch.tensor([0.1, 0.2, 0.3]).view(3, 1, 1)) / torch.tensor(
        [0.5, 0.6, 0.7]
    ).view(3, 1, 1)
    assert isinstance(whole, Preprocess)
    assert not isinstance(plain, Preprocess)
    assert set(whole.state_dict()) == {f"net.{name}" for name in plain.state_dict()}
    assert torch.equal(whole(images), plain(by_hand))
    assert find_head(whole, SHAPE) == "net.head"
    assert find_taps(whole, SHAPE) == ("net.stage1", "net.stage3", "net.stage4")


# A user's own factory

FACTORY = """
from torch import nn

def net(*, classes, image_shape, hidden=8):
    pixels = image_shape[0] * image_shape[1] * image_shape[2]
    first, last = nn.Linear(pixels, hidden), nn.Linear(hidden, classes)
    return nn.Sequential(nn.Flatten(), first, nn.ReLU(), last)

def one_too_many(*, classes, image_shape):
    return net(classes=classes + 1, image_shape=image_shape)

def nothing(*, classes, image_shape):
    return None

def other_words(*, num_classes):
    return None

def lazy(*, classes, image_shape):
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(classes))
"""


@pytest.fixture
def factory(tmp_path, monkeypatch):
    (tmp_path / "my_networks.py").write_text(FACTORY)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("my_networks", None)


@pytest.mark.usefixtures("factory")
def test_a_users_factory_gets_classes_shape_and_options():
    assert make("my_networks:net", hidden=6)[1].out_features == 6


@pytest.mark.usefixtures("factory")
@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        (
            "net",
            {"hiden": 6},
            r"my_networks:net: got an unexpected keyword argument 'hiden'; it takes classes, ima",
        ),
        ("other_words", {}, r"missing a required argument: 'num_classes'; it takes num_classes"),
        (
            "one_too_many",
            {},
            r"returns \(1, 6\) for one 3x16x16 image: expected logits of shape \(1, 5\)",
        ),
        ("nothing", {}, r"returned a NoneType: expected a torch.nn.Module"),
        ("lazy", {}, r"has lazy layers without weights"),
    ],
)
def test_a_users_factory_that_does_not_fit_is_refused(function, options, message):
    with pytest.raises((ConfigError, ModelError), match=message):
        make(f"my_networks:{function}", **options)
