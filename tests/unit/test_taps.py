"""Taps: those of the papers, any network's own, and which of them depend on trained weights."""

import copy

import pytest
import torch
from torch import nn

from frostglass.core.errors import ModelError
from frostglass.models.build import build
from frostglass.models.taps import find_taps, live_taps

FACES = (3, 64, 64)


def small(name, side=64, **options):
    return build(name, classes=7, image_shape=(3, side, side), seed=0, width=4, **options)


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
    """With the first seven convolutions frozen, block 4 and the final feature are live."""
    module = small("vgg16", mean=[0.5] * 3, std=[0.5] * 3)
    module.net.features[:24].requires_grad_(False)
    taps = find_taps(module, FACES)
    assert live_taps(module, FACES, taps) == ("net.features.33", "net.norm")
    module.net.features[24].bias.requires_grad_(False)
    module.net.features[24].weight.requires_grad_(False)
    # Its batch norm still learns.
    assert live_taps(module, FACES, taps) == ("net.features.33", "net.norm")
    module.net.features.requires_grad_(False)
    assert live_taps(module, FACES, taps) == ("net.norm",)
    assert live_taps(module, FACES, ()) == ()


class Adds(nn.Module):
    """Adds the output of a trained layer to that of a fixed one, in place; may fail."""

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
def test_live_taps_leaves_the_module_unchanged(fails, message):
    module = Adds()
    module.last.weight.grad = torch.ones(2, 12)
    module.fails = fails
    module.noise.eval()
    state, rng = copy.deepcopy(module.state_dict()), torch.get_rng_state()
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
