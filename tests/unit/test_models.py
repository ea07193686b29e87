import copy
import sys

import pytest
import torch
from torch import nn

from frostglass.core.errors import ConfigError, ModelError
from frostglass.models.base import Preprocess
from frostglass.models.build import build
from frostglass.models.taps import find_head, find_taps
from frostglass.models.wrap import wrap

SHAPE = (3, 16, 16)
PIXELS = 3 * 16 * 16


def flat(*layers):
    return nn.Sequential(nn.Flatten(), *layers)


def make(name, shape=SHAPE, **options):
    return build(name, **{"classes": 5, "image_shape": shape, "seed": 0, **options})


# --- built in ---------------------------------------------------------------------------------------------------------------------------


def test_lenet_has_the_published_number_of_weights():
    assert (
        sum(weight.numel() for weight in make("lenet", (1, 32, 32), classes=10).parameters())
        == 61_706
    )


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


# --- by name ----------------------------------------------------------------------------------------------------------------------------


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
            r"cannot take 3x112x112 images: height \(28\) must be divisible.*such as 64, 128 or 224",
        ),
        (
            "timm:swinv2_tiny_window8_256",
            (3, 112, 112),
            r"cannot be built for 3x112x112 images: .*give window_size=7",
        ),
        (
            "timm:swinv2_tiny_window8_256",
            (3, 32, 32),
            r"puts out NaN or infinity for 3x32x32 images.*Swin needs 64 px",
        ),
        ("timm:inception_v3", (3, 32, 32), r"InceptionV3 cannot take 3x32x32 images: "),
        ("torchvision:resnet18", (1, 32, 32), r"takes 3 channels and not 1"),
        ("torchvision:vit_b_16", (3, 32, 48), r"takes square images and not 32x48"),
    ],
)
def test_sizes_a_network_cannot_take_are_errors_at_once(name, shape, message):
    with pytest.raises(ModelError, match=message) as caught:
        make(name, shape)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "resnte",
            r"no model named 'resnte': did you mean 'resnet'\? known: cnn, convmixer, facenet, ir152, lenet, mcnn, resnet, ",
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


# --- a user's own factory ---------------------------------------------------------------------------------------------------------------

FACTORY = """
from torch import nn

def net(*, classes, image_shape, hidden=8):
    pixels = image_shape[0] * image_shape[1] * image_shape[2]
    return nn.Sequential(nn.Flatten(), nn.Linear(pixels, hidden), nn.ReLU(), nn.Linear(hidden, classes))

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
            r"my_networks:net: got an unexpected keyword argument 'hiden'; it takes classes, image_shape, hidden",
        ),
        ("other_words", {}, r"missing a required argument: 'num_classes'; it takes num_classes"),
        (
            "one_too_many",
            {},
            r"puts out \(1, 6\) for one 3x16x16 image: expected logits of shape \(1, 5\)",
        ),
        ("nothing", {}, r"gave a NoneType: expected a torch.nn.Module"),
        ("lazy", {}, r"has lazy layers without weights yet"),
    ],
)
def test_a_users_factory_that_does_not_fit_is_refused(function, options, message):
    with pytest.raises((ConfigError, ModelError), match=message):
        make(f"my_networks:{function}", **options)


# --- any module -------------------------------------------------------------------------------------------------------------------------


class Functional(nn.Module):
    """Its last layer is a bare weight."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(PIXELS, 6)
        self.weight = nn.Parameter(torch.rand(5, 6))

    def forward(self, images):
        return nn.functional.linear(self.body(images.flatten(1)), self.weight)


