"""Networks cut in two: the halves equal the whole, and other cuts are refused."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from frostglass.core.errors import ModelError
from frostglass.models.base import Preprocess
from frostglass.models.build import build
from frostglass.models.cut import channel_axis, cut, halves
from frostglass.runtime.freezing import frozen
from worlds import target

SMALL = {
    "cnn": ({"width": 2}, (3, 16, 16)),
    "vgg16": ({"width": 2}, (3, 32, 32)),
    "resnet": ({"width": 2, "depth": 1}, (3, 16, 16)),
}


def make(name, **more):
    options, shape = SMALL[name]
    return build(name, classes=5, image_shape=shape, seed=0, **options, **more), shape


def noise(shape, count=3):
    return torch.rand(count, *shape, generator=torch.Generator().manual_seed(1))


def assert_whole(module, parts, shape):
    images = noise(shape)
    with frozen(module, parts.encoder, parts.rest), torch.no_grad():
        features = parts.encoder(images)
        assert tuple(features.shape[1:]) == parts.feature_shape
        torch.testing.assert_close(parts.rest(features), module(images), rtol=1e-4, atol=1e-6)
    assert parts.image_shape == shape


@pytest.mark.parametrize("name", ["cnn", "vgg16"])
def test_layers_in_a_row_can_be_cut_anywhere(name):
    module, shape = make(name)
    for tap in [tap for tap, _ in module.named_modules() if tap]:
        assert_whole(module, cut(module, tap, shape), shape)


def test_a_residual_network_can_be_cut_wherever_no_skip_is_split():
    module, shape = make("resnet")
    refused = {}
    for tap in [tap for tap, _ in module.named_modules() if tap]:
        try:
            assert_whole(module, cut(module, tap, shape), shape)
        except ModelError as error:
            refused[tap] = str(error)
    reason = (
        "splits a skip connection: later layers of Sequential also read what comes before it; "
        "cut behind the block that contains it"
    )
    assert refused == {tap: f"a cut at {tap!r} {reason}" for tap in refused}
    # If a block changes shape, both of its paths begin after its first norm and activation.
    inside = {"norm1", "relu1", "conv1", "norm2", "relu2", "conv2", "project"}
    whole_until = {f"stage{stage}.0.{layer}" for stage in (2, 3) for layer in ("norm1", "relu1")}
    blocks = [name for name, _ in module.named_modules() if name.count(".") == 1]
    expected = {f"{block}.{layer}" for block in blocks for layer in inside} & {
        name for name, _ in module.named_modules()
    }
    assert set(refused) == expected - whole_until


@pytest.mark.parametrize(("side", "feature"), [(64, (64, 16, 16)), (128, (64, 32, 32))])
def test_crafters_resnet18(side, feature):
    module = build("timm:resnet18", classes=7, image_shape=(3, side, side), seed=0)
    parts = cut(module, "layer1", (3, side, side))
    assert parts.feature_shape == feature
    assert sum(weight.numel() for weight in parts.encoder.parameters()) == 157_504
    assert_whole(module, parts, (3, side, side))


def test_crafters_vgg16():
    """The first two blocks; small linear layers, because a hundred million weights are slow."""
    from torchvision.models import vgg16_bn

    with torch.device("meta"):
        features = vgg16_bn().features
    features = features.to_empty(device="cpu")
    for layer in features:
        if hasattr(layer, "reset_parameters"):
            layer.reset_parameters()
    module = nn.Sequential()
    module.add_module("features", features)
    module.add_module("classifier", nn.Sequential(nn.Flatten(), nn.Linear(2048, 7)))
    parts = cut(module, "features.13", (3, 64, 64))
    assert parts.feature_shape == (128, 16, 16)
    assert_whole(module, parts, (3, 64, 64))


def test_advlearns_resnet50():
    shape = (3, 64, 64)
    module = build("timm:resnet50", classes=7, image_shape=shape, seed=0)
    taps = {
        "conv1": (64, 32, 32),
        "layer1": (256, 16, 16),
        "layer2": (512, 8, 8),
        "layer3": (1024, 4, 4),
        "layer4": (2048, 2, 2),
        "global_pool": (2048,),
        "fc": (7,),
    }
    total = sum(weight.numel() for weight in module.parameters())
    for tap, feature in taps.items():
        parts = cut(module, tap, shape)
        assert parts.feature_shape == feature
        assert (
            sum(
                weight.numel()
                for half in (parts.encoder, parts.rest)
                for weight in half.parameters()
            )
            == total
        )
    assert_whole(module, parts, shape)


def test_a_transformer_is_cut_into_tokens():
    shape = (3, 32, 32)
    options = {"embed_dim": 12, "depth": 2, "num_heads": 2, "patch_size": 8}
    module = build("timm:vit_tiny_patch16_224", classes=5, image_shape=shape, seed=0, **options)
    parts = cut(module, "blocks.0", shape)
    assert parts.feature_shape == (17, 12)
    assert_whole(module, parts, shape)


def test_each_half_has_its_own_weights_which_are_the_networks():
    module, shape = make("resnet")
    parts = cut(module, "stage1", shape)
    ours, theirs = (
        {id(weight) for weight in half.parameters()} for half in (parts.encoder, parts.rest)
    )
    assert not ours & theirs
    assert ours | theirs == {id(weight) for weight in module.parameters()}
    before = parts.encoder(noise(shape))
    with torch.no_grad():
        module.stem.weight.mul_(2)
    assert not torch.equal(parts.encoder(noise(shape)), before)


def test_names_are_those_of_the_network_also_where_it_is_normalised():
    plain, shape = make("cnn")
    module, _ = make("cnn", mean=[0.5, 0.4, 0.3], std=[0.2, 0.2, 0.2])
    assert isinstance(module, Preprocess)
    named, full = cut(module, "stage2", shape), cut(module, "net.stage2", shape)
    assert named.tap == full.tap == "net.stage2"
    assert cut(plain, "stage2", shape).tap == "stage2"
    with frozen(module, plain, named.encoder, full.encoder), torch.no_grad():
        seen = named.encoder(noise(shape))
        assert torch.equal(seen, full.encoder(noise(shape)))
        plain.load_state_dict(module.net.state_dict())
        inner = cut(plain, "stage2", shape).encoder.eval()
        torch.testing.assert_close(seen, inner((noise(shape) - module.mean) / module.std))


class Branching(nn.Module):
    """Bright and dark images take different paths, which cannot be traced."""

    def __init__(self, skip=False):
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 5)
        self.skip = skip

    def forward(self, images):
        maps = self.norm(self.first(images))
        maps = maps.relu() if maps.mean() > 0 else maps.tanh()
        return self.head(maps.mean((2, 3))) + (images.mean((1, 2, 3))[:, None] if self.skip else 0)


def test_a_network_that_cannot_be_traced_is_cut_by_running_it():
    module = Branching()
    parts = cut(module, "norm", (3, 8, 8))
    assert type(parts.encoder).__name__ == "_Until"
    assert_whole(module, parts, (3, 8, 8))
    assert not module.norm._forward_hooks
    with pytest.raises(
        ModelError,
        match="a cut at 'norm' splits a skip connection: later layers of Branching also read",
    ):
        cut(Branching(skip=True), "norm", (3, 8, 8))


def test_gradients_pass_through_both_kinds_of_halves():
    module, shape = make("cnn")
    for whole, tap, size in ((module, "stage1", shape), (Branching(), "norm", (3, 8, 8))):
        parts = cut(whole, tap, size)
        images = noise(size).requires_grad_()
        with frozen(whole, parts.encoder, parts.rest):
            (through,) = torch.autograd.grad(parts.rest(parts.encoder(images))[:, 0].sum(), images)
            (straight,) = torch.autograd.grad(whole(images)[:, 0].sum(), images)
        torch.testing.assert_close(through, straight)


class FunctionalDropout(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4 * 64, 5)

    def forward(self, images):
        return self.head(F.dropout(self.first(images), 0.5, self.training).flatten(1))


def test_a_network_in_training_mode_is_cut_as_it_will_be_used():
    module = FunctionalDropout().train()
    assert_whole(module, cut(module, "first", (3, 8, 8)), (3, 8, 8))
    assert module.training


class Counting(nn.Module):
    """Returns something else at each call."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, maps):
        self.calls += 1
        return maps * self.calls


class Patches(nn.Module):
    def forward(self, images):
        return images.flatten(2).transpose(1, 2).flatten(0, 1)  # a row for each pixel


class Rows(nn.Module):
    def forward(self, rows):
        return rows.unflatten(0, (-1, 64)).mean(1)


def test_places_that_cannot_be_cut():
    module, shape = make("resnet")
    with pytest.raises(
        ModelError, match=r"Sequential has no layer named 'stage9': did you mean .*'stage[123]'"
    ):
        cut(module, "stage9", shape)
    row = nn.Sequential(Patches(), Rows(), nn.Linear(3, 5))
    with pytest.raises(
        ModelError,
        match=r"'0' returns \(128, 3\) for 2 images: cut behind a layer that returns one feature",
    ):
        cut(row, "0", (3, 8, 8))
    odd = nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, 5), Counting())
    with pytest.raises(
        ModelError,
        match="Sequential cut at '1' does not compute what the whole network does: cut it behind",
    ):
        cut(odd, "1", (3, 8, 8))
    twice = nn.Linear(6, 6)
    with pytest.raises(ModelError, match="'0' runs 2 times for one batch"):
        cut(Twice(twice), "0", (1, 2, 3))


class Twice(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.add_module("0", layer)

    def forward(self, images):
        layer = self.get_submodule("0")
        return layer(layer(images.flatten(1)))


def test_the_network_is_left_unchanged():
    module, shape = make("resnet")
    module.train()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    state = torch.get_rng_state()
    cut(module, "stage2", shape)
    assert torch.equal(state, torch.get_rng_state())
    assert all(part.training for part in module.modules())
    assert all(weight.requires_grad and weight.grad is None for weight in module.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())


def test_a_target_is_cut_at_its_cut():
    whole = target()
    with pytest.raises(
        ModelError,
        match="this target is not cut: name the layer whose features leave the device",
    ):
        halves(whole)
    parts = halves(replace(whole, cut="2"))
    assert parts.feature_shape == (8, 8, 8)
    assert_whole(whole.module, parts, whole.image_shape)


@pytest.mark.parametrize(
    ("feature", "image", "axis"),
    [
        ((5,), (3, 16, 16), 0),
        ((16, 5), (3, 16, 16), 1),
        ((5, 8, 8), (3, 16, 16), 0),
        ((8, 8, 5), (3, 16, 16), 2),
        ((8, 8, 8), (3, 16, 16), 0),
        ((1, 1, 5), (3, 16, 16), 2),
        ((5, 1, 1), (3, 16, 16), 0),
        ((8, 12, 5), (3, 32, 48), 2),
        ((8, 8, 12), (3, 32, 48), 0),
        ((2, 5, 4, 4), (3, 16, 16), 0),
    ],
)
def test_the_axis_of_the_channels(feature, image, axis):
    assert channel_axis(feature, image) == axis