class Applied(nn.Module):
    """A network whose output passes through one more function."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.first = nn.Linear(PIXELS, 6)
        self.last = nn.Linear(6, 5)

    def forward(self, images):
        return self.function(self.last(self.first(images.flatten(1)).relu()))


def with_noise(logits):
    return logits + torch.randn(logits.shape)


def test_head_inside_a_sequential_is_found():
    module = flat(
        nn.Linear(PIXELS, 5),
        nn.ReLU(),
        nn.Sequential(nn.Dropout(0.5), nn.Linear(5, 5), nn.Identity()),
    )
    assert find_head(module, SHAPE) == "3.1"


def test_head_that_is_a_convolution_to_one_pixel_is_found():
    module = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Conv2d(4, 5, 1), nn.Flatten()
    )
    target = wrap(module, classes=5, image_shape=SHAPE)
    assert target.head == "2"
    assert target.outputs(torch.rand(2, *SHAPE))[1].shape == (2, 4)


def test_an_activation_in_place_after_the_last_layer_hides_no_mistake():
    module = flat(nn.Linear(PIXELS, 5), nn.ReLU(inplace=True))
    with pytest.raises(
        ModelError, match=r"no linear layer of Sequential puts out its logits \(4, 5\)"
    ):
        find_head(module, SHAPE)


def test_a_functional_last_layer_is_an_error_that_lists_what_was_found():
    with pytest.raises(
        ModelError,
        match=r'the last ones it runs: body \(4, 6\): name the layer .* with head="name"',
    ):
        wrap(Functional(), classes=5, image_shape=SHAPE)


def test_a_layer_used_twice_is_no_head():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix = nn.Linear(PIXELS, PIXELS)

        def forward(self, images):
            return self.mix(self.mix(images.flatten(1)))

    with pytest.raises(ModelError, match="no linear layer of Twice"):
        find_head(Twice(), SHAPE)


def test_named_layers_are_used_as_given():
    target = wrap(
        Applied(with_noise), classes=list("abcde"), image_shape=SHAPE, head="last", taps=["first"]
    )
    assert (target.head, target.taps, target.classes) == (
        "last",
        ("first",),
        ("a", "b", "c", "d", "e"),
    )
    assert target.info == {"architecture": "Applied", "parameters": PIXELS * 6 + 6 + 6 * 5 + 5}


def test_classes_by_number_get_names():
    assert wrap(flat(nn.Linear(PIXELS, 3)), classes=3, image_shape=SHAPE).classes == ("0", "1", "2")
    for thing, told in (
        (torch.relu, "<built-in method relu"),
        (nn.Linear, "<class 'torch.nn.modules.linear.Linear'>"),
        (None, "None"),
    ):
        with pytest.raises(
            ModelError,
            match=f"^expected a torch.nn.Module to wrap, got {told}.*: a function is called by the forward of a small module",
        ):
            wrap(thing, classes=5, image_shape=SHAPE)


def test_taps_of_shallow_networks():
    assert find_taps(flat(nn.Linear(PIXELS, 5)), SHAPE) == ()
    assert find_taps(flat(nn.Linear(PIXELS, 8), nn.ReLU(), nn.Linear(8, 5)), SHAPE) == ("2",)
    assert find_taps(
        flat(nn.Linear(PIXELS, 8), nn.ReLU(), nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, 5)), SHAPE
    ) == ("2", "4")


def test_taps_skip_layers_without_a_tensor():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Conv2d(3, 4, 3, stride=4)
            self.rnn = nn.LSTM(4, 6, batch_first=True)
            self.last = nn.Linear(6, 5)

        def forward(self, images):
            return self.last(self.rnn(self.first(images).flatten(2).transpose(1, 2))[0][:, -1])

    assert find_taps(Recurrent(), SHAPE) == ("first",)
    with pytest.raises(ModelError, match="the layer 'rnn' does not put out a tensor"):
        wrap(Recurrent(), classes=5, image_shape=SHAPE, taps=["rnn"])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"head": "lst"}, r"Applied has no layer named 'lst': did you mean 'last'"),
        ({"taps": ["frist"]}, r"Applied has no layer named 'frist': did you mean 'first'"),
        ({"taps": [""]}, r"Applied has no layer named ''"),
        ({"head": "unused"}, r"the layer 'unused' runs 0 times"),
        ({"classes": 6}, r"gives 5 logits an image and 6 classes are named"),
        ({"classes": ["a", "b", "c", "d", "d"]}, r"expected a sequence of different class names"),
        ({"classes": "abcde"}, r"expected a sequence of different class names"),
        ({"image_shape": (3, 8, 8)}, r"Applied cannot take 3x8x8 images: .*mat1 and mat2"),
    ],
)
def test_wrong_words_about_a_module_are_refused(given, message):
    module = Applied(torch.tanh)
    module.unused = nn.Linear(2, 2)
    with pytest.raises(ModelError, match=message):
        wrap(module, **{"classes": 5, "image_shape": SHAPE, "head": "last", **given})


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda logits: (logits, logits), r"Applied gives a tuple: return the logits alone"),
        (lambda logits: {"logits": logits}, r"Applied gives a dict: return the logits alone"),
        (lambda logits: logits.softmax(1), r"Applied gives probabilities; return logits"),
        (lambda logits: logits.argmax(1), r"gives torch.int64 \(8,\) for 8 images"),
        (lambda logits: logits[:, :, None], r"gives torch.float32 \(8, 5, 1\) for 8 images"),
        (lambda logits: logits / 0, r"puts out NaN or infinity"),
    ],
)
def test_outputs_that_are_no_logits_are_refused(function, message):
    with pytest.raises(ModelError, match=message):
        wrap(Applied(function), classes=5, image_shape=SHAPE, head="last")


def test_log_probabilities_are_logits():
    assert (
        wrap(
            Applied(lambda logits: logits.log_softmax(1)), classes=5, image_shape=SHAPE, head="last"
        ).head
        == "last"
    )


def residue(module):
    """Everything about a module that looking at it must not change."""
    return {
        "modes": [part.training for part in module.modules()],
        "weights": copy.deepcopy(module.state_dict()),
        "flags": [
            (weight.requires_grad, None if weight.grad is None else weight.grad.clone())
            for weight in module.parameters()
        ],
        "hooks": [
            len(part._forward_hooks) + len(part._forward_pre_hooks) for part in module.modules()
        ],
        "random": torch.get_rng_state(),
    }


def assert_same(before, after):
    assert before["modes"] == after["modes"]
    assert before["hooks"] == after["hooks"]
    assert torch.equal(before["random"], after["random"])
    assert all(
        torch.equal(value, after["weights"][name]) for name, value in before["weights"].items()
    )
    for (needs, grad), (needs_after, grad_after) in zip(
        before["flags"], after["flags"], strict=True
    ):
        assert needs == needs_after
        assert grad is grad_after is None or torch.equal(grad, grad_after)


class Touchy(nn.Module):
    """Counts its runs in a buffer, draws from the global generator, and may fail in the middle."""

    def __init__(self, fails):
        super().__init__()
        self.fails = fails
        self.net = nn.Sequential(
            nn.Conv2d(3, 4, 3),
            nn.BatchNorm2d(4),
            nn.Dropout(0.5),
            nn.Flatten(),
            nn.Linear(4 * 14 * 14, 5),
        )
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, images):
        self.seen += 1
        feature = self.net[:4](images) + torch.randn(1)
        if self.fails:
            raise RuntimeError("out of order\nwith a second line")
        return self.net[4](feature)


def touchy(fails):
    module = Touchy(fails=False)
    module(torch.rand(2, *SHAPE)).sum().backward()
    module.net[0].weight.requires_grad_(False)
    module.net[1].eval()
    module.fails = fails
    return module


def test_looking_at_a_module_leaves_no_trace():
    module = touchy(fails=False)
    before = residue(module)
    assert wrap(module, classes=5, image_shape=SHAPE).head == "net.4"
    assert_same(before, residue(module))


@pytest.mark.parametrize(
    "look", [find_head, find_taps, lambda module, shape: wrap(module, classes=5, image_shape=shape)]
)
def test_a_module_that_fails_is_left_as_it_was(look):
    module = touchy(fails=True)
    before = residue(module)
    with pytest.raises(ModelError, match=r"Touchy cannot take 3x16x16 images: out of order$"):
        look(module, SHAPE)
    assert_same(before, residue(module))
